"""GPFL (Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized
Federated Learning", ICCV 2023).

A shared body with features z, heads that are the clients' own, and two modules beside the model that are shared too: a
table of class embeddings u_k (the paper's GCE), and a conditional valve (CoV), which turns features towards what a
condition c says:

    valve(z, c) = relu((1 + gamma(c)) * z + beta(c)),   gamma(c), beta(c) = norm(relu(A c + a))        (`valve_of`)
    z_P = valve(z, sum_k p_ik u_k),   z_G = valve(z, mean_k u_k)                                       (`_objective`)
    L_P   = the loss of the own head for z_P
    L_ang = -log e^cos(z_G, u_y) / sum_k e^cos(z_G, u_k)                                               (`angle_loss`)
    L_mag = ||z_G - u_y||, u as received                                                               (`distance`)
    body_i, head_i, valve_i, u_i <- SGD on  L_P + L_ang + lam L_mag + (mu / 2) ||(valve_i, u_i)||^2    (`local_update`)
    body, valve, u <- mean of body_i, valve_i, u_i with weight n_i / n                                 (`aggregate`)

p_ik is the share of class k among the client's examples. Conditions are those of the received u throughout a round.
A client deploys the shared body and its own head, with gamma and beta of its condition. A valve with gamma = beta = 0
is relu(z). The head must be linear and the last layer. A newcomer trains a head on the shared body.

The equations were compared with what the authors' program computes. Details and deviations:
- Conditions are those of the received u. The public implementation has them of the u that the client trained in its
  last round.
- L_ang and L_mag are means over the examples that count; class weights enter into L_P alone. The public implementations
  take the norm of a whole minibatch, which grows with its size.
- mu is a term of the objective; the public implementations have it as the optimiser's weight decay, which is the same
  for SGD.
- p_i is counted on the round's first epoch, which is all of the client's examples unless a number of steps is set. To
  deploy, it is counted on all of them.
- The scales of both norms begin at 0, so that the valve begins as relu(z) and gamma and beta grow from there; PyTorch's
  begin at 1, where gamma is as large as the 1 it is added to and what a client deploys changes much with every mean
  of valves. The embeddings are drawn from N(0, 1).
- lam = 0.01 and mu = 0.1 are what the authors use for their CNN and MLP. (For ResNet-18 they use 0.0001 and 0.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.method import Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import minimise
from coterie.core.tree import Params
from coterie.parts import averaging, class_moments, shared_layers
from coterie.parts.auxiliary import Dense, affine, dense, embeddings, head_inputs, normalised

SMALLEST = 1e-12  # a squared norm below this has no gradient


class Valve(NamedTuple):
    gamma: Dense
    beta: Dense


class Beside(NamedTuple):
    """What is shared beside the body."""

    valve: Valve
    embeddings: Tensor  # [classes, dim]; u


class Server(NamedTuple):
    """The server's state, which is also what every client is sent."""

    body: Params
    valve: Valve
    embeddings: Tensor  # [classes, dim]


class Up(NamedTuple):
    body: Params
    valve: Valve
    embeddings: Tensor
    count: Tensor  # type: ignore[assignment]  # []; n_i


class Trained(NamedTuple):
    theta: Params
    beside: Beside


class Received(NamedTuple):
    """What a round's steps read and do not change."""

    embeddings: Tensor
    own: Tensor  # [dim]; sum_k p_ik u_k
    common: Tensor  # [dim]; mean_k u_k


class View(NamedTuple):
    theta: Params
    gamma: Tensor  # [dim]; of the client's condition
    beta: Tensor  # [dim]


@dataclass(frozen=True)
class GPFL(Method[Server, Params, Server, Up]):
    learns_from: ClassVar[str] = (
        "all clients, through the body, the class embeddings and the valve that they share; the head is its own"
    )

    optimizer: Optimizer = SGD()
    lam: Annotated[
        float, Search(1e-3, 1), Field(ge=0, description="lambda, pull of features to their class's embedding")
    ] = 0.01
    mu: Annotated[float, Search(1e-3, 1), Field(ge=0, description="weight decay of the valve and the embeddings")] = 0.1

    dispatch, init_client = averaging.dispatch, shared_layers.init_client  # only the client's head is used

    @property
    def averaged(self) -> tuple[str, ...]:
        return "body", "valve", "embeddings"

    @property
    def stepped(self) -> tuple[str, ...]:
        return "body", "valve", "embeddings"

    def init_server(self, params: Params, population: Population) -> Server:
        dim = head_inputs(population.task, "GPFL")
        classes, _ = class_moments.dimensions(population.task)
        head = population.task.head_names if population.task else frozenset()
        body = {name: value for name, value in params.items() if name not in head}
        valve = Valve(*(dense(population, name, dim, dim, params, scale=0.0) for name in ("gamma", "beta")))
        return Server(body, valve, embeddings(population, "class embeddings", classes, dim, params))

    def local_update(self, task: Task, client: Params, down: Server, batches: Batches) -> tuple[Params, Up, Info]:
        start = {**client, **down.body}
        trained, rest = task.split(start)
        received = Received(down.embeddings, _condition(task, down, batches), down.embeddings.mean(0))
        (trained, (valve, u)), rest, loss = minimise(
            self.optimizer,
            partial(self._objective, task),
            Trained(trained, Beside(down.valve, down.embeddings)),
            rest,
            batches,
            anchor=received,
        )
        theta = {name: {**rest, **trained}[name] for name in start}
        body = task.sent({name: theta[name] for name in down.body})
        return theta, Up(body, valve, u, batches.count), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        body, valve, u = tree.mean((ups.body, ups.valve, ups.embeddings), ups.count)
        return Server({**server.body, **body}, valve, u)

    def personalize(self, task: Task, client: Params, down: Server, batches: Batches) -> View:
        return View({**client, **down.body}, *valve_of(down.valve, _condition(task, down, batches)))

    @property
    def personalize_epochs(self) -> int:
        return 1  # in which the examples of each class are counted

    def predict(self, task: Task, view: View, x: Tensor) -> Tensor:
        return task.head(view.theta, turned(task.features(view.theta, x), view.gamma, view.beta))

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        return newcomer._replace(only=task.head_names & task.trainable or None)

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)

    def _objective(
        self, task: Task, trained: Trained, rest: Params, batch: Batch, received: Received
    ) -> tuple[Tensor, tuple[Tensor, Params]]:
        theta, (valve, u) = {**rest, **trained.theta}, trained.beside
        _, features, rest = task.outputs_and_features(theta, batch)
        own, common = (turned(features, *valve_of(valve, c)) for c in (received.own, received.common))
        loss = task.batch_loss(task.head(theta, own), batch)
        value = loss + angle_loss(common, u, batch) + self.lam * distance(common, received.embeddings, batch)
        if self.mu:
            value = value + 0.5 * self.mu * tree.dot(trained.beside, trained.beside)
        return value, (loss, rest)


def valve_of(valve: Valve, condition: Tensor) -> tuple[Tensor, Tensor]:
    """Return gamma(c) and beta(c), [dim], for a condition c [dim]."""
    gamma, beta = (normalised(layer, affine(layer, condition).relu()) for layer in valve)
    return gamma, beta


def turned(features: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Return relu((1 + gamma) z + beta), [batch, dim]."""
    return ((1 + gamma) * features + beta).relu()


def angle_loss(features: Tensor, u: Tensor, batch: Batch) -> Tensor:
    """Return the mean of L_ang over the examples: a cross-entropy whose logits are the cosines with the embeddings."""
    logarithms = torch.log_softmax(_unit(features) @ _unit(u).T, 1)
    return -_mean(logarithms.gather(1, batch.y[:, None])[:, 0], batch)


def distance(features: Tensor, u: Tensor, batch: Batch) -> Tensor:
    """Return the mean of L_mag over the examples: the distance of features to the embedding of their class."""
    return _mean(((features - u[batch.y]) ** 2).sum(1).clamp_min(SMALLEST).sqrt(), batch)


def _unit(rows: Tensor) -> Tensor:
    return rows / (rows**2).sum(1, keepdim=True).clamp_min(SMALLEST).sqrt()


def _mean(each: Tensor, batch: Batch) -> Tensor:
    """Return the mean over the examples that are no padding."""
    here = (batch.mask > 0).to(each.dtype)
    return (each * here).sum() / here.sum().clamp_min(1.0)


def _condition(task: Task, down: Server, batches: Batches) -> Tensor:
    """Return sum_k p_ik u_k, [dim]; for a client without examples, the mean of all u_k."""
    size = class_moments.class_sizes(task, batches.epoch(0))
    share = torch.where(size.sum() > 0, size / size.sum().clamp_min(1.0), torch.full_like(size, 1 / len(size)))
    return (share[:, None] * down.embeddings).sum(0)
