"""Loads a federation by the name of a data set, the import path of a data source, or the path of a file or folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.core.errors import ConfigError, DataError
from coterie.data import partition
from coterie.data.federation import Federation, Index, from_clients
from coterie.data.pool import Pool, Scaling, federate
from coterie.data.readers import folders, leaf, npz
from coterie.data.sources import SOURCES, Source
from coterie.data.tasks import OF_COLUMNS
from coterie.data.user_source import is_user_source, read_source

DEFAULT_PARTITION = "dirichlet:0.3"  # for a file that does not name the owners of its examples


def is_known(data: str) -> bool:
    """Return whether `data` names a data set or a data source, or is the path of an existing file or folder."""
    return data in SOURCES or is_path(data) or is_user_source(data)


def is_path(data: str) -> bool:
    """Return whether `data` is the path of an existing file or folder, and not a data set."""
    return data not in SOURCES and ("/" in data or data.endswith(".npz")) and Path(data).expanduser().exists()


def load(
    name: str,
    seed: int,
    validation: float = 0.1,
    test: float = 0.3,
    *,
    partition: str | None = None,
    clients: int | None = None,
    data_dir: str | None = None,
    split: Literal["random", "published"] = "random",
    scaling: Scaling | None = None,
    drop_duplicates: bool = False,
    image_size: int | None = None,
    task: str | None = None,
) -> Federation:
    """Load the federation `name`, or the data set `name` split among clients by `partition`.

    Args:
        name: A data set of `SOURCES`, a data source (`package.module:function`, or a name that a package adds), or the
            path of an .npz file, a LEAF folder or a folder of images.
        seed: Seed of the partition and the splits.
        validation: Share of each client's examples for validation; from 1 on, their number.
        test: The same for testing.
        partition: How examples are split among clients, such as "dirichlet:0.3"; by default that of the data.
        clients: The number of clients, if the partition takes one.
        data_dir: A folder with data sets, searched before COTERIE_DATA.
        split: "published" tests on the examples that the publishers set aside.
        scaling: How bytes of images become numbers.
        drop_duplicates: Keep only the first of identical examples.
        image_size: Side of images read from folders, in pixels.
        task: The kind of target that a row of numbers is, if it is no class (`coterie.data.tasks`).

    Raises:
        ConfigError: There is no such data set, or it does not take a partition.
        DataError: Its files are missing or damaged, or the partition does not fit it.
    """
    source = SOURCES.get(name)
    shares = {"validation": validation, "test": test}
    if source is None and not is_path(name):
        if not is_user_source(name):
            raise ConfigError([f"there is no data set '{name}'; there are {', '.join(SOURCES)}"])
        division = {"partition": partition, "clients": clients, "scaling": scaling, "image_size": image_size}
        division |= {"split": split == "published" or None, "drop_duplicates": drop_duplicates or None}
        found = read_source(name, seed=seed, data_dir=data_dir, **shares)
        _refuse_division(name, found, division)
        if isinstance(found, Federation):
            return found
        if not isinstance(found, Pool):
            return from_clients(found, name=name, seed=seed, validation=validation, test=test)
        pool = found
    elif source is not None and source.load is not None and partition is None and clients is None:
        return source.load(name, seed, validation, test, *_folder(source, data_dir))
    else:
        pool = _read_once(name, data_dir, image_size)
    if task in OF_COLUMNS:
        pool = dataclasses.replace(pool, y=pool.y.float(), num_classes=None)
    kept = pool.without_duplicates() if drop_duplicates else np.arange(len(pool.x))
    owner = None if pool.owner is None else pool.owner[kept]
    spec = partition or (DEFAULT_PARTITION if owner is None else "natural")
    dealt = _deal(spec, pool, kept, clients, seed, owner)
    parts: Any = [kept[part] for part in dealt] if isinstance(dealt, list) else {n: kept[p] for n, p in dealt.items()}
    return federate(
        pool, parts, seed=seed, name=name, published=split == "published", scaling=scaling or "unit", **shares
    )


def read(name: str, *, data_dir: str | None = None, image_size: int | None = None) -> Pool:
    """Read a data set as it was published, before it is split among clients."""
    size = {} if image_size is None else {"size": image_size}
    source = SOURCES.get(name)
    if source is None:
        path = Path(name).expanduser()
        if path.is_file():
            return npz.read_pool(name, path)
        if any(next(path.glob(pattern), None) for pattern in ("*.json", "train/*.json")):
            return leaf.read_pool(name, path)
        return folders.read_pool(path.name, path, **size)
    if source.pool is None:
        raise ConfigError([f"{name} is already split among its clients: leave out partition and clients"])
    if source.files is None or source.files.name not in folders.FILES:
        size = {}
    return source.pool(name, *_folder(source, data_dir), **size)


@contextlib.contextmanager
def reading_once() -> Iterator[None]:
    """Within this, a data set that many runs split among clients is read once: the one read last is kept."""
    token = _LAST.set({})
    try:
        yield
    finally:
        _LAST.reset(token)


_LAST: ContextVar[dict[tuple[str, str | None, int | None], Pool] | None] = ContextVar("last", default=None)


def _read_once(name: str, data_dir: str | None, image_size: int | None) -> Pool:
    last, which = _LAST.get(), (name, data_dir, image_size)
    if last is not None and which in last:
        return last[which]
    pool = read(name, data_dir=data_dir, image_size=image_size)
    if last is not None:
        last.clear()
        last[which] = pool
    return pool


def _refuse_division(name: str, found: Any, division: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that do not apply to what a user's data source returned."""
    given = [key for key, value in division.items() if value is not None]
    if not isinstance(found, Pool) and given:
        what = "a Federation" if isinstance(found, Federation) else "the data of each client"
        raise ConfigError(
            [f"{', '.join(given)}: data source '{name}' returned {what}, already divided, so leave this out"]
        )
    if "image_size" in given:
        raise ConfigError([f"image_size: data source '{name}' reads its images itself, so leave this out"])


def _folder(source: Source, data_dir: str | None) -> list[Path]:
    return [] if source.files is None else [source.files.require(data_dir)]


def _deal(
    spec: str, pool: Pool, kept: np.ndarray, clients: int | None, seed: int, owner: np.ndarray | None
) -> list[Index] | dict[str, Index]:
    name = spec.partition(":")[0]
    if pool.num_classes is None and name in partition.PARTITIONS and name not in partition.WITHOUT_LABELS:
        known = ", ".join(partition.WITHOUT_LABELS)
        raise DataError(f"partition = '{spec}' needs classes, but {pool.name} has none: use one of {known}")
    return partition.deal(spec, pool.y.numpy()[kept], clients, seed, owner=owner)
