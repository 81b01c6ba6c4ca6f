"""Dealing one data set out to clients: pure functions of labels and seed. Every example goes to at most one client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie import rng
from coterie.data.federation import Index
from coterie.errors import DataError

CLIENTS = 20  # where their number is not given


def deal(
    spec: str, labels: NDArray[np.generic], clients: int | None, seed: int, *, owner: Index | None = None
) -> list[Index]:
    """The examples of each client by a partition's name: iid, dirichlet:ALPHA or natural."""
    name, _, value = spec.partition(":")
    if name == "natural" and not value:
        if owner is None:
            raise DataError("partition = 'natural': this data set does not say whose its examples are; try iid")
        return natural(owner, clients, seed)
    if name == "iid" and not value:
        return iid(len(labels), clients or CLIENTS, seed)
    if name == "dirichlet":
        try:
            alpha = float(value)
        except ValueError:
            raise DataError(f"partition = '{spec}': give a number, such as dirichlet:0.3") from None
        return dirichlet(labels, clients or CLIENTS, alpha, seed)
    raise DataError(f"there is no partition '{spec}'; there are iid, dirichlet:ALPHA and natural")


def natural(owner: Index, clients: int | None, seed: int) -> list[Index]:
    """Every owner is a client or, with `clients`, so many of them drawn at random."""
    owners = np.unique(owner)
    if clients is not None:
        _check(len(owners), clients, 1)
        owners = np.sort(rng.generator(seed, "partition", "natural").permutation(owners)[:clients])
    return [np.flatnonzero(owner == each) for each in owners]


def iid(size: int, clients: int, seed: int) -> list[Index]:
    """Equal random parts; sizes differ by at most one."""
    _check(size, clients, 1)
    order = rng.generator(seed, "partition", "iid").permutation(size)
    return [np.sort(part).astype(np.int64) for part in np.array_split(order, clients)]


def dirichlet(labels: NDArray[np.generic], clients: int, alpha: float, seed: int, min_size: int = 10) -> list[Index]:
    """Each class is dealt out in shares drawn from Dirichlet(alpha, ..., alpha); small alpha, few classes a client.

    Clients left with fewer than `min_size` examples are topped up, one example at a time, from the largest client, so
    that this ends for every legal input (redrawing until all are large enough does not).
    """
    if alpha <= 0:
        raise DataError(f"alpha is above 0, not {alpha}")
    _check(len(labels), clients, min_size)
    draw = rng.generator(seed, "partition", "dirichlet")
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = draw.permutation(np.flatnonzero(labels == label))
        cuts = (np.cumsum(_shares(draw, alpha, clients))[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, np.split(members, cuts), strict=True):
            part.extend(piece.tolist())
    for part in parts:
        draw.shuffle(part)
    while min(map(len, parts)) < min_size:
        small, large = min(parts, key=len), max(parts, key=len)
        small.append(large.pop())
    return [np.sort(np.array(part, np.int64)) for part in parts]


def _shares(draw: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    # For tiny alpha all gamma draws can underflow to 0; one client then takes the class, which is the limit.
    gamma = draw.standard_gamma(alpha, clients)
    if not gamma.sum() > 0:
        gamma = np.eye(clients)[draw.integers(clients)]
    shares: np.ndarray = gamma / gamma.sum()
    return shares


def _check(size: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise DataError(f"at least one client is needed, not {clients}")
    if size < clients * min_size:
        raise DataError(f"{size} examples cannot give {clients} clients {min_size} each: use fewer clients")
