"""A data set as it was published, before it is dealt out to clients; and dealing it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.data.duplicates import first_equal, warn_of_leaks
from coterie.data.federation import Federation, Index, Split, split_client
from coterie.decode import IMAGENET, UNIT, Decode
from coterie.errors import DataError

Scaling = Literal["unit", "standard", "imagenet"]
_IMAGES = 1024  # images looked at together


@dataclass(frozen=True)
class Pool:
    name: str
    x: Tensor  # [n, ...]; images stay uint8, [n, channels, height, width]
    y: Tensor  # [n]
    num_classes: int | None  # None: regression
    classes: tuple[str, ...] = ()  # their names; empty: they are numbered
    owner: Index | None = None  # [n]; whose each example is by nature: a writer, a user, a domain
    owners: tuple[str, ...] = ()  # their names
    published_test: NDArray[np.bool_] | None = None  # [n]; the publishers' test examples
    standardize: bool = False  # features are put on each client's own scale when they are dealt out

    def __post_init__(self) -> None:
        for what, part in (("targets", self.y), ("owners", self.owner), ("test marks", self.published_test)):
            if part is not None and len(part) != len(self.x):
                raise DataError(f"{self.name}: {len(self.x)} inputs but {len(part)} {what}")

    @cached_property
    def first_equal(self) -> Index:
        """[n]: for each example the position of the first that is identical to it."""
        return first_equal(self.x)

    def without_duplicates(self) -> Index:
        """The positions to keep, in order: of examples that are identical, the first."""
        return np.flatnonzero(self.first_equal == np.arange(len(self.x)))

    def names(self, parts: Sequence[Index]) -> list[str]:
        """The clients' names: their owners' where each has one of its own, else numbers."""
        if self.owner is not None and self.owners and all(len(part) for part in parts):
            own = [np.unique(self.owner[part]) for part in parts]
            if all(len(each) == 1 for each in own) and len({int(each[0]) for each in own}) == len(own):
                return [self.owners[int(each[0])] for each in own]
        return [f"client-{i + 1}" for i in range(len(parts))]


def federate(
    pool: Pool,
    parts: Mapping[str, Index] | Sequence[Index],
    *,
    seed: int,
    validation: float = 0.1,
    test: float = 0.3,
    name: str | None = None,
    published: bool = False,
    scaling: Scaling = "unit",
) -> Federation:
    """Client i gets the examples at `parts[i]`, split to train, validate and test; nothing of the pool is copied.

    With `published`, a client tests on those of its examples that the publishers set aside to test.
    """
    named = parts if isinstance(parts, Mapping) else dict(zip(pool.names(parts), parts, strict=True))
    if not named:
        raise DataError(f"{pool.name}: no client gets any data")
    if published and pool.published_test is None:
        raise DataError(f"{pool.name} has no published test examples: use --split random")
    labels = None if pool.num_classes is None else pool.y.numpy()
    clients = {}
    for client, part in named.items():
        if published and pool.published_test is not None:
            clients[client] = _published(pool.published_test, labels, client, part, validation, seed)
        else:
            clients[client] = _split(labels, client, part, validation, test, seed)
    x = _standardized(pool.x, clients) if pool.standardize else pool.x
    decode = _decode(x, clients, scaling) if x.dtype == torch.uint8 else None
    federation = Federation(name or pool.name, x, pool.y, clients, pool.num_classes, pool.classes, decode=decode)
    warn_of_leaks(federation.name, pool.first_equal, clients, "leave out repetitions with --drop-duplicates")
    return federation


def _split(
    labels: NDArray[np.generic] | None, client: str, part: Index, validation: float, test: float, seed: int
) -> Split:
    cut = split_client(client, len(part), None if labels is None else labels[part], validation, test, seed)
    return Split(part[cut.train], part[cut.validation], part[cut.test])


def _published(
    is_test: NDArray[np.bool_], labels: NDArray[np.generic] | None, client: str, part: Index, share: float, seed: int
) -> Split:
    rest, test = part[~is_test[part]], part[is_test[part]]
    if not len(test):
        raise DataError(f"client '{client}' has no published test examples: use --split random, or leave it out")
    cut = _split(labels, client, rest, share, min(share, (1 - share) / 2) if share < 1 else 1, seed)
    return Split(np.sort(np.concatenate([cut.train, cut.test])), cut.validation, test)


def _standardized(x: Tensor, clients: Mapping[str, Split]) -> Tensor:
    """Each client's features less their mean and divided by their standard deviation in its own training examples."""
    scaled = x.clone()
    for split in clients.values():
        own = torch.from_numpy(np.concatenate([split.train, split.validation, split.test]))
        seen = x[torch.from_numpy(split.train)]
        spread = seen.std(0, correction=0)
        scaled[own] = (x[own] - seen.mean(0)) / torch.where(spread > 0, spread, 1.0)
    return scaled


def _decode(x: Tensor, clients: Mapping[str, Split], scaling: Scaling) -> Decode:
    if scaling == "unit":
        return UNIT
    channels = x.shape[1] if x.ndim == 4 else 1
    if scaling == "imagenet":
        if channels != 3:
            raise DataError(f"scaling = 'imagenet' is for images of 3 channels, not {channels}: use unit or standard")
        return IMAGENET
    train = torch.from_numpy(np.sort(np.concatenate([split.train for split in clients.values()])))
    count = np.zeros((channels, 256))  # a histogram: exact, and in little memory
    for piece in torch.split(train, _IMAGES):
        images = x[piece].reshape(len(piece), channels, -1)
        count += np.stack([np.bincount(images[:, c].flatten().numpy(), minlength=256) for c in range(channels)])
    value = np.arange(256) / 255
    share = count / count.sum(1, keepdims=True)
    mean = share @ value
    std = np.sqrt(np.maximum(share @ value**2 - mean**2, 0))
    return Decode(tuple(mean.tolist()), tuple((value or 1.0) for value in std.tolist()))
