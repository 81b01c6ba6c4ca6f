"""From a name, or a path of the user's own, to a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from coterie.data import folders, leaf, npz, partition
from coterie.data.federation import Federation
from coterie.data.pool import Pool, Scaling, federate
from coterie.data.sources import SOURCES, Source
from coterie.errors import ConfigError, DataError

OTHERWISE = "dirichlet:0.3"  # where a file does not say whose its examples are
WITHOUT_LABELS = ("iid", "natural", "merged", "quantity")  # partitions that a regression can have


def is_known(data: str) -> bool:
    """A data set's name, or the path of a file or folder that is there."""
    return data in SOURCES or is_path(data)


def is_path(data: str) -> bool:
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
) -> Federation:
    """The federation `name`, or the data set `name` dealt out by `partition`."""
    source = SOURCES.get(name)
    if source is None and not is_path(name):
        raise ConfigError([f"there is no data set '{name}'; there are {', '.join(SOURCES)}"])
    if source is not None and source.load is not None and partition is None and clients is None:
        return source.load(name, seed, validation, test, *_folder(source, data_dir))
    pool = read(name, data_dir=data_dir, image_size=image_size)
    kept = pool.without_duplicates() if drop_duplicates else np.arange(len(pool.x))
    owner = None if pool.owner is None else pool.owner[kept]
    spec = partition or (OTHERWISE if owner is None else "natural")
    parts = [kept[part] for part in _deal(spec, pool, kept, clients, seed, owner)]
    shares = {"validation": validation, "test": test}
    return federate(
        pool, parts, seed=seed, name=name, published=split == "published", scaling=scaling or "unit", **shares
    )


def read(name: str, *, data_dir: str | None = None, image_size: int | None = None) -> Pool:
    """A data set as it was published."""
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
        raise ConfigError([f"{name} comes dealt out to clients: leave out partition and clients"])
    if source.files is None or source.files.name not in folders.FILES:
        size = {}
    return source.pool(name, *_folder(source, data_dir), **size)


def _folder(source: Source, data_dir: str | None) -> list[Path]:
    return [] if source.files is None else [source.files.require(data_dir)]


def _deal(
    spec: str, pool: Pool, kept: np.ndarray, clients: int | None, seed: int, owner: np.ndarray | None
) -> list[np.ndarray]:
    if pool.num_classes is None and spec.partition(":")[0] not in WITHOUT_LABELS:
        known = ", ".join(WITHOUT_LABELS)
        raise DataError(f"partition = '{spec}' goes by classes, but {pool.name} is a regression: use one of {known}")
    return partition.deal(spec, pool.y.numpy()[kept], clients, seed, owner=owner)
