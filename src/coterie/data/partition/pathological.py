"""Pathological label skew: each client has only a few classes."""

from __future__ import annotations

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Index
from coterie.data.partition.common import Labels, Stock, check_sizes


def classes(labels: Labels, clients: int, number: int, seed: int, each: int | None = None) -> list[Index]:
    """Let every client draw `number` different classes; the clients that drew a class share it evenly.

    Classes that no client draws are not used. If `each` is given, a client gets that many examples of each of its
    classes instead (pFedVMP, appendix C.1: 3 classes, 100 examples of each).
    """
    check_sizes(len(labels), clients, 1)
    draw = rng.generator(seed, "partition", "classes")
    stock = Stock(labels, draw)
    if not 1 <= number <= len(stock.kinds):
        raise DataError(f"a client can have 1 to {len(stock.kinds)} classes, as many as there are, not {number}")
    if each is not None and each < 1:
        raise DataError(f"each = {each}: a client needs at least one example of each of its classes")
    own = np.stack([draw.choice(len(stock.kinds), number, replace=False) for _ in range(clients)])
    holders = np.bincount(own.ravel(), minlength=len(stock.kinds))
    stock.check(holders * (each or 1))
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for kind in map(int, np.flatnonzero(holders)):
        size = stock.left(kind)
        # Without `each` the first holders get one more where a class does not divide evenly.
        counts = [each or size // holders[kind] + (i < size % holders[kind]) for i in range(holders[kind])]
        for client, count in zip(np.flatnonzero((own == kind).any(1)), counts, strict=True):
            parts[client].append(stock.take(kind, int(count)))
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def shards(labels: Labels, clients: int, number: int, seed: int) -> list[Index]:
    """Sort the examples by label, cut them into clients x `number` equal shards, and give each client `number` shards.

    This is FedAvg's pathological partition. A shard can span a class boundary, so a client can have more classes than
    shards.
    """
    if number < 1:
        raise DataError(f"a client needs at least one shard, not {number}")
    check_sizes(len(labels), clients, number)
    draw = rng.generator(seed, "partition", "shards")
    order = draw.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    pieces = np.array_split(order, clients * number)
    dealt = draw.permutation(clients * number).reshape(clients, number)
    return [np.sort(np.concatenate([pieces[i] for i in own])).astype(np.int64) for own in dealt]
