"""Nested cross-validation inside each site: every example that is not for testing is held out once.

A fold's federation has the held-out examples where a run has its test examples. What is left is split into training and
validation examples, in which settings are searched. The run's own test examples are in no fold.
"""

from __future__ import annotations

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Federation, Index, Split, replace_unchecked, stratified_order

MIN_EXAMPLES = 4  # examples of a site beside its test examples: two to train on, one each to choose and to compare by


def folds_of(federation: Federation, number: int, seed: int) -> list[Federation]:
    """Return so many federations, each with another part of every client's examples held out; fewer for tiny clients.

    Raises:
        DataError: a client has too few examples.
    """
    sizes = {name: len(own.train) + len(own.validation) for name, own in federation.clients.items()}
    smallest = min(sizes, key=sizes.__getitem__)
    if sizes[smallest] < MIN_EXAMPLES:
        raise DataError(
            f"client '{smallest}' has {sizes[smallest]} examples beside those for testing: a recommendation needs at "
            f"least {MIN_EXAMPLES}; leave the client out, or give it more data"
        )
    number = min(number, sizes[smallest] // 2)
    made: list[dict[str, Split]] = [{} for _ in range(number)]
    for name, own in federation.clients.items():
        pieces = pieces_of(federation, name, number, seed)
        share = len(own.validation) / sizes[name]
        for k in range(number):
            held = pieces[k]
            rest = np.concatenate([piece for other, piece in enumerate(pieces) if other != k])
            chosen = min(max(1, round(share * len(rest))), len(rest) - 1)
            parts = rest[chosen:], rest[:chosen], held
            made[k][name] = Split(*(np.sort(part).astype(np.int64) for part in parts))
    return [replace_unchecked(federation, clients=clients) for clients in made]


def pieces_of(federation: Federation, name: str, number: int, seed: int) -> list[Index]:
    """Divide a client's training and validation examples into so many parts, in each the classes in proportion."""
    own = federation.clients[name]
    known = np.sort(np.concatenate([own.train, own.validation]))
    labels = federation.strata(known)
    labels = None if labels is None or labels.ndim > 1 else labels
    order = known[stratified_order(len(known), labels, rng.generator(seed, "folds", name))]
    return [piece.astype(np.int64) for piece in np.array_split(order, number)]
