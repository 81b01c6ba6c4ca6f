"""Differential privacy of a client's examples: per-example gradients, clipped, added up, and noised.

A private optimiser takes its steps with a noisy gradient instead of the mean over a minibatch B (Abadi et al. 2016):

    g_i <- gradient of the objective on example i alone, less its gradient on no example    (`gradient`)
    g   <- (sum_{i in B} g_i min(1, C / ||g_i||) + C sigma z) / L + the gradient on no example,    z ~ N(0, I)

What a method adds to the loss that no example enters into, such as a pull to another model, is the gradient on no
example; it is neither clipped nor noised. L is the number of examples that a minibatch is expected to have, which
does not depend on who was drawn. What else a message tells of examples is a sum over them, each clipped, plus noise
(`noisy_sum`).

Adjacency: two data sets are neighbours if one example of one is replaced by nothing, that is, contributes 0 to every
sum. The number of examples is not protected.

The optimiser carries the guard, so that a method does not have to know of it: `coterie.core.training.train`,
`minimise` and `proximal_steps` find it there. Whatever else would take a step of a private optimiser is refused.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie.core import rng, tree
from coterie.core.batches import IS_DRAWN, Batch, Batches
from coterie.core.errors import ConfigError
from coterie.core.optimizers import Optimizer
from coterie.core.tree import Params, Tree

GRADIENT, SUM = "gradient", "sum"
AT_ONCE = 2**25  # numbers of per-example gradients that are held at once
ROUNDING = 1 - 1e-5  # a clipped float32 vector is at most as long as it should be
_NOISE = 0x3C6EF372 << 30  # tells keys of noise from keys of dropout


class Told(NamedTuple):
    """A release: a noisy gradient or another noisy sum, and a number that tells its noise from that of others."""

    what: str
    stamp: int


_told: ContextVar[list[Told] | None] = ContextVar("released", default=None)


@dataclass(frozen=True)
class Guard:
    """How a client protects its examples.

    `noise` is sigma, for gradients; `sum_noise` the same for all other sums. A clip bounds what one example can
    contribute: the norm of its gradient, the norm of its features, and its loss.
    """

    batch_size: int
    clip: float = 1.0
    noise: float = 1.0
    sum_noise: float = 1.0
    clip_features: float = 5.0
    clip_loss: float = 5.0
    entropy: Literal["seed", "system"] = "seed"  # of noise: reproducible, or from the operating system

    def lot(self, batches: Batches) -> Tensor:
        """Return L, how many examples a minibatch is expected to have, a scalar."""
        return batches.count.clamp(1, self.batch_size)


@dataclass(frozen=True)
class Private(Optimizer):
    """An optimiser whose gradients are private. Only functions that know of the guard can take its steps."""

    inner: Optimizer
    own_guard: Guard

    @property
    def lr(self) -> float:  # type: ignore[override]
        return self.inner.lr

    @property
    def guard(self) -> Guard:
        return self.own_guard

    @property
    def unguarded(self) -> Optimizer:
        return self.inner

    @property
    def at_full_pace(self) -> Optimizer:
        return Private(self.inner.at_full_pace, self.own_guard)

    def init(self, params: Params) -> Tree:
        return self.inner.init(params)

    def update(self, grads: Params, state: Any, params: Params) -> NoReturn:
        raise ConfigError(
            ["privacy: this method takes steps with gradients of its own, which would tell of single examples"]
        )

    def steady_step(self) -> float | None:
        return self.inner.steady_step()


def lot_of(optimizer: Optimizer, batches: Batches) -> Tensor | tuple[()]:
    """Return what a step needs to know of `batches` if the optimiser is private, and else nothing."""
    return () if optimizer.guard is None else optimizer.guard.lot(batches)


def gradient(
    guard: Guard,
    objective: Callable[[Any, Batch], tuple[Tensor, Tensor]],
    params: Tree,
    batch: Batch,
    lot: Tensor,
    draw: Tensor | int = 0,
) -> tuple[Any, Tensor]:
    """Return the private gradient of an objective at `params`, and the mean of the told losses.

    Args:
        guard: how it is protected.
        objective: `objective(params, batch)` returns (what is minimised, the loss to be told) of a minibatch, which
            is given one example at a time, and one without any.
        params: a tree.
        batch: the minibatch B.
        lot: L.
        draw: which of the gradients of these parameters on this minibatch it is; each has noise of its own.

    Returns:
        The gradient, a tree like `params`; the loss, which is not protected.
    """
    stamp = rng.seed_of("gradient", *tree.pack(params)) >> 2  # two models, one after the other, have other noise
    tell(Told(GRADIENT, stamp))
    x, y = (torch.cat([part, torch.zeros_like(part[:1])]) for part in (batch.x, batch.y))  # the last is no example
    there = torch.cat([torch.ones_like(batch.mask), torch.zeros_like(batch.mask[:1])])
    keys = batch.key + torch.arange(len(x), device=batch.key.device) * rng.KEY_STEP

    def alone(x: Tensor, y: Tensor, there: Tensor, key: Tensor) -> tuple[Params, Tensor]:
        one = Batch(x[None], y[None], there[None], key)
        grads, loss = grad(lambda params: objective(params, one), has_aux=True)(params)
        return tree.pack(grads), loss

    size = sum(leaf.numel() for leaf in tree.pack(params).values())
    together = None if size * len(x) <= AT_ONCE else max(1, AT_ONCE // size)
    each, losses = vmap(alone, chunk_size=together)(x, y, there, keys)
    drawn = (batch.mask > IS_DRAWN).to(batch.mask.dtype)
    base = {name: torch.nan_to_num(leaf[-1], 0.0, 0.0, 0.0) for name, leaf in each.items()}
    own = {name: leaf[:-1] - base[name] for name, leaf in each.items()}
    total = clipped_sum(own, guard.clip, drawn)
    noise = noise_like(guard, batch.key + stamp, total, draw)
    deviation = guard.noise * (guard.clip if math.isfinite(guard.clip) else 1.0)
    mean = {name: (leaf + deviation * noise[name]) / lot + base[name] for name, leaf in total.items()}
    told = torch.where(drawn > 0, losses[:-1], 0.0).sum() / drawn.sum().clamp_min(1.0)
    return tree.rebuild(mean, params), told


def clipped_sum(each: Params, clip: float, weight: Tensor) -> Params:
    """Return sum_i weight_i v_i min(1, C / ||v_i||).

    An example whose vector is not finite contributes nothing.

    Args:
        each: leaves [examples, ...], which are one vector for each example.
        clip: C; infinite for no clipping.
        weight: [examples], 0 or 1.
    """
    flat = {name: leaf.reshape(len(leaf), -1) for name, leaf in each.items()}
    largest = torch.stack([leaf.abs().amax(1) for leaf in flat.values()]).amax(0)
    finite = torch.isfinite(largest) & (weight > 0)
    scale = torch.where(finite, largest, 1.0).clamp_min(torch.finfo(largest.dtype).tiny)  # squares do not overflow
    unit = {name: torch.where(finite[:, None], leaf, 0.0) / scale[:, None] for name, leaf in flat.items()}
    norm = torch.stack([(leaf**2).sum(1) for leaf in unit.values()]).sum(0).sqrt()
    if math.isfinite(clip):
        most = ROUNDING * clip / scale  # compared where nothing overflows
        factor = torch.where(norm > most, clip * ROUNDING / norm.clamp_min(1e-30), scale)
    else:
        factor = scale
    factor = factor * weight
    return {name: (factor @ leaf).reshape(each[name].shape[1:]) for name, leaf in unit.items()}


def noisy_sum(guard: Guard, total: Tensor, sensitivity: float, key: Tensor, draw: int) -> Tensor:
    """Return a sum over examples plus noise; `sensitivity` is the norm of what one example can contribute to it."""
    stamp = rng.seed_of("sum") >> 2
    tell(Told(SUM, stamp + draw))
    return total + guard.sum_noise * sensitivity * noise_like(guard, key + stamp, {"": total}, draw)[""]


def noise_like(guard: Guard, key: Tensor, like: Params, draw: Tensor | int) -> Params:
    """Return standard normal numbers with the names and shapes of `like`."""
    if guard.entropy == "system":
        return {name: system_normals(leaf) for name, leaf in like.items()}
    apart = draw * rng.ROUND_STEP if isinstance(draw, Tensor) else draw * rng.ROUND_STEP % 2**62
    return rng.normals((key ^ _NOISE) + apart, like)


def system_normals(like: Tensor) -> Tensor:
    """Return standard normal numbers made of the operating system's random bytes (Box and Muller, in float64)."""
    half = -(-like.numel() // 2)
    bits = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # never 0
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    drawn = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: like.numel()]
    return torch.from_numpy(drawn).reshape(like.shape).to(like)


def tell(what: Told) -> None:
    """Note that something private is released, for `listening`."""
    told = _told.get()
    if told is not None:
        told.append(what)


@contextlib.contextmanager
def listening() -> Iterator[list[Told]]:
    """Collect what is released inside."""
    told: list[Told] = []
    token = _told.set(told)
    try:
        yield told
    finally:
        _told.reset(token)
