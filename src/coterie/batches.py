"""What a client function sees of the data: minibatches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 1e-6  # below any total weight of examples: dividing by max(total, LEAST), nothing divided by nothing is 0


class Batch(NamedTuple):
    """One minibatch of one client."""

    x: Tensor  # [batch, ...]
    y: Tensor  # [batch, ...]
    mask: Tensor  # [batch]; 0 = padding, to be ignored; else what the example counts in the loss, 1 or its weight
    key: Tensor  # []; seeds this step's dropout

    def halves(self) -> tuple[Batch, Batch]:
        """The two minibatches of an iteration of `Batches.pairs`, each with dropout of its own."""
        width = len(self.mask) // 2
        first = Batch(self.x[:width], self.y[:width], self.mask[:width], self.key)
        return first, Batch(self.x[width:], self.y[width:], self.mask[width:], self.key ^ _OTHER_KEY)


_OTHER_KEY = 0x2545F491 << 30  # changes the upper half of a key, which is hashed apart from the positions


class Batches(NamedTuple):
    """One client's minibatches for one round, as positions in a pool of examples that is never copied.

    Short minibatches are filled with other examples of the same client and masked out, so that normalisation layers
    see real data; steps beyond the client's own number are masked out whole.
    """

    x: Tensor  # [pool, ...]
    y: Tensor  # [pool, ...]
    index: Tensor  # type: ignore[assignment]  # [epochs, steps, batch]
    mask: Tensor  # [epochs, steps, batch]; as in `Batch`
    key: Tensor  # [epochs, steps]
    count: Tensor  # type: ignore[assignment]  # []; number of the client's training examples

    def epoch(self, start: int, stop: int | None = None) -> Batches:
        """The epochs from `start` up to `stop` (one epoch where it is not given)."""
        part = slice(start, start + 1 if stop is None else stop)
        return self._replace(index=self.index[part], mask=self.mask[part], key=self.key[part])

    def first(self, steps: int) -> Batches:
        """The client's first `steps` minibatches; the others are masked out."""
        flat = self.mask.flatten(0, 1)  # [epochs * steps, batch]
        kept = flat.any(-1).cumsum(0) <= steps
        return self._replace(mask=(flat * kept[:, None]).reshape(self.mask.shape))

    def wider(self, examples: int) -> Batches:
        """The same examples in fewer minibatches, of about so many each: for what only adds up over examples."""
        steps, batch = self.index.shape[1:]
        number = max(examples // batch, 1)  # also where there are fewer: who else is stacked must not matter
        missing = -steps % number

        def merge(part: Tensor, last: Tensor) -> Tensor:
            filled = torch.cat([part, last.expand(-1, missing, -1)], 1)
            return filled.reshape(len(part), (steps + missing) // number, number * batch)

        index, mask = merge(self.index, self.index[:, -1:]), merge(self.mask, 0 * self.mask[:, -1:])
        return self._replace(index=index, mask=mask, key=self.key[:, ::number])

    def pairs(self) -> Batches:
        """As many iterations, each with two different minibatches (`Batch.halves`): this one and the one after it.

        The last is paired with the first, so every minibatch is the first of one pair and the second of another. A
        client that has one minibatch only is given it twice.
        """
        index, mask, key = (part.flatten(0, 1) for part in (self.index, self.mask, self.key))
        real = mask.any(-1)
        order = torch.argsort((~real).to(torch.int64), stable=True)  # the client's own minibatches, then padding
        place = torch.arange(len(order), device=order.device)
        after = torch.where(place < real.sum(), (place + 1) % real.sum().clamp_min(1), place)
        index, mask = (torch.cat([part[order], part[order][after]], -1)[None] for part in (index, mask))
        return self._replace(index=index, mask=mask, key=key[order][None])
