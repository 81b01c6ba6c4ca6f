"""Partitions with label skew by Dirichlet draws: over every class, or over clusters of classes."""

from __future__ import annotations

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Index
from coterie.data.partition.common import Labels, as_index, check_alpha, check_sizes, shares, top_up


def dirichlet(labels: Labels, clients: int, alpha: float, seed: int, min_size: int = 10) -> list[Index]:
    """Split each class in shares drawn from Dirichlet(alpha, ..., alpha); a small alpha means few classes per client.

    Clients with fewer than `min_size` examples are topped up, one example at a time, from the largest client. This ends
    for every legal input; redrawing until all are large enough does not.
    """
    check_alpha(alpha)
    check_sizes(len(labels), clients, min_size)
    draw = rng.generator(seed, "partition", "dirichlet")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(shares(draw, alpha, clients))[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        draw.shuffle(part)
    top_up(parts, min_size)
    return as_index(parts)


def clusters(labels: Labels, clients: int, number: int, alpha: float, seed: int, min_size: int = 10) -> list[Index]:
    """Partition as FedEM does (FedeRiCo, appendix C).

    The classes are shuffled into `number` clusters. The examples of a cluster go to the clients by
    Multinomial(Dirichlet(alpha, ..., alpha)), regardless of their class. FedEM leaves out clients without examples;
    here they are topped up to `min_size` as in `dirichlet`.
    """
    check_alpha(alpha)
    check_sizes(len(labels), clients, min_size)
    draw = rng.generator(seed, "partition", "clusters")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for cluster in label_groups(labels, number, draw):
        members = draw.permutation(np.flatnonzero(np.isin(labels, cluster)))
        counts = draw.multinomial(len(members), shares(draw, alpha, clients))
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)[:-1]), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        draw.shuffle(part)
    top_up(parts, min_size)
    return as_index(parts)


def label_groups(labels: Labels, number: int, draw: np.random.Generator) -> list[Labels]:
    """Shuffle the classes into disjoint groups of almost equal size."""
    kinds = np.unique(labels)
    if not 1 <= number <= len(kinds):
        raise DataError(f"{len(kinds)} classes can form 1 to {len(kinds)} groups, not {number}")
    return np.array_split(draw.permutation(kinds), number)
