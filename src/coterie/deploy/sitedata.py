"""A site's own data, as a federation of one client: one of a data set's clients, or a file of the site's."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data import SOURCES, Federation, load
from coterie.data.federation import split_client
from coterie.deploy.site import one_client
from coterie.errors import ConfigError, DataError
from coterie.experiment.config import Config
from coterie.models import import_path

Node = Mapping[str, Any]
DataFunction = Callable[[dict[str, Any]], Any]


def site_data(config: Config, node: Node, name: str, data: DataFunction | None) -> Federation:
    """By a function of the user's, from a file, or from the data set that the run names."""
    where = str(node.get("data", ""))
    if data is None and ":" in where and not Path(where).exists():
        found: Any = import_path(where, "data function")
        data = found
    if data is not None:
        return from_pair(name, data(dict(node)), config)
    if where:
        return read_csv(Path(where), name, node.get("target"), config, str(node.get("kind", "classification")))
    if config.data not in SOURCES:
        raise ConfigError([f"site '{name}' has no data: name a file with data=..., or give client_app a data function"])
    federation = load(config.data, config.seed, config.validation, config.test)
    if name not in federation.names:
        raise ConfigError([f"'{config.data}' has no client '{name}'; it has {', '.join(federation.names)}"])
    return one_client(federation, name)


def site_name(config: Config, node: Node) -> str:
    """`client` of the node's configuration or, of a simulated node, the partition's place in the data set."""
    if node.get("client"):
        return str(node["client"])
    place = int(node.get("partition-id", 0))
    if config.data in SOURCES and not node.get("data"):
        return load(config.data, config.seed, config.validation, config.test).names[place]
    return f"client-{place + 1}"


def from_pair(name: str, given: Any, config: Config) -> Federation:
    """What a data function gives: (inputs, targets), or a federation that has this client."""
    if isinstance(given, Federation):
        return one_client(given, name)
    try:
        x, y = (torch.as_tensor(part) for part in given)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"site '{name}': its data function gives {type(given).__name__}, not (inputs, targets)"
        ) from error
    regression = y.is_floating_point()
    y = y.float() if regression else y.long()
    split = split_client(name, len(x), None if regression else y.numpy(), config.validation, config.test, config.seed)
    classes = None if regression else max(int(y.max()) + 1, 2)
    return Federation(config.data, x if x.is_floating_point() else x.float(), y, {name: split}, classes)


def read_csv(path: Path, name: str, target: Any, config: Config, kind: str) -> Federation:
    """A table of numbers with a header; inputs are scaled by mean and deviation of the site's training examples."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error
    header, rows = (rows[0] if rows else []), rows[1:]
    column = str(target) if target else (header[-1] if header else "")
    if column not in header or not rows:
        raise DataError(f"'{path}' has no rows, or no column '{column}'; it has {', '.join(header)}")
    table = np.empty((len(rows), len(header)), np.float64)
    for number, row in enumerate(rows, 2):
        for place, title in enumerate(header):
            try:
                table[number - 2, place] = float(row[place])
            except (ValueError, IndexError):
                cell = row[place] if place < len(row) else ""
                raise DataError(f"'{path}' line {number}, column '{title}': '{cell}' is not a number") from None
    at = header.index(column)
    y = torch.from_numpy(table[:, at].astype(np.float32 if kind == "regression" else np.int64))
    x = np.delete(table, at, 1)
    own = from_pair(name, (torch.from_numpy(x.astype(np.float32)), y), config)
    train = x[own.split(0).train]
    scaled = ((x - train.mean(0)) / np.where(train.std(0) > 0, train.std(0), 1)).astype(np.float32)
    return Federation(own.name, torch.from_numpy(scaled), own.y, own.clients, own.num_classes)
