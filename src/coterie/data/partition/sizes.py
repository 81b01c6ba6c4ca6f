"""pFedBreD's partition: log-normal sizes, two or three labels per client (the recipe of the authors' generators)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Index
from coterie.data.partition.common import Labels, Stock, check_sizes

INITIAL_EXAMPLES = 10  # of each label, that every client gets before sizes are drawn


class Draws(NamedTuple):
    """The random numbers of one federation: the shares, and how many more examples a slot gets for a share."""

    order: np.random.Generator | None  # of each class's examples; None: as they are in the data
    shares: Callable[[tuple[int, int, int]], np.ndarray]  # LogNormal(0, 2) of this shape
    whole: Callable[[int, int], int]  # U{low..high}


def lognormal(
    labels: Labels,
    clients: int,
    slots: int,
    seed: int,
    rule: Literal["mnist", "cifar"] = "mnist",
    draws: Draws | None = None,
) -> list[Index]:
    """Give client u the labels (u + j) mod K for its slots j. Each slot first gets 10 examples, and then

        mnist:  int(p) U{1..10} + U{10..200}       cifar:  2 (int(p) + U{300..600})

    more, unless that would use up the class, with

        p = (n_l - n_0) LogNormal(0, 2)[l, u // (N / 10), j] / sum over (client, slot) of LogNormal[l]

    where n_l is the size of the class, and n_0 is 10 N (mnist) or N (cifar). The first 10 x slots positions of a
    client, slot by slot, are those that it got first. `draws` replaces our random numbers of `seed`, as by those of the
    authors' generators, which draw U{10..200} before U{1..10}.
    """
    check_sizes(len(labels), clients, 1)
    draws = own_draws(seed) if draws is None else draws
    stock = Stock(labels, draws.order)
    number = len(stock.kinds)
    if not 1 <= slots <= number:
        raise DataError(f"a client can have 1 to {number} labels, as many as there are classes, not {slots}")
    pairs = [(client, slot, (client + slot) % number) for client in range(clients) for slot in range(slots)]
    stock.check(INITIAL_EXAMPLES * np.bincount([kind for *_, kind in pairs], minlength=number))
    sizes = np.array([stock.left(kind) for kind in range(number)])
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for client, _, kind in pairs:
        parts[client].append(stock.take(kind, INITIAL_EXAMPLES))
    share = draws.shares((number, clients, slots))
    left = np.maximum(sizes - (INITIAL_EXAMPLES * clients if rule == "mnist" else clients), 0)
    share = left[:, None, None] * share / share.sum((1, 2), keepdims=True)
    for client, slot, kind in pairs:
        p = int(share[kind, client // max(clients // 10, 1), slot])
        size = _size(p, rule, draws)
        if size < stock.left(kind):
            parts[client].append(stock.take(kind, size))
    return [np.concatenate(part).astype(np.int64) for part in parts]


def own_draws(seed: int) -> Draws:
    """Return the random numbers that belong to a seed."""
    draw = rng.generator(seed, "pfedbred")
    return Draws(
        draw, lambda shape: draw.lognormal(0.0, 2.0, shape), lambda low, high: int(draw.integers(low, high + 1))
    )


def _size(p: int, rule: str, draws: Draws) -> int:
    if rule != "mnist":
        return 2 * (p + draws.whole(300, 600))
    if draws.order is not None:
        return p * draws.whole(1, 10) + draws.whole(10, 200)
    more = draws.whole(10, 200)
    return p * draws.whole(1, 10) + more
