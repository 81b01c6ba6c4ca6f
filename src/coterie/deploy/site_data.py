"""Loads a site's own data as a federation with one client: a client of a data set, or the site's own file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import ConfigError, DataError
from coterie.core.importing import import_path
from coterie.data import Federation
from coterie.data.loading import is_known
from coterie.data.tables.silos import Silos, load_silos
from coterie.data.weights import balanced
from coterie.experiment.config import Config
from coterie.experiment.federations import make_federation, own_clients

Node = Mapping[str, Any]
DataFunction = Callable[[dict[str, Any]], Any]


def site_data(config: Config, node: Node, name: str, data: DataFunction | None) -> Federation:
    """Load the data by the user's function, from a file, or from the data set of the run."""
    where = str(node.get("data", ""))
    if data is None and ":" in where and not Path(where).exists():
        found: Any = import_path(where, "data function")
        data = found
    if data is not None:
        return _weighted(from_function(name, data(dict(node)), config), config)
    if where:
        return _weighted(from_file(where, name, node, config), config)
    if not named(config):
        raise ConfigError(
            [f"site '{name}' has no data: give a file with data=..., or pass a data function to client_app"]
        )
    federation = make_federation(config)
    if name not in federation.names:
        raise ConfigError([f"'{config.data}' has no client '{name}'; it has {', '.join(federation.names)}"])
    return one_client(federation, name)


def site_name(config: Config, node: Node) -> str:
    """Return `client` of the node's configuration or, for a simulated node, the name by its partition number."""
    if node.get("client"):
        return str(node["client"])
    place = int(node.get("partition-id", 0))
    if named(config) and not node.get("data"):
        return make_federation(config).names[place]
    return f"client-{place + 1}"


def named(config: Config) -> bool:
    """Return whether the settings say where the data is."""
    return bool(config.silos) or is_known(config.data)


def from_function(name: str, given: Any, config: Config) -> Federation:
    """Convert the result of a data function: (inputs, targets), or a federation with this client."""
    if isinstance(given, Federation):
        return one_client(given, name)
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(
            f"site '{name}': its data function returns a {type(given).__name__} instead of (inputs, targets)"
        )
    return dataclasses.replace(own_clients(config, {name: (given[0], given[1])}), name=config.data)


def from_file(where: str, name: str, node: Node, config: Config) -> Federation:
    """Read a CSV or Parquet file as `coterie run --silos` does, with the schema's columns and classes, if given."""
    given = {key: str(node[key]) for key in ("target", "schema", "group") if node.get(key)}
    columns = given if given.get("target") or given.get("schema") else {**given, "target": config.target}
    regression = True if node.get("kind") == "regression" else config.regression
    own: dict[str, Any] = {"task": config.task, "horizons": tuple(config.horizons or ())}
    silos = Silos((where,), **columns, regression=regression, levels=tuple(config.levels or ()), **own)
    found = load_silos(silos, validation=config.validation, test=config.test, seed=config.data_seed)
    stem = found.names[0]
    known = {name: found.preprocessing[stem]}
    return dataclasses.replace(found, name=config.data, clients={name: found.clients[stem]}, preprocessing=known)


def one_client(federation: Federation, name: str) -> Federation:
    """Return one client's examples as a federation with one client."""
    split = federation.clients[name]
    parts = split.train, split.validation, split.test
    where = np.unique(np.concatenate(parts))  # in the order that they had, on which folds depend
    places = [np.searchsorted(where, part) for part in parts]
    weights = None if federation.weights is None else federation.weights[where]
    known = {name: federation.preprocessing[name]} if name in federation.preprocessing else {}
    return dataclasses.replace(
        federation,
        x=federation.x[where],
        y=federation.y[where],
        weights=weights,
        groups=None if federation.groups is None else federation.groups[where],
        clients={name: type(split)(*places)},
        preprocessing=known,
        files={},
    )


def _weighted(federation: Federation, config: Config) -> Federation:
    return balanced(federation) if config.class_weights else federation
