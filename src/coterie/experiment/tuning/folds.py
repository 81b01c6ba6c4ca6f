"""Nested cross-validation inside each site: every example that is not for testing is held out once.

A fold's federation has the held-out examples where a run has its test examples. What is left is split into training and
validation examples, in which settings are searched. The run's own test examples are in no fold. Where a table has
groups, such as patients with several rows, all examples of a group are on one side.
"""

from __future__ import annotations

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import (
    Federation,
    Index,
    Split,
    order_of_groups,
    replace_unchecked,
    stratified_order,
)

MIN_UNITS = 4  # of a site beside those for testing: two to train on, one each to choose and to compare by


def folds_of(federation: Federation, number: int, seed: int) -> list[Federation]:
    """Return so many federations, each with another part of every client's examples held out; fewer for tiny clients.

    Raises:
        DataError: a client has too few examples, or groups of them.
    """
    sizes = {name: _number_of_units(federation, known_of(own)) for name, own in federation.clients.items()}
    smallest = min(sizes, key=sizes.__getitem__)
    if sizes[smallest] < MIN_UNITS:
        what = "examples" if federation.groups is None else "groups of examples"
        raise DataError(
            f"client '{smallest}' has {sizes[smallest]} {what} beside those for testing: a recommendation needs at "
            f"least {MIN_UNITS}; leave the client out, or give it more data"
        )
    number = min(number, sizes[smallest] // 2)
    made: list[dict[str, Split]] = [{} for _ in range(number)]
    for name, own in federation.clients.items():
        pieces = pieces_of(federation, name, number, seed)
        share = len(own.validation) / len(known_of(own))
        for k in range(number):
            held = pieces[k]
            rest = np.concatenate([piece for other, piece in enumerate(pieces) if other != k])
            chosen = min(max(1, round(share * len(rest))), len(rest) - 1)
            if federation.groups is not None:  # each has its examples side by side here
                ends = 1 + np.flatnonzero(np.diff(federation.groups[rest]))
                chosen = int(ends[np.abs(ends - chosen).argmin()])
            parts = rest[chosen:], rest[:chosen], held
            made[k][name] = Split(*(np.sort(part).astype(np.int64) for part in parts))
    return [replace_unchecked(federation, clients=clients) for clients in made]


def pieces_of(federation: Federation, name: str, number: int, seed: int) -> list[Index]:
    """Divide a client's training and validation examples into so many parts, in each the classes in proportion.

    Fewer, if there are not so many examples, or groups of them.
    """
    known = np.sort(known_of(federation.clients[name]))
    labels = federation.strata(known)
    labels = None if labels is None or labels.ndim > 1 else labels
    draw = rng.generator(seed, "folds", name)
    number = min(number, _number_of_units(federation, known))
    if federation.groups is None:
        order = known[stratified_order(len(known), labels, draw)]
        return [piece.astype(np.int64) for piece in np.array_split(order, number)]
    owner = np.unique(federation.groups[known], return_inverse=True)[1].astype(np.int64)
    order = order_of_groups(owner, labels, draw)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ends = np.bincount(owner)[order].cumsum()  # of each group's examples, in the order of groups
    cuts, least = [0], min(2, len(order) // number)  # groups of a part: of two, one is trained on and one chooses
    for k in range(1, number):  # the nearest end that leaves enough groups for every part
        first = cuts[-1] + least
        among = ends[first - 1 : len(order) - least * (number - k)]
        cuts.append(first + int(np.abs(among - len(known) * k / number).argmin()))
    whole = known[np.argsort(place[owner], kind="stable")]
    return [piece.astype(np.int64) for piece in np.split(whole, ends[np.array(cuts[1:], np.int64) - 1])]


def known_of(own: Split) -> Index:
    """Return the examples of a client that are not for testing."""
    return np.concatenate([own.train, own.validation])


def _number_of_units(federation: Federation, positions: Index) -> int:
    """Return how many groups these examples are of; without groups, how many they are."""
    return len(positions if federation.groups is None else np.unique(federation.groups[positions]))
