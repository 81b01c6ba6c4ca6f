"""Draws minibatches: which examples each client sees in a round, and in what order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import rng
from coterie.core.batches import Batches
from coterie.data.federation import Federation, Index

Seeds = NDArray[np.uint64]
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
