"""Partitions with groups of similar clients: FedeRiCo's disjoint label sets, FedAMP's practical setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coterie.core import rng
from coterie.core.errors import DataError
from coterie.data.federation import Index
from coterie.data.partition.common import Labels, Stock, check_sizes
from coterie.data.partition.skew import label_groups


def groups(labels: Labels, clients: int, number: int, seed: int) -> list[Index]:
    """Partition as FedeRiCo does.

    The classes are shuffled into `number` disjoint sets, each client draws one of the sets at random, and the clients
    of a set share its examples evenly. The draw is uneven, as in the paper ("the only client coming from distribution
    0"); a set that no client draws is not used.
    """
    check_sizes(len(labels), clients, 1)
    draw = rng.generator(seed, "partition", "groups")
    sets = label_groups(labels, number, draw)
    drawn = draw.integers(number, size=clients)
    parts: list[Index] = [np.empty(0, np.int64)] * clients
    for i, kinds in enumerate(sets):
        members = draw.permutation(np.flatnonzero(np.isin(labels, kinds)))
        own = np.flatnonzero(drawn == i)
        if len(own) > len(members):
            raise DataError(f"{len(own)} clients share {len(members)} examples of one label group: use fewer clients")
        for client, part in zip(own, np.array_split(members, max(len(own), 1)), strict=False):
            parts[client] = np.sort(part).astype(np.int64)
    return parts


@dataclass(frozen=True)
class Group:
    """Clients with the same dominating classes and the same number of examples each."""

    clients: int
    classes: tuple[int, ...]
    size: int  # including test examples


def _groups(*which: tuple[int, range, int]) -> tuple[Group, ...]:
    return tuple(Group(clients, tuple(kinds), size) for clients, kinds, size in which)


# Training examples and 100 for testing. The paper's text has EMNIST's only (byclass: digits, capitals, small letters).
# Those of the others are in an appendix that was not to be had: MNIST and Fashion-MNIST here have the clients and sizes
# of EMNIST, CIFAR-100 three groups of classes with one client a class and sizes that its 600 images a class allow.
FEDAMP: dict[str, tuple[Group, ...]] = {
    "fedamp-emnist": _groups((10, range(10), 1100), (26, range(10, 36), 800), (26, range(36, 62), 500)),
    "fedamp-mnist": _groups((10, range(3), 1100), (26, range(3, 7), 800), (26, range(7, 10), 500)),
    "fedamp-fmnist": _groups((10, range(3), 1100), (26, range(3, 7), 800), (26, range(7, 10), 500)),
    "fedamp-cifar100": _groups((33, range(33), 600), (33, range(33, 66), 450), (34, range(66, 100), 300)),
}


def practical(labels: Labels, which: Sequence[Group], seed: int, dominant: float = 0.8) -> list[Index]:
    """Partition as in FedAMP's practical setting.

    The share `dominant` of a client's examples is spread evenly over the dominating classes of its group, and the rest
    evenly over all other classes; remainders go to random classes. So a large enough client has every class, and the
    clients of a group have the same distribution.
    """
    if not 0 < dominant < 1:
        raise DataError(f"dominant must be a share between 0 and 1, not {dominant}")
    draw = rng.generator(seed, "partition", "practical")
    stock = Stock(labels, draw)
    wanted = []
    for group in which:
        main = np.isin(stock.kinds, group.classes)
        missing = sorted(set(group.classes) - {int(kind) for kind in stock.kinds[main]})
        if missing or main.all():
            problem = (
                f"the data has no class {missing[0]}" if missing else "one group has all classes as dominating classes"
            )
            raise DataError(f"{problem}: each group needs its own classes, and others beside them")
        if group.clients < 1 or group.size < 1:
            raise DataError(
                f"a group needs clients with examples, not {group.clients} clients with {group.size} examples each"
            )
        many = round(dominant * group.size)
        for _ in range(group.clients):
            counts = np.zeros(len(stock.kinds), int)
            counts[main] = _even(draw, many, int(main.sum()))
            counts[~main] = _even(draw, group.size - many, int((~main).sum()))
            wanted.append(counts)
    stock.check(np.sum(wanted, axis=0))
    dealt = [[stock.take(kind, number) for kind, number in enumerate(counts)] for counts in wanted]
    return [np.sort(np.concatenate(pieces)).astype(np.int64) for pieces in dealt]


def equal_groups(labels: Labels, clients: int, number: int, sizes: Sequence[int]) -> tuple[Group, ...]:
    """Make `number` groups with almost equally many classes, in the order of the labels, and clients."""
    kinds = np.unique(labels)
    if not 2 <= number <= min(len(kinds), clients):
        raise DataError(f"{clients} clients and {len(kinds)} classes cannot form {number} groups: use 2 or more")
    if len(sizes) not in (1, number):
        raise DataError(f"sizes: give one, or one for each of the {number} groups, not {len(sizes)}")
    many = [len(part) for part in np.array_split(np.arange(clients), number)]
    own = [tuple(int(kind) for kind in part) for part in np.array_split(kinds, number)]
    each = list(sizes) * (number // len(sizes))
    return tuple(Group(*group) for group in zip(many, own, each, strict=True))


def _even(draw: np.random.Generator, number: int, classes: int) -> np.ndarray:
    counts = np.full(classes, number // classes)
    counts[draw.permutation(classes)[: number % classes]] += 1
    return counts
