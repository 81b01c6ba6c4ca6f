"""From a federation to `Batches`: which examples each client sees in a round, and in what order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import native, rng
from coterie.batches import Batches
from coterie.data.federation import Federation, Index

Seeds = NDArray[np.uint64]
Drawn = tuple[Index, NDArray[np.float32], Index]


@dataclass(frozen=True)
class Plan:
    """How much a client trains in a round: `epochs` passes over its data or, if given, exactly `steps` minibatches.

    Where a federation is spread over machines, no one sees its largest client: they are all told the `width`.
    """

    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    width: int | None = None  # what minibatches are filled up to; None: as in `draw`

    def num_steps(self, size: int) -> int:
        """Minibatches a client of `size` training examples sees in a round."""
        return self.steps or self.epochs * -(-size // self.batch_size)


def draw(federation: Federation, ids: Sequence[int], plan: Plan, *, seed: int, purpose: str, round: int) -> Batches:
    """The minibatches of the clients `ids`, stacked: leaves have the client axis first, except the shared pool.

    What a client gets depends on (seed, purpose, round, its name) only. Shorter clients are padded with masked steps
    to the longest of `ids`.
    """
    sizes = [federation.sizes[i] for i in ids]
    # No minibatch is wider than the largest client of the federation, whoever is in this chunk.
    width = plan.width or min(plan.batch_size, federation.largest)
    epochs = 1 if plan.steps else plan.epochs
    longest = plan.steps or max(-(-size // plan.batch_size) for size in sizes)
    seeds = rng.seeds_of((seed, purpose, round), [federation.names[i] for i in ids])
    all_fit = width >= min(plan.batch_size, max(sizes))
    at_once = epochs and not plan.steps and all_fit and native.loaded() and draws_alike()
    if at_once:
        where, each = federation.addresses[list(ids)], np.array(sizes, np.int64)
        index, mask, key = _drawn_at_once(where, each, seeds, plan, epochs, longest, width)
    else:
        index, mask, key = _drawn([federation.train[i] for i in ids], seeds, plan, epochs, longest, width)
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


def _drawn_at_once(
    where: Index, sizes: Index, seeds: Seeds, plan: Plan, epochs: int, longest: int, width: int
) -> Drawn:
    """The same, bit for bit, by draws.cpp, of examples that are `where` in memory: some 6 microseconds a client."""
    index, mask = (np.empty((len(sizes), epochs, longest * width), kind) for kind in (np.int64, np.float32))
    key = np.empty((len(sizes), epochs, longest), np.int64)
    given = (seeds.astype(np.uint64), where, sizes, index, mask, key)
    pointers = (array.ctypes.data for array in given)
    native.library().draw(len(sizes), epochs, longest, width, plan.batch_size, *pointers)
    return index, mask, key


@functools.cache
def draws_alike() -> bool:
    """Whether NumPy draws as draws.cpp does: it may change how."""
    own = [np.arange(7, 7 + size) for size in (1, 6, 40, 1000)]
    seeds, plan = np.array([0, 1, 2**32 + 3, 2**64 - 1], np.uint64), Plan(batch_size=8, epochs=2)
    where, sizes = np.array([each.ctypes.data for each in own]), np.array([len(each) for each in own])
    theirs, ours = _drawn(own, seeds, plan, 2, 125, 8), _drawn_at_once(where, sizes, seeds, plan, 2, 125, 8)
    return all(np.array_equal(theirs[k], ours[k]) for k in range(len(ours)))


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
