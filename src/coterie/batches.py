"""What a client function sees of the data: minibatches."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One minibatch of one client."""

    x: Tensor  # [batch, ...]
    y: Tensor  # [batch, ...]
    mask: Tensor  # [batch]; 0 = padding, to be ignored
    key: Tensor  # []; seeds this step's dropout


class Batches(NamedTuple):
    """One client's minibatches for one round, as positions in a pool of examples that is never copied.

    Short minibatches are filled with other examples of the same client and masked out, so that normalisation layers
    see real data; steps beyond the client's own number are masked out whole.
    """

    x: Tensor  # [pool, ...]
    y: Tensor  # [pool, ...]
    index: Tensor  # type: ignore[assignment]  # [epochs, steps, batch]
    mask: Tensor  # [epochs, steps, batch]
    key: Tensor  # [epochs, steps]
    count: Tensor  # type: ignore[assignment]  # []; number of the client's training examples

    def epoch(self, start: int, stop: int | None = None) -> Batches:
        """The epochs from `start` up to `stop` (one epoch where it is not given)."""
        part = slice(start, start + 1 if stop is None else stop)
        return self._replace(index=self.index[part], mask=self.mask[part], key=self.key[part])
