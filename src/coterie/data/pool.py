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

from coterie.core.decode import IMAGENET, UNIT, Decode
from coterie.core.errors import DataError
from coterie.data.duplicates import first_equal, warn_about_leaks
from coterie.data.federation import Federation, Index, Split, split_client

Scaling = Literal["unit", "standard", "imagenet"]
_IMAGES_PER_CHUNK = 1024  # read at once


@dataclass(frozen=True)
class Pool:
    """The examples of a data set before they are split among clients."""

    name: str
    x: Tensor  # [n, ...]; images stay uint8, [n, channels, height, width]
    y: Tensor  # [n]
    num_classes: int | None  # None: regression
    classes: tuple[str, ...] = ()  # names of the classes; empty: they are numbered
    owner: Index | None = None  # [n]: the natural owner of each example, such as a writer, a user or a domain
    owners: tuple[str, ...] = ()  # names of the owners
    published_test: NDArray[np.bool_] | None = None  # [n]: whether the publishers set the example aside for testing
    standardize: bool = False  # each client standardises its features when the pool is split

    def __post_init__(self) -> None:
        for what, part in (("targets", self.y), ("owners", self.owner), ("test marks", self.published_test)):
            if part is not None and len(part) != len(self.x):
                raise DataError(f"{self.name}: {len(self.x)} inputs but {len(part)} {what}")

    @cached_property
    def first_equal(self) -> Index:
        """For each example the position of the first identical one, [n]."""
        return first_equal(self.x)

    def without_duplicates(self) -> Index:
        """Return the positions of all examples but repetitions, in order."""
        return np.flatnonzero(self.first_equal == np.arange(len(self.x)))

    def names(self, parts: Sequence[Index]) -> list[str]:
        """Return the clients' names: those of their owners if each client has one owner, else numbers."""
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
    """Make a federation in which client i owns the examples at `parts[i]`. The pool is not copied.

    Args:
        pool: The examples.
        parts: Each client's positions in the pool, by name or in order.
        seed: Seed of the splits.
        validation: Share of each client's examples for validation; from 1 on, their number.
        test: The same for testing.
        name: The name of the federation; by default that of the pool.
        published: Test on those of a client's examples that the publishers set aside.
        scaling: How bytes of images become numbers.

    Raises:
        DataError: A client has too few examples, or no published test examples.
    """
    named = parts if isinstance(parts, Mapping) else dict(zip(pool.names(parts), parts, strict=True))
    if not named:
        raise DataError(f"{pool.name}: no client has any data")
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
    warn_about_leaks(federation.name, pool.first_equal, clients, "remove repetitions with --drop-duplicates")
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
    """Standardise each client's features by the mean and standard deviation of its own training examples."""
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
    count = np.zeros((channels, 256))  # a histogram is exact and needs little memory
    for piece in torch.split(train, _IMAGES_PER_CHUNK):
        images = x[piece].reshape(len(piece), channels, -1)
        count += np.stack([np.bincount(images[:, c].flatten().numpy(), minlength=256) for c in range(channels)])
    value = np.arange(256) / 255
    share = count / count.sum(1, keepdims=True)
    mean = share @ value
    std = np.sqrt(np.maximum(share @ value**2 - mean**2, 0))
    return Decode(tuple(mean.tolist()), tuple((value or 1.0) for value in std.tolist()))
