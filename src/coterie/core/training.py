"""What clients do with their data: optimisers as pure functions, training with a penalty, and likelihoods.

Every function here sees one client and runs inside `scan`, so it is stacked and compiled like the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, grad_and_value

from coterie import tree
from coterie.batches import LEAST, Batch, Batches
from coterie.scan import scan
from coterie.task import Task
from coterie.tree import Params, Tree

EXAMPLES = 128  # at once, where nothing is trained
Penalty = Callable[[Params, Any], Tensor]  # (trained parameters, anchor) -> scalar added to the loss
Pull = Callable[[Params, Params], Params]  # (trained parameters, anchor) -> gradient of a penalty
FeaturePenalty = Callable[[Tensor, Batch, Any], Tensor]  # (features [batch, dim], batch, anchor) -> scalar, likewise


class Optimizer(ABC):
    """A pure (init, update) pair; `update` takes the same step as the `torch.optim` class of the same name."""

    @abstractmethod
    def init(self, params: Params) -> Tree: ...

    @abstractmethod
    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        """(new parameters, new state)."""


@dataclass(frozen=True)
class SGD(Optimizer):
    lr: Annotated[float, Field(gt=0, description="step size")] = 0.01
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


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; weight decay is added to the gradient (as in `torch.optim.Adam`)."""

    lr: Annotated[float, Field(gt=0, description="step size")] = 0.001
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
    """Adam with weight decay applied to the parameters themselves (as in `torch.optim.AdamW`)."""

    lr: Annotated[float, Field(gt=0, description="step size")] = 0.001
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of gradients")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the mean of squared gradients")] = 0.999
    eps: Annotated[float, Field(gt=0, description="keeps the division finite")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="shrinks the parameters each step")] = 0.01

    def init(self, params: Params) -> Tree:
        return _adam_init(params)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        return _adam_update(self, grads, state, tree.scale(params, 1 - self.lr * self.weight_decay))


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def _adam_init(params: Params) -> Tree:
    zeros = tree.map(torch.zeros_like, params)
    return zeros, zeros, torch.zeros((), device=next(iter(params.values())).device)


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
    """1 - beta^count, without the cancellation that costs float32 four digits in the first steps."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def no_penalty(params: Params, anchor: Any) -> Tensor:
    return torch.zeros(())


def quadratic(params: Params, anchor: tuple[Params, Tensor]) -> Tensor:
    """(strength / 2) ||params - centre||^2 for `anchor = (centre, strength)`; the squared norm, with its gradient."""
    centre, strength = anchor
    return 0.5 * strength * tree.sqdist(params, {name: centre[name] for name in params})


def train(
    task: Task,
    optimizer: Optimizer,
    params: Params,
    batches: Batches,
    penalty: Penalty = no_penalty,
    anchor: Tree = (),
    *,
    only: frozenset[str] | None = None,
    feature_penalty: FeaturePenalty | None = None,
) -> tuple[Params, Tensor]:
    """Minimise f(theta) + penalty(theta, anchor) [+ feature_penalty(features, batch, anchor)], a step a minibatch.

    With `only`, nothing else changes, buffers included. Returns the parameters (buffers included) and the mean data
    loss seen on the way, [].
    """

    def free(values: Params) -> Params:
        return values if only is None else {name: value for name, value in values.items() if name in only}

    def step(carry: Any, aux: Tree, batch: Batch) -> Tree:
        params, state, total, seen = carry
        trained = free(task.split(params)[0])

        def objective(trained: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
            if feature_penalty is None:
                loss, left = task.loss({**params, **trained}, batch)
                return loss + penalty(trained, aux), (loss, left)
            loss, features, left = task.loss_and_features({**params, **trained}, batch)
            return loss + penalty(trained, aux) + feature_penalty(features, batch, aux), (loss, left)

        grads, (_, (loss, left)) = grad_and_value(objective, has_aux=True)(trained)
        trained, state = optimizer.update(grads, state, trained)
        count = batch.mask.sum()
        return {**params, **trained, **free(left)}, state, total + loss * count, seen + count

    zero = torch.zeros((), device=batches.mask.device)
    start = (params, optimizer.init(free(task.split(params)[0])), zero, zero)
    params, _, total, seen = scan(step, start, anchor, batches)
    return params, total / seen.clamp_min(LEAST)


def gradient(task: Task, params: Params, batch: Batch) -> tuple[Params, Tensor, Params]:
    """(grad f at the trained parameters, f, what the forward pass left of the others) on one minibatch."""
    trained, rest = task.split(params)

    def objective(trained: Params) -> tuple[Tensor, Params]:
        return task.loss({**trained, **rest}, batch)

    grads, (loss, rest) = grad_and_value(objective, has_aux=True)(trained)
    return grads, loss, rest


def proximal(
    task: Task, optimizer: Optimizer, params: Params, batch: Batch, pull: Pull, anchor: Params, steps: int
) -> tuple[Params, Tensor]:
    """`steps` optimiser steps on f_B(theta) + R(theta; anchor), all on one minibatch B; `pull` is the gradient of R.

    To be used inside a step of a scan. Returns the parameters (buffers included) and f_B before the last step, [].
    """
    trained, rest = task.split(params)
    state, loss = optimizer.init(trained), torch.zeros(())
    for _ in range(steps):
        grads, loss, rest = gradient(task, {**trained, **rest}, batch)
        trained, state = optimizer.update(tree.add(grads, pull(trained, anchor)), state, trained)
    return {**trained, **rest}, loss


def mean_loss(task: Task, params: Params, batches: Batches) -> Tensor:
    """Mean of the losses over the examples in `batches`, in evaluation mode; nothing is trained."""

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        total, seen = carry
        losses = task.losses(aux, batch.x, batch.y)
        return total + (losses * batch.mask).sum(), seen + batch.mask.sum()

    zero = torch.zeros((), device=batches.mask.device)
    total, seen = scan(step, (zero, zero), params, batches.wider(EXAMPLES))
    mean: Tensor = total / seen.clamp_min(LEAST)
    return mean


def mean_gradient(task: Task, params: Params, batches: Batches) -> tuple[Params, Params]:
    """(gradient of the mean training loss over all minibatches, at fixed parameters; the buffers they leave)."""

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        total, rest, seen = carry
        grads, rest = grad(lambda trained: task.loss({**trained, **rest}, batch), has_aux=True)(aux)
        count = batch.mask.sum()
        return tree.map(lambda t, g: t + g * count, total, grads), rest, seen + count

    trained, rest = task.split(params)
    start = (tree.map(torch.zeros_like, trained), rest, torch.zeros((), device=batches.mask.device))
    total, rest, seen = scan(step, start, trained, batches)
    return tree.scale(total, 1 / seen.clamp_min(LEAST)), rest
