"""Packing: clients of different sizes share the lanes of one stacked step.

Clients that are stacked take their steps together, and the smallest are done long before the largest. So a scan has
*lanes*: a lane takes all minibatches of one client, then those of the next, and so on. With enough work in each, nearly
every lane is busy in every step, whatever the sizes are, and every step has the same shape.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import tree
from coterie.core.plain import steps_first, walk

if TYPE_CHECKING:
    from coterie.core.scan import Program, Runner

STEP_COST = 10  # what a step costs of itself, in clients: more lanes are better than more steps


class Turn(NamedTuple):
    """The next client takes over a lane."""

    lane: int
    leaves: int  # the client that is done
    comes: int


class Schedule(NamedTuple):
    """Who is on which lane in which step."""

    client: NDArray[np.int64]  # [lanes, steps]; of a lane that has nothing left, one of the others
    live: NDArray[np.bool_]  # [lanes, steps]
    place: NDArray[np.int64]  # [lanes, steps]; which of its minibatches, counted from the client's first
    turns: dict[int, list[Turn]]  # before which step who follows whom
    last: list[tuple[int, int]]  # (lane, client) at the end


def balance(sizes: Sequence[int], number: int, most: int | None = None) -> list[list[int]]:
    """Divide things of the given sizes into `number` piles of about equal sums, of at most `most` things each.

    The largest come first, each to the pile with the smallest sum so far. Returns the positions in each pile.
    """
    piles: list[list[int]] = [[] for _ in range(number)]
    sums = [(0, pile) for pile in range(number)]
    for each in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, pile = heapq.heappop(sums)
        piles[pile].append(each)
        if most is None or len(piles[pile]) < most:
            heapq.heappush(sums, (total + sizes[each], pile))
    return piles


def best_width(sizes: Sequence[int], most: int) -> int:
    """Return how many lanes, at most `most`, make the least work: steps x (lanes + what a step costs of itself)."""
    return _best_width(tuple(sizes), min(most, len(sizes)))


@functools.lru_cache(maxsize=256)
def _best_width(sizes: tuple[int, ...], most: int) -> int:
    full = -(-sum(sizes) // max(max(sizes), 1))  # all of them busy, if the largest client sets the length
    even = {-(-len(sizes) // number) for number in range(1, 9)}  # so many clients one after another
    some = {lanes for lanes in (*range(full, full + 4), *even) if 1 <= lanes <= most} | {most}
    return min(sorted(some), key=lambda lanes: (STEP_COST + lanes) * _longest(sizes, balance(sizes, lanes)))


def schedule(sizes: Sequence[int], lanes: int) -> Schedule:
    """Assign clients, by their numbers of steps (not all 0), to lanes. The result is not to be changed."""
    return _schedule(tuple(sizes), lanes)


@functools.lru_cache(maxsize=64)  # a chunk is often the same from round to round
def _schedule(sizes: tuple[int, ...], lanes: int) -> Schedule:
    piles = [[i for i in pile if sizes[i]] for pile in balance(sizes, lanes)]
    length = _longest(sizes, piles)
    client = np.full((lanes, length), piles[0][0])
    place, live = np.zeros_like(client), np.zeros(client.shape, bool)
    turns: dict[int, list[Turn]] = {}
    for lane, pile in enumerate(piles):
        at = 0
        for before, i in zip([None, *pile], pile, strict=False):
            if before is not None:
                turns.setdefault(at, []).append(Turn(lane, before, i))
            part = slice(at, at + sizes[i])
            client[lane, part], place[lane, part], live[lane, part] = i, np.arange(sizes[i]), True
            at += sizes[i]
    return Schedule(client, live, place, turns, [(lane, pile[-1]) for lane, pile in enumerate(piles) if pile])


def _longest(sizes: Sequence[int], piles: list[list[int]]) -> int:
    return max(sum(sizes[i] for i in pile) for pile in piles)


Prepare = Callable[["Program", list[Tensor]], "Runner | None"]  # (program, tensors of the first step) -> faster step


@dataclass(frozen=True)
class Packed:
    """A back-end like the plain one, in which clients share at most `width` lanes (None: as many as there are)."""

    width: int | None = None

    def scan(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor]:
        return scan_packed(program, carry, fixed, time, self.width, None)


def scan_packed(
    program: Program,
    carry: list[Tensor],
    fixed: list[Tensor],
    time: tuple[Tensor, ...],
    width: int | None,
    prepare: Prepare | None,
) -> list[Tensor]:
    """Run a scan step by step from Python, with lanes where they save work.

    Args:
        program, carry, fixed, time: as for `coterie.core.backend.Backend.scan`.
        width: how many lanes at most; None: as many as there are clients.
        prepare: makes a faster step of the program, or None where it cannot. A prepared step has one shape, so every
            scan then has exactly `width` lanes, whoever takes part.
    """
    levels, mask = len(program.lifts), time[1]
    carry = [value.contiguous() for value in carry]
    *aux, x, y = (value.contiguous() for value in fixed)
    lanes = _lanes(program, carry, aux, mask, width, one_shape=prepare is not None) if levels else None
    if lanes is None:
        index, mask, *others = steps_first(time, levels)
    else:
        index, mask, *others = (lanes.arrange(value, levels) for value in time)
        mask = mask * lanes.live.reshape(*lanes.live.shape, *[1] * (mask.ndim - 2))
        carry, aux = lanes.carry, lanes.aux
    arranged = (index, mask, *others)
    select = levels > 0 and (mask.is_meta or not bool(mask.any(-1).all()))
    first = (program.gather(x, index[:1], -2), program.gather(y, index[:1], -1), *(part[:1] for part in arranged[1:]))
    prepared = prepare(program, [*carry, *aux, *(part[0] for part in first)]) if prepare else None
    step = prepared or program.function(select)
    turns = lanes.schedule.turns if lanes is not None else {}
    for begin, end in itertools.pairwise([0, *sorted(turns), len(index)]):
        if lanes is not None and begin in turns:
            carry = lanes.turn(begin, carry)
        carry = walk(program, step, carry, aux, (x, y), tuple(part[begin:end] for part in arranged))
    return carry if lanes is None else lanes.results(carry)


def _lanes(
    program: Program, start: list[Tensor], aux: list[Tensor], mask: Tensor, width: int | None, one_shape: bool
) -> Lanes | None:
    """Return the lanes of a scan over stacked clients; None where each client just has its own."""
    *own, shared_x, shared_y = (dim is None for dim in program.lifts[-1])  # of the clients, who are outermost
    if mask.is_meta or not start or not (shared_x and shared_y):
        return None
    real = mask.movedim(len(program.lifts), 1).flatten(2).any(2).cpu().numpy()  # [clients, steps]
    sizes = real.sum(1).tolist()
    number, most = len(sizes), width or len(sizes)
    lanes = most if one_shape else best_width(sizes, min(most, number))
    if lanes == number and (min(sizes) == max(sizes) or (one_shape and best_width(sizes, number) == number)):
        return None
    return Lanes(schedule(sizes, lanes), real, start, aux, [not each for each in own])


class Lanes:
    """The rows of clients that share lanes: what a lane carries is written back when the next client comes."""

    def __init__(
        self, schedule: Schedule, real: NDArray[np.bool_], start: list[Tensor], aux: list[Tensor], lifted: list[bool]
    ) -> None:
        self.schedule, self._start, self._aux, self._lifted = schedule, start, aux, lifted
        device = start[0].device
        when = np.argsort(~real, axis=1, kind="stable")  # a client's own steps first
        self._client = torch.from_numpy(schedule.client.T.copy()).to(device)  # [steps, lanes]
        self._when = torch.from_numpy(when[schedule.client, schedule.place].T.copy()).to(device)
        self.live = torch.from_numpy(schedule.live.T.copy()).to(device)
        self.carry = [leaf.index_select(0, self._client[0]) for leaf in start]
        self.aux = [leaf.index_select(0, self._client[0]) if own else leaf for leaf, own in self._each_aux()]
        self._done = [leaf.clone() for leaf in start]  # who has no minibatch stays as it is

    def _each_aux(self) -> Iterable[tuple[Tensor, bool]]:
        return zip(self._aux, self._lifted, strict=True)

    def arrange(self, value: Tensor, levels: int) -> Tensor:
        """Rearrange [clients, ..., steps, ...] to [steps, lanes, ...]."""
        return value.movedim(levels, 1)[self._client, self._when]

    def turn(self, number: int, carry: list[Tensor]) -> list[Tensor]:
        """Before step `number`, let the next clients take over."""
        taken = {leaf.data_ptr() for leaf in (*self.aux, *self._aux)}
        for at, leaf in enumerate(carry):  # what a step gives back may show something else, or one value many times
            if leaf.data_ptr() in taken or not leaf.is_contiguous():
                carry = [*carry[:at], leaf.clone(memory_format=torch.contiguous_format), *carry[at + 1 :]]
            taken.add(carry[at].data_ptr())
        for lane, leaves, comes in self.schedule.turns[number]:
            for leaf, first, done in zip(carry, self._start, self._done, strict=True):
                done[leaves] = leaf[lane]
                leaf[lane] = first[comes]
            for leaf, (whole, own) in zip(self.aux, self._each_aux(), strict=True):
                if own:
                    leaf[lane] = whole[comes]
        return carry

    def results(self, carry: list[Tensor]) -> list[Tensor]:
        """Return the rows of all clients, given what the lanes carry at the end."""
        lanes, clients = (torch.tensor(each, device=carry[0].device) for each in zip(*self.schedule.last, strict=True))
        for leaf, done in zip(carry, self._done, strict=True):
            tree.write_rows(done, clients, leaf.index_select(0, lanes))
        return self._done
