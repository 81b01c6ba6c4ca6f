"""Server optimisers: the server steps towards the clients' mean instead of taking it (Reddi et al., "Adaptive Federated
Optimization", ICLR 2021; FedAvgM: Hsu et al. 2019).

With x the server's model and xbar what the method would make of it in this round, the pseudo-gradient is

    g = x - xbar                                                                     (`server_optimized`)

    fedavgm       u <- momentum u + g,                 x <- x - lr u                 (`FedAvgM`)
    fedadagrad    v <- v + g^2                                                       (`FedAdagrad`)
    fedadam       v <- beta2 v + (1 - beta2) g^2                                     (`FedAdam`)
    fedyogi       v <- v - (1 - beta2) g^2 sign(v - g^2)                             (`FedYogi`)

where the last three have  m <- beta1 m + (1 - beta1) g,  x <- x - lr m / (sqrt(v) + tau)  (Algorithm 2 of the paper),
and begin with u = m = 0 and v = tau^2. There is no correction of the bias at the start, as in the paper. The paper's
Delta is -g. FedAvgM with momentum 0 and lr 1 is the method without a server optimiser (tested).

This is a wrapper around the server's functions of any method that averages (`server_optimized`), not a method: robust
averages and clipped or noised messages come before it. Buffers and frozen parameters are averaged, not stepped. What
the optimiser remembers is a part of the server's state, and is sent nowhere. Any optimiser (`coterie.core.optimizers`)
can be the server's.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.method import Newcomer, Population
from coterie.core.optimizers import Optimizer
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.parts.robust import AnyMethod, averaged_fields

Rate = Annotated[float, Field(gt=0, description="step size of the server")]
Beta1 = Annotated[float, Field(ge=0, lt=1, description="decay of the mean of pseudo-gradients")]
Beta2 = Annotated[float, Field(ge=0, lt=1, description="decay of the mean of their squares")]
Tau = Annotated[float, Field(gt=0, description="added to the root of the squares: large is less adaptive")]


@dataclass(frozen=True)
class FedAvgM(Optimizer):
    """Steps with momentum."""

    lr: Rate = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last step that is kept")] = 0.9

    def init(self, params: Params) -> Tree:
        return tree.map(torch.zeros_like, params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        u = tree.map(lambda u, g: self.momentum * u + g, state, grads)
        return tree.map(lambda x, u: x - self.lr * u, params, u), u


class Adaptive(Optimizer):
    """A step for each number that follows its own squares; a subclass is a frozen dataclass that says how."""

    beta1: float
    tau: float

    @abstractmethod
    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v, given g^2."""

    def init(self, params: Params) -> Tree:
        return tree.map(torch.zeros_like, params), tree.map(lambda x: torch.full_like(x, self.tau**2), params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        m, v = state
        m = tree.map(lambda m, g: self.beta1 * m + (1 - self.beta1) * g, m, grads)
        v = tree.map(lambda v, g: self.squares(v, g * g), v, grads)
        return tree.map(lambda x, m, v: x - self.lr * m / (v.sqrt() + self.tau), params, m, v), (m, v)


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Squares add up."""

    lr: Rate = 0.01
    beta1: Beta1 = 0.0
    tau: Tau = 1e-3

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Squares are averaged over rounds."""

    lr: Rate = 0.01
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.99
    tau: Tau = 1e-3

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(Adaptive):
    """Squares move by no more than a share of themselves."""

    lr: Rate = 0.01
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.99
    tau: Tau = 1e-3

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


SERVER_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}


class Stepped(NamedTuple):
    """The state of a server that has an optimiser."""

    server: Any  # the method's own
    stepped: dict[str, tuple[()]]  # the paths of what is stepped; no tensors
    state: Tree  # the optimiser's


def why_not(method: AnyMethod) -> str | None:
    """Say why a server of this method cannot have an optimiser; None if it can."""
    if not averaged_fields(method) or method.stepped == ():
        return "its server does not only average what it is sent"
    return None


def server_optimized(method: AnyMethod, optimizer: Optimizer) -> AnyMethod:
    """Return the method with a server that takes an optimiser's steps.

    Raises:
        ConfigError: the method does not average.
    """
    if (reason := why_not(method)) is not None:
        raise ConfigError(
            [
                f"server_optimizer: {type(method).__name__} cannot have one, since {reason}: leave it out, or choose a "
                "method that averages ('coterie methods' lists them)"
            ]
        )
    wrapped = copy.copy(method)
    for function in (_init_server, _aggregate, _dispatch, _deploy, _onboard, _offer, _global_model, _server_info):
        # An attribute of the instance goes before the class's function, in every engine and on every server.
        object.__setattr__(wrapped, function.__name__[1:], function(method, optimizer))
    return wrapped


def _init_server(method: AnyMethod, optimizer: Optimizer) -> Any:
    def init_server(params: Params, population: Population) -> Stepped:
        server = method.init_server(params, population)
        fixed = set(params) - population.task.trainable if population.task is not None else set()
        free = {
            path: leaf
            for path, leaf in tree.pack(_model(method, server)).items()
            if leaf.is_floating_point() and path.rpartition("/")[2] not in fixed
        }
        return Stepped(server, dict.fromkeys(free, ()), optimizer.init(free))

    return init_server


def _aggregate(method: AnyMethod, optimizer: Optimizer) -> Any:
    def aggregate(server: Stepped, ids: Tensor, ups: Any) -> Stepped:
        new = method.aggregate(server.server, ids, ups)
        before, mean = (tree.pack(_model(method, each)) for each in (server.server, new))
        x = {path: before[path] for path in server.stepped}
        moved, state = optimizer.update({path: leaf - mean[path] for path, leaf in x.items()}, server.state, x)
        return Stepped(_with_model(method, new, {**mean, **moved}), server.stepped, state)

    return aggregate


def _model(method: AnyMethod, server: Any) -> Tree:
    """Return the part of a server's state that its optimiser steps, buffers included."""
    if method.stepped is None and not isinstance(server, dict):
        raise ConfigError(
            [
                f"server_optimizer: the server's state of {type(method).__name__} is not just a model: let its "
                "`stepped` name the fields that hold the averaged models, or be () if there are none"
            ]
        )
    return server if method.stepped is None else {name: getattr(server, name) for name in method.stepped}


def _with_model(method: AnyMethod, server: Any, flat: Params) -> Any:
    part = tree.rebuild(flat, _model(method, server))
    return part if method.stepped is None else server._replace(**part)


def _dispatch(method: AnyMethod, optimizer: Optimizer) -> Any:
    return lambda server, ids, rng: method.dispatch(server.server, ids, rng)


def _deploy(method: AnyMethod, optimizer: Optimizer) -> Any:
    return lambda server, ids, rng: method.deploy(server.server, ids, rng)


def _offer(method: AnyMethod, optimizer: Optimizer) -> Any:
    return lambda server, ids: method.offer(server.server, ids)


def _global_model(method: AnyMethod, optimizer: Optimizer) -> Any:
    return lambda server: method.global_model(server.server)


def _server_info(method: AnyMethod, optimizer: Optimizer) -> Any:
    return lambda server: method.server_info(server.server)


def _onboard(method: AnyMethod, optimizer: Optimizer) -> Any:
    def onboard(task: Task, newcomer: Newcomer, ids: Tensor, ups: Any) -> Newcomer:
        stepped: Stepped = newcomer.server
        joined = method.onboard(task, newcomer._replace(server=stepped.server), ids, ups)
        return joined._replace(server=stepped._replace(server=joined.server))

    return onboard
