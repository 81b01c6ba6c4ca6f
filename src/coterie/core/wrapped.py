"""What is wrapped around an optimiser: a schedule of its step size, and gradient clipping. Any optimiser has both.

    Paced       a step of size  pace * lr,  where the schedule gives each step its pace        (`coterie.core.pace`)
    Clipped     g <- the numbers of g, none further from 0 than `value`                        (`Clipped.update`)
                g <- g min(1, norm / ||g||), where ||g|| is that of all parameters together

Clipping acts on what the optimiser is given: the gradient of the loss together with that of all that a method adds to
it, before weight decay and momentum, as `torch.nn.utils.clip_grad_norm_` does before `step` (tested).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.optimizers import OPTIMIZERS, Optimizer
from coterie.core.pace import current_pace
from coterie.core.tree import Params, Tree

SMALL = 1e-6  # beside a norm that is divided by, as in torch


class Wrapped(Optimizer):
    """An optimiser around another one; a subclass is a frozen dataclass."""

    inner: Optimizer

    @property
    def lr(self) -> Any:  # type: ignore[override]
        return self.inner.lr

    @property
    def at_full_pace(self) -> Optimizer:
        return self.inner.at_full_pace

    def init(self, params: Params) -> Tree:
        return self.inner.init(params)

    def steady_step(self) -> Any:
        return self.inner.steady_step()


@dataclass(frozen=True)
class Clipped(Wrapped):
    """An optimiser whose gradients are clipped."""

    inner: Optimizer
    norm: float | None = None
    value: float | None = None

    @property
    def at_full_pace(self) -> Optimizer:
        return replace(self, inner=self.inner.at_full_pace)

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        if self.value is not None:
            most = self.value
            grads = tree.map(lambda g: g.clamp(-most, most), grads)
        if self.norm is not None and grads:
            length = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            shorter = (self.norm / (length + SMALL)).clamp_max(1)
            grads = tree.map(lambda g: g * shorter, grads)
        return self.inner.update(grads, state, params)


@dataclass(frozen=True)
class Paced(Wrapped):
    """An optimiser whose step size has a schedule. Within a step, its `lr` is that of the step."""

    inner: Optimizer

    @property
    def lr(self) -> Any:  # type: ignore[override]
        return self._now().lr

    @property
    def at_full_pace(self) -> Optimizer:
        return self.inner

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Tree]:
        return self._now().update(grads, state, params)

    def steady_step(self) -> Any:
        return self._now().steady_step()

    def _now(self) -> Optimizer:
        """Return the optimiser with the step size of the step that is being taken."""
        pace = current_pace()
        if pace is None:
            raise ConfigError(
                [
                    "schedule: this method takes a step, or reads the optimiser's step size, outside of the steps of a "
                    "client's training, where it is not known: let it read `optimizer.at_full_pace` there, and "
                    "multiply by `batches.total_pace()`; or leave schedule out"
                ]
            )
        if isinstance(pace, tuple):
            return self.inner
        core = plain(self.inner)
        return with_plain(self.inner, replace(core, lr=core.lr * pace))  # type: ignore[type-var]


def plain(optimizer: Optimizer) -> Optimizer:
    """Return what takes the steps, without all that is wrapped around it."""
    optimizer = optimizer.unguarded
    return plain(optimizer.inner) if isinstance(optimizer, Wrapped) else optimizer


def with_plain(optimizer: Optimizer, core: Optimizer) -> Optimizer:
    """Return `core` with all that is wrapped around `plain(optimizer)`."""
    if isinstance(optimizer, Wrapped):
        return replace(optimizer, inner=with_plain(optimizer.inner, core))  # type: ignore[type-var]
    return core


def wrapped(optimizer: Optimizer, *, norm: float | None, value: float | None, paced: bool) -> Optimizer:
    """Wrap an optimiser, in place of all that was wrapped around it."""
    made = plain(optimizer)
    if norm is not None or value is not None:
        made = Clipped(made, norm, value)
    return Paced(made) if paced else made


def without_lr(optimizer: Optimizer, params: Params) -> tuple[Optimizer, Tree]:
    """Take the step size out of an optimiser, so that it can enter a step as a value instead of being part of its code.

    Returns:
        The optimiser with another step size, and its own as a scalar of the type of `params`; the optimiser as it is,
        and (), if it is none of `OPTIMIZERS`, whose code is not known to take a tensor.
    """
    core = plain(optimizer)
    if type(core) not in OPTIMIZERS.values() or not params:
        return optimizer, ()
    like = next(iter(params.values()))
    lr = torch.as_tensor(core.lr, dtype=like.dtype, device=like.device)
    return with_plain(optimizer, replace(core, lr=1.0)), lr  # type: ignore[type-var]


def with_lr(optimizer: Optimizer, lr: Any) -> Optimizer:
    """Put the step size back: the inverse of `without_lr`, inside a step."""
    if not isinstance(lr, Tensor):
        return optimizer
    return with_plain(optimizer, replace(plain(optimizer), lr=lr))  # type: ignore[type-var]
