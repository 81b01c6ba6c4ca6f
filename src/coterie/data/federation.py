"""A federation: one pool of examples, and which client owns which of them for training, validation and testing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from coterie.core import rng
from coterie.core.decode import Decode
from coterie.core.errors import DataError
from coterie.core.targets import Target, known
from coterie.data.datasets import gather

Index = NDArray[np.int64]
Client = tuple[Tensor, Tensor] | Dataset[Any]
SplitName = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """The positions of one client's examples in the pool."""

    train: Index
    validation: Index
    test: Index

    def __getitem__(self, name: SplitName) -> Index:
        return getattr(self, name)  # type: ignore[no-any-return]


_CACHED = ("largest", "sizes", "rank", "train", "kept")  # cached properties, which a copy computes anew


@dataclass(frozen=True)
class Federation:
    """The data of all clients. Its examples are checked when it is made; see `_check`."""

    name: str
    x: Tensor  # [pool, ...]
    y: Tensor  # [pool, ...]
    clients: Mapping[str, Split]  # by client name, in the order of client ids
    num_classes: int | None  # of `y`, whose values are 0, 1, ...; None: there are no classes
    classes: tuple[str, ...] = ()  # names of the classes; empty: they are numbered
    weights: Tensor | None = None  # [pool]: weights of the examples in training; None: all equal
    preprocessing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # each client's record, as JSON
    files: Mapping[str, str] = field(default_factory=dict)  # the user's files that it was read from, with their SHA-256
    decode: Decode | None = None  # how uint8 inputs become numbers when a minibatch enters the model
    declared: Target | None = None  # None: classes if there are any, and else numbers
    groups: Index | None = None  # [pool]: examples of a client with equal numbers (a patient's) stay in one part
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.clients))
        if not self.x.is_meta:  # a meta tensor has no values
            _check(self)

    @property
    def target(self) -> Target:
        """What is to be predicted."""
        return self.declared or known(self.num_classes, tuple(self.y.shape[1:]))

    @property
    def kind(self) -> str:
        """The name of the kind of target."""
        return self.target.kind

    def strata(self, positions: Index) -> NDArray[np.generic] | None:
        """Return a label for each of these examples by which splits are stratified; None if there is none."""
        return self.target.strata(self.y.cpu().numpy()[positions])

    @functools.cached_property
    def largest(self) -> int:
        """The number of training examples of the largest client."""
        return max(self.sizes)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Every client's number of training examples."""
        return [len(split.train) for split in self.clients.values()]

    @functools.cached_property
    def rank(self) -> list[int]:
        """Every client's rank by its number of training examples, largest first; it does not depend on client ids."""
        order = sorted(range(len(self.names)), key=lambda i: (-self.sizes[i], self.names[i]))
        return [place for _, place in sorted(zip(order, range(len(order)), strict=True))]

    @functools.cached_property
    def train(self) -> list[Index]:
        """Every client's training positions, as contiguous arrays."""
        return [np.ascontiguousarray(split.train, np.int64) for split in self.clients.values()]

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """What was computed of the examples and is worth keeping for other runs on them; a copy begins with nothing."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached properties: a copy has other memory addresses."""
        return {name: value for name, value in self.__dict__.items() if name not in _CACHED}

    def split(self, client: int) -> Split:
        """Return the split of the client with this id."""
        return self.clients[self.names[client]]

    def to(self, device: torch.device) -> Federation:
        """Return the federation with its tensors on `device`."""
        if device == self.x.device:
            return self
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, x=self.x.to(device), y=self.y.to(device), weights=weights)


def from_clients(
    clients: Sequence[Client] | Mapping[str, Client],
    *,
    name: str = "own-data",
    num_classes: int | None = None,
    regression: bool | None = None,
    target: Target | None = None,
    validation: float = 0.1,
    test: float = 0.3,
    seed: int = 0,
) -> Federation:
    """Make a federation from each client's data, and split it into training, validation and test examples.

    Args:
        clients: For each client an (x, y) pair of tensors, or a map-style dataset of such pairs.
        name: The name of the federation.
        num_classes: The number of classes, which are 0, 1, ...; by default one more than the largest label.
        regression: Whether targets are numbers to predict; by default if they are floating-point.
        target: What is to be predicted, if it is neither classes nor numbers (`coterie.core.targets`).
        validation: Share of each client's examples for validation; from 1 on, their number.
        test: Share of each client's examples for testing; from 1 on, their number.
        seed: Seed of the splits.

    Raises:
        DataError: A client has too few examples, or examples that do not fit those of the first client.

    Examples:
        >>> import coterie, torch
        >>> sites = {name: (torch.randn(50, 4), torch.arange(50) % 2) for name in ("north", "south")}
        >>> federation = coterie.from_clients(sites, test=0.2)
        >>> federation.names, federation.num_classes
        (('north', 'south'), 2)
        >>> len(federation.clients["north"].test)
        10
    """
    given = clients if isinstance(clients, Mapping) else {f"client-{i + 1}": each for i, each in enumerate(clients)}
    named = {name: gather(name, each) if isinstance(each, Dataset) else each for name, each in given.items()}
    if not named:
        raise DataError("a federation needs at least one client")
    xs, ys, splits, start = [], [], {}, 0
    first = next(iter(named.values()))
    if regression is None:
        regression = torch.as_tensor(first[1]).is_floating_point()
    if target is not None:
        regression, num_classes = False, target.num_values
    for client, (x_any, y_any) in named.items():
        x, y = torch.as_tensor(x_any), torch.as_tensor(y_any)
        if len(x) != len(y):
            raise DataError(f"client '{client}': {len(x)} inputs but {len(y)} targets")
        if x.shape[1:] != torch.as_tensor(first[0]).shape[1:]:
            raise DataError(
                f"client '{client}': inputs of shape {tuple(x.shape[1:])}, but the first client has "
                f"{tuple(torch.as_tensor(first[0]).shape[1:])}"
            )
        y = _fitting(client, y, target) if target is not None else y.float() if regression else y.long()
        labels = None if regression else target.strata(y.numpy()) if target is not None else y.numpy()
        parts = split_client(client, len(x), labels, validation, test, seed)
        splits[client] = Split(*(part + start for part in (parts.train, parts.validation, parts.test)))
        xs.append(x)
        ys.append(y)
        start += len(x)
    y_pool = torch.cat(ys)
    if regression:
        num_classes = None
    elif target is None and num_classes is None:
        num_classes = max(int(y_pool.max()) + 1, 2) if len(y_pool) else 2
    x_pool = torch.cat(xs)
    if x_pool.dtype in (torch.int16, torch.int32, torch.int64):
        x_pool = x_pool.long()  # perhaps tokens; a model that takes only floats gets floats (`make_task`)
    elif not x_pool.is_floating_point():
        x_pool = x_pool.float()
    return Federation(name, x_pool, y_pool, splits, num_classes, declared=target)


def _fitting(client: str, y: Tensor, target: Target) -> Tensor:
    """Return a client's targets in the type of `target`; raise `DataError` if they have another shape."""
    if y.shape[1:] != target.shape:
        shape = f"{tuple(y.shape[1:])} instead of {target.shape}"
        raise DataError(f"client '{client}': a target has the shape {shape}, which {target.words} needs")
    return y.to(target.dtype)


def split_again(federation: Federation, *, validation: float, test: float, seed: int) -> Federation:
    """Split the same examples with another seed, as `from_clients` would, without copying or checking them again."""
    clients = {}
    for name, split in federation.clients.items():
        own = np.sort(np.concatenate([split.train, split.validation, split.test]))
        groups = None if federation.groups is None else federation.groups[own]
        parts = split_client(name, len(own), federation.strata(own), validation, test, seed, groups=groups)
        clients[name] = Split(*(own[part] for part in (parts.train, parts.validation, parts.test)))
    return replace_unchecked(federation, clients=clients)


def replace_unchecked(federation: Federation, **values: Any) -> Federation:
    """Do what `dataclasses.replace` does, without checking all examples again."""
    new = copy.copy(federation)
    new.__dict__.update(values, names=tuple(values["clients"]))
    return new


def split_client(
    client: str,
    size: int,
    labels: NDArray[np.generic] | None,
    validation: float,
    test: float,
    seed: int,
    *,
    groups: NDArray[np.generic] | None = None,
) -> Split:
    """Split one client's examples at random into training, validation and test positions.

    The split is stratified: every part has every class in proportion, up to rounding.

    Args:
        client: The name of the client; it seeds the split together with `seed`.
        size: The number of its examples.
        labels: The labels to stratify by, [size]; None for a regression.
        validation: Share of the examples for validation (at least one); from 1 on, their number.
        test: The same for testing.
        seed: The seed.
        groups: The group (a patient) of each example, [size]. Examples of one group stay in one part; groups are
            stratified by their most frequent class.

    Raises:
        DataError: There are too few examples or groups for three parts, or the shares leave nothing to train on.
    """
    if not (validation > 0 and test > 0 and validation % 1 + test % 1 < 1):
        raise DataError(f"validation ({validation}) and test ({test}) must be shares above 0 whose sum is below 1")
    if size < 3:
        raise DataError(
            f"client '{client}' has {size} example{'s' * (size != 1)}: at least 3 are needed, one each for training, "
            f"validation and testing; leave it out or give it more data"
        )
    num_test, num_validation = (max(round(size * part), 1) if part < 1 else int(part) for part in (test, validation))
    if max(test, validation) >= 1 and num_test + num_validation >= size:
        raise DataError(
            f"client '{client}' has {size} examples, which leaves none for training after {num_test} for testing and "
            f"{num_validation} for validation: leave it out or give it more data"
        )
    draw = rng.generator(seed, "split", client)
    if groups is not None:
        return _split_groups(client, groups, labels, num_validation, num_test, draw)
    num_test = min(num_test, size - 2)
    num_validation = min(num_validation, size - num_test - 1)
    return _cut(stratified_order(size, labels, draw), num_test, num_validation)


def stratified_order(size: int, labels: NDArray[np.generic] | None, draw: np.random.Generator) -> Index:
    """Return a random order of so many examples in which the classes are evenly spread; None: there are no classes."""
    order = draw.permutation(size)
    if labels is not None:
        # Spread each class evenly over [0, 1): cutting that line anywhere keeps the classes in proportion.
        place = np.empty(size)
        for label in np.unique(labels):
            members = order[labels[order] == label]
            place[members] = (np.arange(len(members)) + draw.random()) / len(members)
        order = np.argsort(place, kind="stable")
    return order


def _cut(order: Index, num_test: int, num_validation: int) -> Split:
    cuts = [num_test, num_test + num_validation]
    test_part, validation_part, train_part = (np.sort(part).astype(np.int64) for part in np.split(order, cuts))
    return Split(train_part, validation_part, test_part)


def _split_groups(
    client: str,
    groups: NDArray[np.generic],
    labels: NDArray[np.generic] | None,
    num_validation: int,
    num_test: int,
    draw: np.random.Generator,
) -> Split:
    names, owner = np.unique(groups, return_inverse=True)
    if len(names) < 3:
        raise DataError(
            f"client '{client}' has {len(names)} group{'s' * (len(names) != 1)}: at least 3 are needed, one each for "
            f"training, validation and testing; leave it out or give it more data"
        )
    order = order_of_groups(owner, labels, draw)
    rows = np.bincount(owner)[order].cumsum()  # examples in the first 1, 2, ... groups
    first = 1 + int(np.abs(rows[:-2] - num_test).argmin())
    second = first + 1 + int(np.abs(rows[first:-1] - rows[first - 1] - num_validation).argmin())
    split = _cut(order, first, second - first)
    return Split(*(np.flatnonzero(np.isin(owner, split[part])) for part in ("train", "validation", "test")))


def order_of_groups(owner: NDArray[np.int64], labels: NDArray[np.generic] | None, draw: np.random.Generator) -> Index:
    """Return a random order of groups, stratified by their most frequent class; `owner` has each example's group."""
    usual, number = None, int(owner.max()) + 1
    if labels is not None:
        kinds, kind = np.unique(labels, return_inverse=True)
        count = np.zeros((number, len(kinds)), np.int64)
        np.add.at(count, (owner, kind), 1)
        usual = count.argmax(1)
    return stratified_order(number, usual, draw)


def _check(federation: Federation) -> None:
    for name, split in federation.clients.items():
        for part in ("train", "validation", "test"):
            if not len(split[part]):
                raise DataError(f"client '{name}' has no {part} examples: leave it out or give it more data")
    if federation.x.is_floating_point():
        bad = ~torch.isfinite(federation.x.flatten(1)).all(1)
        _blame_owner(federation, bad, "a missing or infinite value (NaN or Inf) in its inputs")
    wanted, found = federation.target.shape, tuple(federation.y.shape[1:])
    if federation.target.num_outputs is not None and wanted != found:
        raise DataError(f"{federation.target.words} needs targets of shape {wanted} for each example, not {found}")
    _blame_owner(federation, *federation.target.misfits(federation.y))


def _blame_owner(federation: Federation, bad: Tensor, what: str) -> None:
    if not bool(bad.any()):
        return
    rows = bad.nonzero().flatten().cpu().numpy()
    for name, split in federation.clients.items():
        own = np.concatenate([split.train, split.validation, split.test])
        mine = np.intersect1d(own, rows)
        if len(mine):
            row = int(mine[0] - own.min())
            raise DataError(f"client '{name}' has {what}: {len(mine)} example(s), the first is its row {row}")
