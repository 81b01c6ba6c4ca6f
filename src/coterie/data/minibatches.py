"""From a federation to `Batches`: which examples each client sees in a round, and in what order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie import rng
from coterie.batches import Batches
from coterie.data.federation import Federation


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
    sizes = [len(federation.split(i).train) for i in ids]
    # No minibatch is wider than the largest client of the federation, whoever is in this chunk.
    width = plan.width or min(plan.batch_size, federation.largest)
    epochs = 1 if plan.steps else plan.epochs
    longest = plan.steps or max(-(-size // plan.batch_size) for size in sizes)
    key = np.zeros((len(ids), epochs, longest), np.int64)
    first = np.array([federation.split(i).train[0] if epochs else 0 for i in ids])
    index = np.broadcast_to(first[:, None, None], (len(ids), epochs, longest * width)).copy()  # padding: its own data
    mask = np.zeros(index.shape, np.float32)
    # One generator a client: 25 microseconds for an epoch of 400 examples, of which its seed takes 10.
    for row, client in enumerate(ids if epochs else ()):
        name, own = federation.names[client], federation.split(client).train
        generator = rng.generator(seed, purpose, round, name)
        steps = -(-len(own) // plan.batch_size)
        room = steps * width
        if plan.steps:  # run on through as many passes as the steps need
            passes = -(-plan.steps * plan.batch_size // len(own)) + 1
            steps, used = plan.steps, np.tile(np.arange(room) < len(own), passes)
            index[row, 0] = shuffled(generator, own, passes, room).ravel()[: steps * width]
            mask[row, 0] = used[: steps * width]
        else:
            index[row, :, :room] = shuffled(generator, own, epochs, room)
            mask[row, :, : len(own)] = 1
        key[row, :, :steps] = generator.integers(2**62, size=epochs * steps).reshape(epochs, steps)
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
