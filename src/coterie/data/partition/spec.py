"""Partitions by name: `deal("dirichlet:0.3:min=20", labels, 10, seed)`.

A specification is a name followed, after colons, by its values in order or as key=value. Every partition also takes
`share` or `take`: the share or number of examples to use. A user's own partition is `package.module:function`, or a
name that an installed package adds (`user.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.core.errors import ConfigError, DataError
from coterie.core.extensions import added, suggest
from coterie.core.options import read_words
from coterie.data.partition.common import Labels
from coterie.data.partition.grouped import FEDAMP, equal_groups, groups, practical
from coterie.data.partition.label_free import iid, merged, natural, quantity, subsample
from coterie.data.partition.pathological import classes, shards
from coterie.data.partition.sizes import lognormal
from coterie.data.partition.skew import clusters, dirichlet
from coterie.data.partition.user import CLIENTS, Dealt, Owner, is_users, user_partition

WITHOUT_LABELS = ("iid", "natural", "merged", "quantity")  # partitions of targets of every kind


@dataclass(frozen=True)
class Partition:
    """A partition with a name.

    Attributes:
        deal: `deal(labels, clients, seed, owner, values)` returns the positions of every client's examples.
        usage: How its specification is written.
        about: One line of description.
        keys: The names of its values, in order, and the function that parses each.
        required: How many of `keys` must be given.
    """

    deal: Callable[[Labels, int | None, int, Owner | None, Mapping[str, Any]], Dealt]
    usage: str
    about: str
    keys: Mapping[str, Callable[[str], Any]]
    required: int = 0


def deal(spec: str, labels: Labels, clients: int | None, seed: int, *, owner: Owner | None = None) -> Dealt:
    """Split examples among clients.

    Args:
        spec: The specification, such as "dirichlet:0.3".
        labels: The label of each example.
        clients: The number of clients; by default 20, or all natural owners.
        seed: The seed.
        owner: The natural owner of each example, if there is one.

    Returns:
        The positions of every client's examples: a list or, if a user's own partition names the clients, a dict.

    Raises:
        ConfigError: The specification is wrong.
        DataError: The data does not allow this partition.
    """
    partition, values = check_spec(spec)
    labels = np.asarray(labels)
    if labels.ndim != 1 and spec.partition(":")[0] not in WITHOUT_LABELS and not is_users(spec, PARTITIONS):
        raise DataError(f"partition '{spec}' needs one label per example, not an array of shape {labels.shape}")
    if owner is not None and len(owner) != len(labels):
        raise DataError(f"there are {len(labels)} labels but {len(owner)} owners")
    number = values.pop("take", None)
    if (share := values.pop("share", None)) is not None:
        number = max(1, round(share * len(labels)))
    if number is None:
        return partition.deal(labels, clients, seed, owner, values)
    kept = subsample(len(labels), number, seed)
    parts = partition.deal(labels[kept], clients, seed, None if owner is None else owner[kept], values)
    return {name: kept[part] for name, part in parts.items()} if isinstance(parts, dict) else [kept[p] for p in parts]


def check_spec(spec: str) -> tuple[Partition, dict[str, Any]]:
    """Parse a specification; raise one `ConfigError` with everything that is wrong with it."""
    name, *words = spec.split(":")
    if is_users(spec, PARTITIONS):
        words = [word for word in words if word.partition("=")[0] in _ANY]
        own = user_partition(spec, ":".join(word for word in spec.split(":") if word not in words))
        partition = Partition(own, f"{spec}[:share=...]", "", {})
    elif name in PARTITIONS:
        partition = PARTITIONS[name]
    else:
        known = ", ".join(
            [*(each.usage for each in PARTITIONS.values()), *added("partition"), "package.module:function"]
        )
        raise ConfigError([f"there is no partition '{name}'{suggest(name, PARTITIONS)}; there are {known}"])
    places = [*partition.keys]
    how = {"places": places, "needed": places[: partition.required]}
    values, problems = read_words(f"partition '{spec}'", words, {**partition.keys, **_ANY}, partition.usage, **how)
    if "share" in values and "take" in values:
        problems.append(f"partition '{spec}': give share or take, not both")
    if problems:
        raise ConfigError(problems)
    return partition, values


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("give a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("give a number above 0") from None
    if not (value > 0 and np.isfinite(value)):
        raise ValueError("give a number above 0")
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise ValueError("give a share above 0, up to 1")
    return value


def _sizes(text: str) -> list[int]:
    return [_whole(part) for part in text.split("/")]


def _setting(text: str) -> str | int:
    if text in FEDAMP:
        return text
    try:
        return _whole(text)
    except ValueError:
        raise ValueError(f"give a number of groups, or one of {', '.join(FEDAMP)}") from None


def _rule(text: str) -> str:
    if text not in ("mnist", "cifar"):
        raise ValueError("give mnist or cifar")
    return text


def _some(clients: int | None) -> int:
    return CLIENTS if clients is None else clients


def _least(values: Mapping[str, Any], default: int = 10) -> int:
    return int(values.get("min", default))


def _owned(owner: Owner | None, name: str) -> Owner:
    if owner is None:
        raise DataError(
            f"partition '{name}': this data set does not name the owner of each example; use another partition"
        )
    return owner


def _practical(labels: Labels, clients: int | None, seed: int, owner: Owner | None, values: Mapping[str, Any]) -> Any:
    which = values["which"]
    if isinstance(which, int):
        if "sizes" not in values:
            raise ConfigError([f"partition 'practical:{which}' needs sizes, such as sizes=1100/800/500"])
        made = equal_groups(labels, _some(clients), which, values["sizes"])
    else:
        made = FEDAMP[which]
        if "sizes" in values or clients not in (None, sum(group.clients for group in made)):
            many = sum(group.clients for group in made)
            raise ConfigError(
                [f"partition 'practical:{which}' has {many} clients with fixed sizes: leave out clients and sizes"]
            )
    return practical(labels, made, seed, values.get("dominant", 0.8))


_ANY: dict[str, Callable[[str], Any]] = {"share": _share, "take": _whole}

PARTITIONS: dict[str, Partition] = {
    "iid": Partition(lambda y, n, seed, _, v: iid(len(y), _some(n), seed), "iid", "equal random parts", {}),
    "dirichlet": Partition(
        lambda y, n, seed, _, v: dirichlet(y, _some(n), v["alpha"], seed, _least(v)),
        "dirichlet:ALPHA[:min=10]",
        "each class in shares from Dirichlet(ALPHA); at least min examples per client",
        {"alpha": _positive, "min": _whole},
        1,
    ),
    "clusters": Partition(
        lambda y, n, seed, _, v: clusters(y, _some(n), v["clusters"], v["alpha"], seed, _least(v)),
        "clusters:CLUSTERS:ALPHA[:min=10]",
        "each cluster of classes in shares from Dirichlet(ALPHA) (FedEM; FedeRiCo's appendix C)",
        {"clusters": _whole, "alpha": _positive, "min": _whole},
        2,
    ),
    "classes": Partition(
        lambda y, n, seed, _, v: classes(y, _some(n), v["classes"], seed, v.get("each")),
        "classes:CLASSES[:each=100]",
        "CLASSES random classes per client, shared evenly, or `each` examples of each (pFedVMP's appendix C.1)",
        {"classes": _whole, "each": _whole},
        1,
    ),
    "shards": Partition(
        lambda y, n, seed, _, v: shards(y, _some(n), v["shards"], seed),
        "shards:SHARDS",
        "sorted by label and cut into equal shards, SHARDS per client (FedAvg)",
        {"shards": _whole},
        1,
    ),
    "groups": Partition(
        lambda y, n, seed, _, v: groups(y, _some(n), v["groups"], seed),
        "groups:GROUPS",
        "disjoint sets of classes, each client from one of them (FedeRiCo)",
        {"groups": _whole},
        1,
    ),
    "practical": Partition(
        _practical,
        "practical:NAME or practical:GROUPS:sizes=1100/800/500[:dominant=0.8]",
        f"groups of clients with dominating classes (FedAMP); NAME is one of {', '.join(FEDAMP)}",
        {"which": _setting, "sizes": _sizes, "dominant": _share},
        1,
    ),
    "lognormal": Partition(
        lambda y, n, seed, _, v: lognormal(y, _some(n), v["labels"], seed, v.get("rule", "mnist")),
        "lognormal:LABELS[:rule=mnist]",
        "LABELS labels per client, log-normal sizes (pFedBreD); rule is mnist or cifar",
        {"labels": _whole, "rule": _rule},
        1,
    ),
    "quantity": Partition(
        lambda y, n, seed, _, v: quantity(len(y), _some(n), v["alpha"], seed, _least(v)),
        "quantity:ALPHA[:min=10]",
        "random parts, sizes in shares from Dirichlet(ALPHA)",
        {"alpha": _positive, "min": _whole},
        1,
    ),
    "natural": Partition(
        lambda y, n, seed, owner, v: natural(_owned(owner, "natural"), n, seed, _least(v, 1)),
        "natural[:min=1]",
        "by the natural owners: writers, hospitals; with --clients, that many of them at random",
        {"min": _whole},
    ),
    "merged": Partition(
        lambda y, n, seed, owner, v: merged(_owned(owner, "merged"), _some(n), v["alpha"], seed, v.get("owners", 10)),
        "merged:ALPHA[:owners=10]",
        "whole owners, at least `owners` per client, the rest in shares from Dirichlet(ALPHA) (pFedBreD)",
        {"alpha": _positive, "owners": _whole},
        1,
    ),
}
