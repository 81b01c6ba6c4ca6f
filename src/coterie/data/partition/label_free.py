"""Partitions that do not depend on labels: equal parts, unequal parts, and the natural owners of the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Index
from coterie.data.partition.common import as_index, check_alpha, check_sizes, shares, top_up


def iid(size: int, clients: int, seed: int) -> list[Index]:
    """Return equal random parts; their sizes differ by at most one."""
    check_sizes(size, clients, 1)
    order = rng.generator(seed, "partition", "iid").permutation(size)
    return [np.sort(part).astype(np.int64) for part in np.array_split(order, clients)]


def quantity(size: int, clients: int, alpha: float, seed: int, min_size: int = 10) -> list[Index]:
    """Return random parts with quantity skew: their shares are drawn from Dirichlet(alpha, ..., alpha)."""
    check_alpha(alpha)
    check_sizes(size, clients, min_size)
    draw = rng.generator(seed, "partition", "quantity")
    cuts = (np.cumsum(shares(draw, alpha, clients))[:-1] * size).astype(int)
    parts = [part.tolist() for part in np.split(draw.permutation(size), cuts)]
    top_up(parts, min_size)
    return as_index(parts)


def natural(owner: NDArray[np.generic], clients: int | None, seed: int, min_size: int = 1) -> list[Index]:
    """Return one part per owner, in the order of their sorted names, without owners below `min_size` examples.

    If `clients` is given, that many owners are drawn at random.
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
        raise DataError(f"no owner has {min_size} examples: lower min, or use more data")
    order = np.argsort(which, kind="stable")
    ends = np.cumsum(sizes)
    return [order[ends[i] - sizes[i] : ends[i]].astype(np.int64) for i in large]


def merged(owner: NDArray[np.generic], clients: int, alpha: float, seed: int, least: int = 10) -> list[Index]:
    """Merge whole owners into clients.

    Owners are shuffled. Each client gets `least` of them, and of the rest a share drawn from Dirichlet(alpha, ...,
    alpha) (pFedBreD's Sent140: 10 clients with tweets by many users, alpha 0.5).
    """
    check_alpha(alpha)
    names, which = np.unique(owner, return_inverse=True)
    if clients < 1 or least < 1 or len(names) < clients * least:
        raise DataError(
            f"{len(names)} owners are too few for {clients} clients with {least} owners each: use fewer clients"
        )
    draw = rng.generator(seed, "partition", "merged")
    rest = len(names) - clients * least
    ends = (np.cumsum(shares(draw, alpha, clients)) * rest).round().astype(int)
    ends[-1] = rest  # despite rounding
    client_of = np.searchsorted(ends + least * np.arange(1, clients + 1), draw.permutation(len(names)), side="right")
    return [np.flatnonzero(client_of[which] == client).astype(np.int64) for client in range(clients)]


def subsample(size: int, number: int, seed: int) -> Index:
    """Draw `number` of `size` positions uniformly; they are sorted."""
    if not 1 <= number <= size:
        raise DataError(f"take must be between 1 and the number of examples, {size}, not {number}")
    return np.sort(rng.generator(seed, "partition", "subsample").choice(size, number, replace=False)).astype(np.int64)
