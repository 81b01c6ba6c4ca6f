"""Minibatches: what a client function sees of the data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Less than the total weight of any real minibatch: 0 / max(total, MIN_TOTAL_WEIGHT) is 0 where all examples are masked.
MIN_TOTAL_WEIGHT = 1e-6


class Batch(NamedTuple):
    """One minibatch of one client."""

    x: Tensor  # [batch, ...]
    y: Tensor  # [batch, ...]
    mask: Tensor  # [batch]; the example's weight in the loss (1, or its class's weight), and 0 for padding
    key: Tensor  # [] int64; seeds the dropout of this step

    def halves(self) -> tuple[Batch, Batch]:
        """Split an iteration of `Batches.paired` into its two minibatches; each gets its own dropout key."""
        width = len(self.mask) // 2
        first = Batch(self.x[:width], self.y[:width], self.mask[:width], self.key)
        return first, Batch(self.x[width:], self.y[width:], self.mask[width:], self.key ^ _OTHER_KEY)


_OTHER_KEY = 0x2545F491 << 30  # flips bits of the upper half of a key, which dropout hashes separately from positions


class Withheld(NamedTuple):
    """Examples that a method withholds from training, to measure models on them; see `Method.withheld_share`."""

    index: Tensor  # type: ignore[assignment]  # [1, steps, batch] int64; positions in the pool
    mask: Tensor  # [1, steps, batch]; as in `Batch`


class Batches(NamedTuple):
    """One client's minibatches for one round, as positions in a pool of examples that is never copied.

    A short minibatch is filled up with other examples of the same client, which are masked out, so that normalisation
    layers see real data. Clients are stacked, so a client with few examples also has whole steps that are masked out.
    """

    x: Tensor  # [pool, ...]; the examples of all clients
    y: Tensor  # [pool, ...]
    index: Tensor  # type: ignore[assignment]  # [epochs, steps, batch] int64; positions in the pool
    mask: Tensor  # [epochs, steps, batch]; as in `Batch`
    key: Tensor  # [epochs, steps] int64; as in `Batch`
    count: Tensor  # type: ignore[assignment]  # []; the number of the client's examples that it trains on
    withheld: Withheld | tuple[()] = ()  # examples that are in none of these minibatches, if the method asks for some

    def of_withheld(self) -> Batches:
        """Return minibatches of the withheld examples instead: one epoch, always in the same order.

        All are masked if there are none, because the client has a single example; there is no epoch if the method
        withholds nothing.
        """
        if not self.withheld:
            return self.epoch(0, 0)
        index, mask = self.withheld
        return self._replace(index=index, mask=mask, key=torch.zeros_like(index[..., 0]), withheld=())

    def epoch(self, start: int, stop: int | None = None) -> Batches:
        """Return the epochs from `start` up to, but not including, `stop`; by default the one epoch `start`."""
        part = slice(start, start + 1 if stop is None else stop)
        return self._replace(index=self.index[part], mask=self.mask[part], key=self.key[part])

    def first_steps(self, steps: int) -> Batches:
        """Mask out all but the client's first `steps` minibatches; shapes stay as they are."""
        flat = self.mask.flatten(0, 1)  # [epochs * steps, batch]
        kept = flat.any(-1).cumsum(0) <= steps
        return self._replace(mask=(flat * kept[:, None]).reshape(self.mask.shape))

    def repeated(self, number: int) -> Batches:
        """Return the same epochs `number` times, one after the other."""
        index, mask, key = (torch.cat([part] * number) for part in (self.index, self.mask, self.key))
        return self._replace(index=index, mask=mask, key=key)

    def merged(self, examples: int) -> Batches:
        """Merge neighbouring minibatches into fewer ones of at most about `examples` examples.

        This is for passes that only add up over examples, where the grouping does not matter and larger minibatches
        are faster. A minibatch that is already larger stays as it is.
        """
        steps, batch = self.index.shape[1:]
        # The number does not depend on how many steps there are: results must not depend on who else is stacked.
        number = max(examples // batch, 1)
        missing = -steps % number

        def merge(part: Tensor, last: Tensor) -> Tensor:
            filled = torch.cat([part, last.expand(-1, missing, -1)], 1)
            return filled.reshape(len(part), (steps + missing) // number, number * batch)

        index, mask = merge(self.index, self.index[:, -1:]), merge(self.mask, 0 * self.mask[:, -1:])
        return self._replace(index=index, mask=mask, key=self.key[:, ::number])

    def paired(self) -> Batches:
        """Pair every minibatch with the one after it; `Batch.halves` splits a pair.

        There are as many pairs as there were minibatches. The last minibatch is paired with the first, so every one is
        the first of one pair and the second of another. A client with a single minibatch gets it twice.

        Returns:
            Batches of one epoch: `index` and `mask` are [1, epochs * steps, 2 * batch]; padding comes last.
        """
        index, mask, key = (part.flatten(0, 1) for part in (self.index, self.mask, self.key))
        real = mask.any(-1)
        order = torch.argsort((~real).to(torch.int64), stable=True)  # the client's real minibatches, then padding
        place = torch.arange(len(order), device=order.device)
        after = torch.where(place < real.sum(), (place + 1) % real.sum().clamp_min(1), place)
        index, mask = (torch.cat([part[order], part[order][after]], -1)[None] for part in (index, mask))
        return self._replace(index=index, mask=mask, key=key[order][None])
