"""Lanes: how clients of different sizes share steps of one width.

Clients that are stacked take their steps together, and the smallest are through long before the largest. So a scan has
*lanes*: a lane takes all minibatches of one client, then those of the next, and so on. With enough work in each, nearly
every lane is busy in every step, whatever the sizes are, and every step has the same shape.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HEAVY = 10  # a step's own cost, in clients: more lanes are better than more steps


class Turn(NamedTuple):
    lane: int
    leaves: int  # the client that is through
    comes: int


class Schedule(NamedTuple):
    client: NDArray[np.int64]  # [lanes, steps]; of a lane that has nothing left, one of the others
    live: NDArray[np.bool_]  # [lanes, steps]
    place: NDArray[np.int64]  # [lanes, steps]; which of its minibatches, counted from the client's first
    turns: dict[int, list[Turn]]  # before which step who follows whom
    last: list[tuple[int, int]]  # (lane, client) at the end


def deal(sizes: Sequence[int], number: int, most: int | None = None) -> list[list[int]]:
    """The largest first, each to the pile with the least so far (and fewer than `most` in it): piles of even sums."""
    piles: list[list[int]] = [[] for _ in range(number)]
    sums = [(0, pile) for pile in range(number)]
    for each in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        total, pile = heapq.heappop(sums)
        piles[pile].append(each)
        if most is None or len(piles[pile]) < most:
            heapq.heappush(sums, (total + sizes[each], pile))
    return piles


def fitting(sizes: Sequence[int], most: int) -> int:
    """How many lanes, at most `most`, for the least work: steps x (lanes + what a step costs of itself)."""
    return _fitting(tuple(sizes), min(most, len(sizes)))


@functools.lru_cache(maxsize=256)
def _fitting(sizes: tuple[int, ...], most: int) -> int:
    full = -(-sum(sizes) // max(max(sizes), 1))  # all of them busy, if the largest client sets the length
    even = {-(-len(sizes) // number) for number in range(1, 9)}  # so many clients one after another
    some = {lanes for lanes in (*range(full, full + 4), *even) if 1 <= lanes <= most} | {most}
    return min(sorted(some), key=lambda lanes: (HEAVY + lanes) * _longest(sizes, deal(sizes, lanes)))


def schedule(sizes: Sequence[int], lanes: int) -> Schedule:
    """Who is on which lane when; `sizes` are the clients' numbers of steps, not all of them 0. Not to be changed."""
    return _schedule(tuple(sizes), lanes)


@functools.lru_cache(maxsize=64)  # a chunk is often the same from round to round
def _schedule(sizes: tuple[int, ...], lanes: int) -> Schedule:
    piles = [[i for i in pile if sizes[i]] for pile in deal(sizes, lanes)]
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
