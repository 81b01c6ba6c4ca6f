"""Draws minibatches: which examples each client sees in a round, and in what order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import poisson
from torch import Tensor

from coterie.core import rng
from coterie.core.batches import NOBODY_DRAWN, Batches, Withheld
from coterie.core.schedules import Pacing
from coterie.data.federation import Federation, Index

Seeds = NDArray[np.uint64]
OVERFLOW = 1e-18  # chance that a minibatch drawn by chance has more examples than room; part of delta
Drawn = tuple[Index, NDArray[np.float32], Index]


@dataclass(frozen=True)
class Plan:
    """How much a client trains in a round: `epochs` passes over its data or, if given, exactly `steps` minibatches.

    In a deployed federation no machine sees the largest client, so all of them receive the `width`.
    """

    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    width: int | None = None  # what minibatches are filled up to; None: as in `draw`
    poisson: bool = False  # for privacy: each example is in each minibatch with the same chance, whoever else is
    withheld: float = 0.0  # share of a client's training examples that it does not train on, but measures models on
    pacing: Pacing | None = None  # the schedule of the learning rate

    def num_steps(self, size: int) -> int:
        """Minibatches a client of `size` training examples sees in a round."""
        return self.steps or self.epochs * -(-(size - self.num_withheld(size)) // self.batch_size)

    def num_withheld(self, size: int) -> int:
        """How many of its `size` training examples a client withholds: at least one, and never all."""
        return min(max(1, round(self.withheld * size)), size - 1) if self.withheld else 0


def draw(federation: Federation, ids: Sequence[int], plan: Plan, *, seed: int, purpose: str, round: int) -> Batches:
    """The minibatches of the clients `ids`, stacked: leaves have the client axis first, except the shared pool.

    What a client gets depends on (seed, purpose, round, its name) only. Shorter clients are padded with masked steps
    to the longest of `ids`. The examples that `plan` withholds are drawn once, from (seed, its name).
    """
    own = [federation.train[i] for i in ids]
    out: list[Index] = []
    if plan.withheld:
        own, out = withhold(own, rng.seeds_of((seed, "withheld"), [federation.names[i] for i in ids]), plan)
    sizes = [len(each) for each in own]
    # No minibatch is wider than the largest client of the federation, whoever is in this chunk.
    width = plan.width or min(plan.batch_size, federation.largest)
    if plan.poisson:
        width = poisson_width(plan.batch_size, federation.largest)
    epochs = 1 if plan.steps else plan.epochs
    longest = plan.steps or max(-(-size // plan.batch_size) for size in sizes)
    seeds = rng.seeds_of((seed, purpose, round), [federation.names[i] for i in ids])
    drawn = _drawn_by_chance if plan.poisson else _drawn
    index, mask, key = drawn(own, seeds, plan, epochs, longest, width)
    device = federation.x.device
    if federation.weights is not None:
        mask *= federation.weights.cpu().numpy()[index]
    return Batches(
        x=federation.x,
        y=federation.y,
        index=torch.from_numpy(index.reshape(*key.shape, width)).to(device),
        mask=torch.from_numpy(mask.reshape(*key.shape, width)).to(device),
        key=torch.from_numpy(key).to(device),
        count=torch.tensor(sizes, dtype=torch.float32, device=device),
        withheld=_filled(own, out, width, federation) if out else (),
        everyone=_filled(own, own, width, federation) if plan.poisson and epochs else (),
        pace=() if plan.pacing is None else torch.from_numpy(_paces(plan, plan.pacing, round, sizes, key)).to(device),
    )


def _paces(plan: Plan, pacing: Pacing, round: int, sizes: list[int], key: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the pace of every minibatch, shaped as the keys are; 1 for padding."""
    pace = np.ones(key.shape, np.float32)
    for row, size in enumerate(sizes):
        steps = plan.steps or -(-size // plan.batch_size)
        pace[row, :, :steps] = pacing.paces(round, len(pace[row]) * steps).reshape(-1, steps)
    return pace


def withhold(own: list[Index], seeds: Seeds, plan: Plan) -> tuple[list[Index], list[Index]]:
    """Part each client's examples into those that it trains on and those that it withholds, both in their order."""
    kept, out = [], []
    for seed, examples in zip(seeds.tolist(), own, strict=True):
        chosen = np.zeros(len(examples), bool)
        order = np.random.default_rng(seed).permutation(len(examples))
        chosen[order[: plan.num_withheld(len(examples))]] = True
        kept.append(examples[~chosen])
        out.append(examples[chosen])
    return kept, out


def _filled(own: list[Index], out: list[Index], width: int, federation: Federation) -> Withheld:
    """Minibatches of the withheld examples `out`, filled up with examples of `own` that are masked out."""
    steps = max(1, *(-(-len(each) // width) for each in out))
    index = np.stack([np.full(steps * width, each[0]) for each in own])
    mask = np.zeros(index.shape, np.float32)
    for row, each in enumerate(out):
        index[row, : len(each)], mask[row, : len(each)] = each, 1
    if federation.weights is not None:
        mask *= federation.weights.cpu().numpy()[index]
    return Withheld(
        *(torch.from_numpy(part.reshape(len(own), 1, steps, width)).to(federation.x.device) for part in (index, mask))
    )


def _drawn(own: list[Index], seeds: Seeds, plan: Plan, epochs: int, longest: int, width: int) -> Drawn:
    """Positions and mask, [clients, epochs, longest * width], and keys, [clients, epochs, longest]."""
    key = np.zeros((len(own), epochs, longest), np.int64)
    first = np.array([examples[0] if epochs else 0 for examples in own])
    index = np.broadcast_to(first[:, None, None], (len(own), epochs, longest * width)).copy()  # padding: its own data
    mask = np.zeros(index.shape, np.float32)
    # One generator a client: 25 microseconds for an epoch of 400 examples, of which its seed takes 10.
    for row, (seed, examples) in enumerate(zip(seeds.tolist(), own, strict=True) if epochs else ()):
        generator = np.random.default_rng(seed)
        steps = -(-len(examples) // plan.batch_size)
        room = steps * width
        if plan.steps:  # run on through as many passes as the steps need
            passes = -(-plan.steps * plan.batch_size // len(examples)) + 1
            steps, used = plan.steps, np.tile(np.arange(room) < len(examples), passes)
            index[row, 0] = shuffled(generator, examples, passes, room).ravel()[: steps * width]
            mask[row, 0] = used[: steps * width]
        else:
            index[row, :, :room] = shuffled(generator, examples, epochs, room)
            mask[row, :, : len(examples)] = 1
        key[row, :, :steps] = generator.integers(2**62, size=epochs * steps).reshape(epochs, steps)
    return index, mask, key


def poisson_width(batch_size: int, largest: int) -> int:
    """Return the room for the examples of a minibatch that are drawn by chance, `batch_size` of them on average.

    With a chance below `OVERFLOW` there are more. Of all numbers of examples, the largest has the widest minibatches,
    and none wider than a Poisson distribution (Anderson and Samuels, 1967).
    """
    if largest <= batch_size:
        return largest
    room = batch_size + np.arange(10 * math.isqrt(batch_size) + 50)
    return min(largest, int(room[np.argmax(poisson.sf(room, batch_size) <= OVERFLOW)]))


def _drawn_by_chance(own: list[Index], seeds: Seeds, plan: Plan, epochs: int, longest: int, width: int) -> Drawn:
    """Return what `_drawn` does, with every example in every minibatch with the chance batch_size / (their number).

    A minibatch that nobody was drawn for is a step all the same, in which there is noise: `NOBODY_DRAWN`.
    """
    key = np.zeros((len(own), epochs, longest), np.int64)
    first = np.array([examples[0] if epochs else 0 for examples in own])
    index = np.broadcast_to(first[:, None, None, None], (len(own), epochs, longest, width)).copy()
    mask = np.zeros(index.shape, np.float32)
    for row, (seed, examples) in enumerate(zip(seeds.tolist(), own, strict=True) if epochs else ()):
        generator, size = np.random.default_rng(seed), len(examples)
        steps = plan.steps or -(-size // plan.batch_size)
        numbers = generator.binomial(size, min(1.0, plan.batch_size / size), (epochs, steps)).clip(max=width)
        for epoch, step in np.ndindex(epochs, steps):
            number = numbers[epoch, step]
            index[row, epoch, step, :number] = generator.choice(examples, number, replace=False)
            mask[row, epoch, step, :number] = 1
        mask[row, :, :steps, 0] = np.maximum(mask[row, :, :steps, 0], NOBODY_DRAWN)
        key[row, :, :steps] = generator.integers(2**62, size=epochs * steps).reshape(epochs, steps)
    return index, mask, key


def shuffled(generator: np.random.Generator, own: np.ndarray, passes: int, room: int) -> np.ndarray:
    """Positions, [passes, room]: each pass holds every example of `own` exactly once, and then begins again."""
    if passes == 1:
        order = generator.permutation(own)[None]  # the same draws, sooner
    else:
        order = generator.permuted(np.broadcast_to(own, (passes, len(own))), axis=1)
    return order if room == len(own) else np.concatenate([order] * -(-room // len(own)), 1)[:, :room]


def pad_positions(positions: Sequence[np.ndarray]) -> Tensor:
    """[clients, longest]: each client's positions, repeated from its first to the longest."""
    longest = max(len(own) for own in positions)
    return torch.from_numpy(np.stack([np.resize(own, longest) for own in positions]))
