"""Rows of many clients: a tree whose leaves are [clients, ...], or an object that keeps such rows elsewhere.

Methods and engines read and replace rows by `take` and `put` only, so they need not know which of the two they have.
`coterie.storage.paged_rows` keeps rows in files where a federation is larger than memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Tree

T = TypeVar("T")


class ClientRows(ABC):
    """Rows of clients that are not one tree in memory. A value: `put` returns a new one and keeps the old as it was."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, ids: Tensor) -> Tree:
        """Copy the rows `ids` into a tree with leaves [len(ids), ...]."""

    @abstractmethod
    def put(self, ids: Tensor, new: Tree) -> ClientRows:
        """Return the same rows, but for those of `ids`, which are `new`."""

    @abstractmethod
    def mean(self, weights: Tensor) -> Tree:
        """Return `tree.mean` of all rows, without holding them all."""


class RowStore(Protocol):
    """Decides where the rows of a federation are kept."""

    def rows(self, first: Tree, size: int) -> Any:
        """Return `size` rows that all begin as `first`: a tree, or `ClientRows`."""


def take(rows: Any, ids: Tensor | int) -> Tree:
    """Copy the rows `ids`; for a number, return that one row without its client axis."""
    if not isinstance(rows, ClientRows):
        return tree.rows(rows, ids)
    if isinstance(ids, Tensor):
        return rows.take(ids)
    return tree.rows(rows.take(torch.tensor([ids], device="cpu")), 0)


def put(rows: T, ids: Tensor, new: Tree) -> T:
    """Return the same rows, but for those of `ids`, which are `new`."""
    return rows.put(ids, new) if isinstance(rows, ClientRows) else tree.put(rows, ids, new)  # type: ignore[return-value]


def mean(rows: Any, weights: Tensor) -> Tree:
    """Return the mean over all rows, weighted by `weights` [clients]."""
    return rows.mean(weights) if isinstance(rows, ClientRows) else tree.mean(rows, weights)
