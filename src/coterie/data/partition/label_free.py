"""Partitions that do not look at labels: equal parts, unequal parts, and parts that the data came in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie import rng
from coterie.data.federation import Index
from coterie.data.partition.common import as_index, check_alpha, check_sizes, shares, top_up
from coterie.errors import DataError


def iid(size: int, clients: int, seed: int) -> list[Index]:
    """Equal random parts; sizes differ by at most one."""
    check_sizes(size, clients, 1)
    order = rng.generator(seed, "partition", "iid").permutation(size)
    return [np.sort(part).astype(np.int64) for part in np.array_split(order, clients)]


def quantity(size: int, clients: int, alpha: float, seed: int, min_size: int = 10) -> list[Index]:
    """Quantity skew: random parts whose sizes are in shares drawn from Dirichlet(alpha, ..., alpha)."""
    check_alpha(alpha)
    check_sizes(size, clients, min_size)
    draw = rng.generator(seed, "partition", "quantity")
    cuts = (np.cumsum(shares(draw, alpha, clients))[:-1] * size).astype(int)
    parts = [part.tolist() for part in np.split(draw.permutation(size), cuts)]
    top_up(parts, min_size)
    return as_index(parts)


def natural(owner: NDArray[np.generic], clients: int | None, seed: int, min_size: int = 1) -> list[Index]:
    """The silos that the data came in, in the order of their sorted names; those below `min_size` are left out.

    With `clients`, so many of them, drawn at random.
    """
    names, which, sizes = np.unique(owner, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= max(min_size, 1))
    if clients is not None:
        if not 1 <= clients <= len(large):
            raise DataError(
                f"there are {len(large)} owners with at least {max(min_size, 1)} examples (of {len(names)}), "
                f"not {clients}: use at most {len(large)} clients"
            )
        large = np.sort(rng.generator(seed, "partition", "natural").choice(large, clients, replace=False))
    if not len(large):
        raise DataError(f"no owner has {min_size} examples: lower min, or give them more data")
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(sizes)
    return [order[ends[i] - sizes[i] : ends[i]].astype(np.int64) for i in large]


def merged(owner: NDArray[np.generic], clients: int, alpha: float, seed: int, least: int = 10) -> list[Index]:
    """Owners, shuffled and dealt out whole: each client has `least` of them, and of the rest a share that is drawn from
    Dirichlet(alpha, ..., alpha) (pFedBreD's Sent140: 10 clients of tweets by many users, alpha 0.5)."""
    check_alpha(alpha)
    names, which = np.unique(owner, return_inverse=True)
    if clients < 1 or least < 1 or len(names) < clients * least:
        raise DataError(f"{len(names)} owners cannot give {clients} clients {least} owners each: use fewer clients")
    draw = rng.generator(seed, "partition", "merged")
    rest = len(names) - clients * least
    ends = (np.cumsum(shares(draw, alpha, clients)) * rest).round().astype(int)
    ends[-1] = rest  # whatever rounding made of it
    client_of = np.searchsorted(ends + least * np.arange(1, clients + 1), draw.permutation(len(names)), side="right")
    return [np.flatnonzero(client_of[which] == client).astype(np.int64) for client in range(clients)]


def subsample(size: int, number: int, seed: int) -> Index:
    """So many of `size` positions, drawn uniformly, sorted."""
    if not 1 <= number <= size:
        raise DataError(f"there are {size} examples: take between 1 and {size}, not {number}")
    return np.sort(rng.generator(seed, "partition", "subsample").choice(size, number, replace=False)).astype(np.int64)
