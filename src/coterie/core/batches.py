"""Minibatches: what a client function sees of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Less than the total weight of any real minibatch: 0 / max(total, MIN_TOTAL_WEIGHT) is 0 where all examples are masked.
MIN_TOTAL_WEIGHT = 1e-6
# Under privacy a step is taken even if nobody was drawn for it. One example then has this weight, next to nothing.
NOBODY_DRAWN = 1e-9
IS_DRAWN = 1e-3  # weights above this are of examples that were drawn


class Batch(NamedTuple):
    """One minibatch of one client."""

    x: Tensor  # [batch, ...]
    y: Tensor  # [batch, ...]
    mask: Tensor  # [batch]; the example's weight in the loss (1, or its class's weight), and 0 for padding
    key: Tensor  # [] int64; seeds the dropout of this step
    pace: Tensor | tuple[()] = ()  # []; what this step's size is multiplied by (`coterie.core.schedules`); (): 1

    def halves(self) -> tuple[Batch, Batch]:
        """Split an iteration of `Batches.paired` into its two minibatches; each gets its own dropout key."""
        width = len(self.mask) // 2
        first = self._replace(x=self.x[:width], y=self.y[:width], mask=self.mask[:width])
        rest = self.x[width:], self.y[width:], self.mask[width:]
        return first, Batch(*rest, self.key ^ _OTHER_KEY, self.pace)


FILLED_BY = 32  # examples; see `Batches.filled`
_LAST = 2**62  # sorts behind every position and every class
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
    everyone: Withheld | tuple[()] = ()  # each example once, where minibatches are drawn with repetition (privacy)
    pace: Tensor | tuple[()] = ()  # [epochs, steps]; as in `Batch`, if the learning rate has a schedule

    def total_pace(self) -> Tensor:
        """Return the sum of the paces of the client's steps, a scalar; without a schedule, their number.

        Times the optimiser's own step size, it is how far the steps of a round go along a gradient that stays the same.
        """
        taken = self.mask.flatten(0, 1).any(-1)
        return taken.sum() if isinstance(self.pace, tuple) else (self.pace.flatten() * taken).sum()

    def top_pace(self) -> Tensor | float:
        """Return the largest pace of the client's steps, a scalar; without a schedule, 1."""
        if isinstance(self.pace, tuple):
            return 1.0
        return (self.pace.flatten() * self.mask.flatten(0, 1).any(-1)).max()

    def once(self) -> Batches:
        """Return minibatches of one epoch, for what is added up over examples: each of them comes once."""
        if not self.everyone:
            return self.epoch(0)
        index, mask = self.everyone
        keys = self.key[0, 0] + torch.zeros_like(index[..., 0])
        return self._replace(index=index, mask=mask, key=keys, everyone=(), pace=())

    def of_withheld(self) -> Batches:
        """Return minibatches of the withheld examples instead: one epoch, always in the same order.

        All are masked if there are none, because the client has a single example; there is no epoch if the method
        withholds nothing.
        """
        if not self.withheld:
            return self.epoch(0, 0)
        index, mask = self.withheld
        return self._replace(index=index, mask=mask, key=torch.zeros_like(index[..., 0]), withheld=(), pace=())

    def epoch(self, start: int, stop: int | None = None) -> Batches:
        """Return the epochs from `start` up to, but not including, `stop`; by default the one epoch `start`."""
        part = slice(start, start + 1 if stop is None else stop)
        return self._each(lambda leaf: leaf[part])

    def first_steps(self, steps: int) -> Batches:
        """Mask out all but the client's first `steps` minibatches; shapes stay as they are."""
        flat = self.mask.flatten(0, 1)  # [epochs * steps, batch]
        kept = flat.any(-1).cumsum(0) <= steps
        return self._replace(mask=(flat * kept[:, None]).reshape(self.mask.shape))

    def repeated(self, number: int) -> Batches:
        """Return the same epochs `number` times, one after the other."""
        return self._each(lambda leaf: torch.cat([leaf] * number))

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
        return self._replace(index=index, mask=mask, key=self.key[:, ::number], pace=())

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
        pace = self.pace if isinstance(self.pace, tuple) else self.pace.flatten()[order][None]
        return self._replace(index=index, mask=mask, key=key[order][None], pace=pace)

    def whole(self, most: int) -> Batches:
        """Put the examples of each epoch into one minibatch, for what needs all of a client's examples at once.

        A step of a scan over the result can differentiate through all of them; `batch` reads them without a scan. An
        example that an epoch holds twice counts once. Examples stand in the order of the pool, whatever the order in
        which they were drawn, and padding, which is last, repeats them in turn for the sake of normalisation layers.

        Args:
            most: the number of examples in the minibatch, which bounds memory. Of a client that has more, every epoch
                takes others, the first that were drawn of each class, as many as is its share; at least one of each,
                as far as there is room.

        Returns:
            Batches whose `index` and `mask` are [epochs, 1, most]. It is always so many, since what normalisation
            layers make of them must not depend on who else is stacked; `filled` says how many may be real.
        """
        index, mask = self.index.flatten(1), self.mask.flatten(1)
        width = index.shape[1]
        missing = (*index.shape[:1], max(most - width, 0))
        index = torch.cat([index, index.new_zeros(missing)], 1)
        mask = torch.cat([mask, mask.new_zeros(missing)], 1)
        order = _in_order_of_the_pool(index, mask)
        first = torch.ones_like(order[:, :1], dtype=torch.bool)
        new = torch.cat([first, index.gather(1, order).diff(dim=1) != 0], 1)
        mask = mask * new.gather(1, torch.argsort(order, 1))
        if width > most:
            chosen = _of_every_class(self.y[index], mask, most)
            index, mask = index.gather(1, chosen), mask.gather(1, chosen)
        order = _in_order_of_the_pool(index, mask)
        place, number = torch.arange(most, device=index.device), (mask > 0).sum(1, keepdim=True)
        again = torch.where(place < number, place, place % number.clamp_min(1))
        index, mask = index.gather(1, order.gather(1, again)), mask.gather(1, order)
        pace = self.pace if isinstance(self.pace, tuple) else self.pace[:, :1]
        return self._replace(index=index[:, None], mask=mask[:, None], key=self.key[:, :1], pace=pace)

    def filled(self, most: int) -> int:
        """Return how many of the first examples of `whole(most)` may be more than padding, whichever client this is.

        What costs more than a pass through the model (a matrix of all pairs of examples) can be done for these alone.
        It is a multiple of 32, or `most`: then a few masked steps more do not change it.
        """
        width = self.index.shape[1] * self.index.shape[2]
        return min(most, -(-width // FILLED_BY) * FILLED_BY)

    def repeated_with_new_keys(self, times: int) -> Batches:
        """Take every epoch `times` times, one after the other, each time with other keys."""
        each = self._each(lambda leaf: leaf.repeat_interleave(times, 0))
        again = torch.arange(len(each.key), device=each.key.device) % times
        return each._replace(key=each.key ^ (again[:, None] * _OTHER_KEY))

    def batch(self) -> Batch:
        """Return the first minibatch of the first epoch, for use without a scan."""
        index, pace = self.index[0, 0], self.pace if isinstance(self.pace, tuple) else self.pace[0, 0]
        return Batch(self.x[index], self.y[index], self.mask[0, 0], self.key[0, 0], pace)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batches:
        """Change what there is of every minibatch: positions, mask, key and pace."""
        pace = self.pace if isinstance(self.pace, tuple) else change(self.pace)
        return self._replace(index=change(self.index), mask=change(self.mask), key=change(self.key), pace=pace)


def _in_order_of_the_pool(index: Tensor, mask: Tensor) -> Tensor:
    """Return the order, [epochs, examples], that sorts positions, those that are masked last."""
    return torch.argsort(torch.where(mask > 0, index, _LAST), dim=1, stable=True)


def _of_every_class(y: Tensor, mask: Tensor, room: int) -> Tensor:
    """Choose `room` of the examples of each epoch, of every class its share.

    Args:
        y: [epochs, examples, ...]; without classes (no whole number an example), all count as one class.
        mask: [epochs, examples].
        room: how many.

    Returns:
        Their places, [epochs, room].
    """
    has_classes = y.ndim == 2 and not y.is_floating_point()
    group = torch.where(mask > 0, y if has_classes else torch.zeros_like(mask, dtype=torch.int64), _LAST)
    order = torch.argsort(group, dim=1, stable=True)  # class by class, as they were drawn
    group = group.gather(1, order)
    place = torch.arange(group.shape[1], device=group.device)
    apart = group.diff(dim=1) != 0
    edge = torch.ones_like(group[:, :1], dtype=torch.bool)
    begin = torch.where(torch.cat([edge, apart], 1), place, 0).cummax(1).values
    end = torch.where(torch.cat([apart, edge], 1), place, _LAST).flip(1).cummin(1).values.flip(1)
    turn = (place - begin) / (end - begin + 1)
    turn = torch.where(group == _LAST, torch.inf, turn)
    return order.gather(1, torch.argsort(turn, dim=1, stable=True)[:, :room])
