"""What partitions share: their checks, and filling up clients that got too little."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from coterie.data.federation import Index
from coterie.errors import DataError

Labels = NDArray[np.generic]


def check_sizes(size: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise DataError(f"at least one client is needed, not {clients}")
    if min_size < 1:
        raise DataError(f"every client needs at least one example, not {min_size}")
    if size < clients * min_size:
        raise DataError(f"{size} examples cannot give {clients} clients {min_size} each: use fewer clients")


def check_alpha(alpha: float) -> None:
    if not (alpha > 0 and np.isfinite(alpha)):
        raise DataError(f"alpha is above 0, not {alpha}")


def shares(draw: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    """One draw from Dirichlet(alpha, ..., alpha).

    For tiny alpha all gamma draws can underflow to 0; one client then takes everything, which is the limit.
    """
    gamma = draw.standard_gamma(alpha, clients)
    if not gamma.sum() > 0:
        gamma = np.eye(clients)[draw.integers(clients)]
    found: np.ndarray = gamma / gamma.sum()
    return found


def top_up(parts: list[list[int]], least: int) -> None:
    """Moves single examples from the largest part to the smallest until all have `least`: ends if there are enough.

    While some part is below `least`, the largest is above it. So those that give and those that take never change
    roles, and two heaps find them: O(moves log clients).
    """
    small = [(len(part), i) for i, part in enumerate(parts) if len(part) < least]
    large = [(-len(part), i) for i, part in enumerate(parts) if len(part) > least]
    heapq.heapify(small)
    heapq.heapify(large)
    while small:
        size, taker = small[0]
        minus, giver = large[0]
        parts[taker].append(parts[giver].pop())
        heapq.heapreplace(large, (minus + 1, giver))
        if size + 1 < least:
            heapq.heapreplace(small, (size + 1, taker))
        else:
            heapq.heappop(small)


def as_index(parts: list[list[int]]) -> list[Index]:
    return [np.sort(np.array(part, np.int64)) for part in parts]


class Stock:
    """The examples of each class in random order, handed out from the front, each once."""

    def __init__(self, labels: Labels, draw: np.random.Generator) -> None:
        self.kinds = np.unique(labels)
        self._members = [draw.permutation(np.flatnonzero(labels == kind)) for kind in self.kinds]
        self._used = np.zeros(len(self.kinds), int)

    def left(self, kind: int) -> int:
        return len(self._members[kind]) - int(self._used[kind])

    def take(self, kind: int, number: int) -> np.ndarray:
        """Of the class at position `kind` among the sorted labels."""
        begin = self._used[kind]
        self._used[kind] += number
        return self._members[kind][begin : begin + number]

    def check(self, wanted: np.ndarray) -> None:
        """Refuses if more of a class is wanted than there is."""
        for kind, (number, have) in enumerate(zip(wanted, map(len, self._members), strict=True)):
            if number > have:
                raise DataError(
                    f"class {self.kinds[kind]} has {have} examples, but this partition wants {number} of it: "
                    f"use fewer clients, or smaller ones"
                )
