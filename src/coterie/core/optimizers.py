"""Optimisers as pure functions. Each takes the same step as the `torch.optim` class of the same name."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.search import Search
from coterie.core.tree import Params, Tree

if TYPE_CHECKING:
    from coterie.core.privacy import Guard


class Optimizer(ABC):
    """A pair of pure functions, `init` and `update`. A subclass is a frozen dataclass of hyper-parameters."""

    lr: float  # the step size, which every optimiser has

    @abstractmethod
    def init(self, params: Params) -> Tree:
        """Return the optimiser's state before its first step on `params`: a tree, `()` if it has none."""

    @abstractmethod
    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        """Take one step.

        Args:
            grads: gradients, with the names and shapes of `params`.
            state: what `init` or the last `update` returned.
            params: the trained parameters.

        Returns:
            The new parameters and the new state.
        """

    def steady_step(self) -> float | None:
        """Return how far a step goes for each unit of a gradient that stays the same.

        None, the default, means that steps are not proportional to the gradient.
        """
        return None

    @property
    def guard(self) -> Guard | None:
        """How its gradients are kept private (`coterie.core.privacy`); None if they are not."""
        return None

    @property
    def unguarded(self) -> Optimizer:
        """The same optimiser without privacy, for what never leaves the client, nor enters into what does."""
        return self

    @property
    def at_full_pace(self) -> Optimizer:
        """The same optimiser without a schedule (`coterie.core.schedules`), for what depends on its step size.

        Within a step, `lr` and `steady_step` are those of the step, and may be scalar tensors. Outside of a step they
        are not known if there is a schedule: read them here, and multiply by `batches.total_pace()`.
        """
        return self


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with momentum and weight decay as in `torch.optim.SGD`.

    Examples:
        >>> import coterie
        >>> coterie.SGD(lr=0.1, momentum=0.5).steady_step()  # of a gradient that stays the same
        0.2
    """

    lr: Annotated[float, Search(1e-3, 1), Field(gt=0, description="step size")] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last step that is kept")] = 0.0
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")] = 0.0

    def init(self, params: Params) -> Tree:
        return tree.map(torch.zeros_like, params) if self.momentum else ()

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        if self.weight_decay:
            grads = tree.map(lambda g, p: g + self.weight_decay * p, grads, params)
        if self.momentum:
            state = grads = tree.map(lambda g, v: self.momentum * v + g, grads, state)
        return tree.map(lambda p, g: p - self.lr * g, params, grads), state

    def steady_step(self) -> float:
        return self.lr / (1 - self.momentum)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, in which weight decay is added to the gradient, as in `torch.optim.Adam`."""

    lr: Annotated[float, Search(1e-4, 3e-2), Field(gt=0, description="step size")] = 0.001
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of gradients")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared gradients")] = 0.999
    eps: Annotated[float, Field(gt=0, description="keeps the division finite")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")] = 0.0

    def init(self, params: Params) -> Tree:
        return _adam_init(params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        if self.weight_decay:
            grads = tree.map(lambda g, p: g + self.weight_decay * p, grads, params)
        return _adam_update(self, grads, state, params)


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam, in which weight decay shrinks the parameters themselves, as in `torch.optim.AdamW`."""

    lr: Annotated[float, Search(1e-4, 3e-2), Field(gt=0, description="step size")] = 0.001
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of gradients")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared gradients")] = 0.999
    eps: Annotated[float, Field(gt=0, description="keeps the division finite")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="shrinks the parameters each step")] = 0.01

    def init(self, params: Params) -> Tree:
        return _adam_init(params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        return _adam_update(self, grads, state, tree.scale(params, 1 - self.lr * self.weight_decay))


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """Steps over the root of a mean of squared gradients, as in `torch.optim.RMSprop`, whose `alpha` is `beta2`."""

    lr: Annotated[float, Search(1e-4, 3e-2), Field(gt=0, description="step size")] = 0.01
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared gradients")] = 0.99
    eps: Annotated[float, Field(gt=0, description="keeps the division finite")] = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1, description="share of the last step that is kept")] = 0.0
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty, added to the gradient")] = 0.0

    def init(self, params: Params) -> Tree:
        zeros = tree.map(torch.zeros_like, params)
        return zeros, zeros if self.momentum else ()

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        squares, speed = state
        if self.weight_decay:
            grads = tree.map(lambda g, p: g + self.weight_decay * p, grads, params)
        squares = tree.map(lambda v, g: self.beta2 * v + (1 - self.beta2) * g * g, squares, grads)
        way = tree.map(lambda g, v: g / (v.sqrt() + self.eps), grads, squares)
        if self.momentum:
            speed = way = tree.map(lambda b, w: self.momentum * b + w, speed, way)
        return tree.map(lambda p, w: p - self.lr * w, params, way), (squares, speed)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop}


def _adam_init(params: Params) -> Tree:
    zeros = tree.map(torch.zeros_like, params)
    device = next((value.device for value in params.values()), None)  # there may be nothing to train
    return zeros, zeros, torch.zeros((), device=device)


def _adam_update(opt: Adam | AdamW, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
    first, second, count = state
    count = count + 1
    first = tree.map(lambda m, g: opt.beta1 * m + (1 - opt.beta1) * g, first, grads)
    second = tree.map(lambda v, g: opt.beta2 * v + (1 - opt.beta2) * g * g, second, grads)
    step = opt.lr / _one_minus_power(opt.beta1, count)
    spread = _one_minus_power(opt.beta2, count).sqrt()
    new = tree.map(lambda p, m, v: p - step * m / (v.sqrt() / spread + opt.eps), params, first, second)
    return new, (first, second, count)


def _one_minus_power(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta^count without the cancellation that costs float32 four digits in the first steps."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)
