"""What partitions share: checks, and topping up clients that have too few examples."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import DataError
from coterie.data.federation import Index

Labels = NDArray[np.generic]


def check_sizes(size: int, clients: int, min_size: int) -> None:
    """Raise `DataError` unless `size` examples can give every client `min_size`."""
    if clients < 1:
        raise DataError(f"at least one client is needed, not {clients}")
    if min_size < 1:
        raise DataError(f"every client needs at least one example, not {min_size}")
    if size < clients * min_size:
        raise DataError(f"{size} examples are too few for {clients} clients with {min_size} each: use fewer clients")


def check_alpha(alpha: float) -> None:
    """Raise `DataError` unless `alpha` is positive and finite."""
    if not (alpha > 0 and np.isfinite(alpha)):
        raise DataError(f"alpha must be above 0, not {alpha}")


def shares(draw: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    """Draw once from Dirichlet(alpha, ..., alpha).

    For tiny alpha all gamma draws can underflow to 0. One client then takes everything, which is the limit.
    """
    gamma = draw.standard_gamma(alpha, clients)
    if not gamma.sum() > 0:
        gamma = np.eye(clients)[draw.integers(clients)]
    found: np.ndarray = gamma / gamma.sum()
    return found


def top_up(parts: list[list[int]], least: int) -> None:
    """Move single examples from the largest part to the smallest until all have `least`.

    There must be enough examples. While a part is below `least`, the largest is above it, so givers and takers never
    change roles, and two heaps find them: O(moves log clients).
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
    """Return each part as a sorted array."""
    return [np.sort(np.array(part, np.int64)) for part in parts]


class Stock:
    """The examples of each class in random order (without a generator, as they are), each handed out once."""

    def __init__(self, labels: Labels, draw: np.random.Generator | None) -> None:
        self.kinds = np.unique(labels)
        members = [np.flatnonzero(labels == kind) for kind in self.kinds]
        self._members = members if draw is None else [draw.permutation(each) for each in members]
        self._used = np.zeros(len(self.kinds), int)

    def left(self, kind: int) -> int:
        """Return how many examples of a class are left."""
        return len(self._members[kind]) - int(self._used[kind])

    def take(self, kind: int, number: int) -> np.ndarray:
        """Hand out `number` examples of the class at position `kind` among the sorted labels."""
        begin = self._used[kind]
        self._used[kind] += number
        return self._members[kind][begin : begin + number]

    def check(self, wanted: np.ndarray) -> None:
        """Raise `DataError` if more examples of a class are wanted than there are."""
        for kind, (number, have) in enumerate(zip(wanted, map(len, self._members), strict=True)):
            if number > have:
                raise DataError(
                    f"class {self.kinds[kind]} has {have} examples, but this partition needs {number}: "
                    f"use fewer or smaller clients"
                )
