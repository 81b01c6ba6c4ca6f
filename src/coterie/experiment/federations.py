"""Make the federation that a configuration names, or that a user's own examples are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from coterie.core import rng
from coterie.core.errors import ConfigError
from coterie.core.targets import Target
from coterie.data import Federation, from_clients, load
from coterie.data.datasets import gather
from coterie.data.tables.silos import load_silos
from coterie.data.tasks import make_target, stacked, with_task
from coterie.data.weights import balanced
from coterie.experiment.config import PARTITION_SETTINGS, Config
from coterie.experiment.silos import options

Client = tuple[Any, Any] | Dataset[Any]  # a pair (x, y), or a map-style dataset of such pairs
Data = str | Federation | Sequence[Client] | Mapping[str, Client]


def make_federation(config: Config) -> Federation:
    """Load the federation that a configuration names."""
    return federation_of(config, None, None)


def federation_of(config: Config, data: Data | None, target: Target | None) -> Federation:
    federation = _without_weights(config, data, target)
    return balanced(federation) if config.class_weights else federation


def _without_weights(config: Config, data: Data | None, target: Target | None) -> Federation:
    if target is not None and (config.task or target.kind) != target.kind:
        raise ConfigError([f"task = '{config.task}', but the target is {target.words}"])
    horizons = config.horizons or ()
    if isinstance(data, Federation):
        return with_task(data if target is None else dataclasses.replace(data, declared=target), config.task, horizons)
    if config.silos:
        return load_silos(options(config), validation=config.validation, test=config.test, seed=config.data_seed)
    if isinstance(data, str | None):
        division: dict[str, Any] = {key: getattr(config, key) for key in ("data_dir", *PARTITION_SETTINGS)}
        found = load(config.data, config.data_seed, config.validation, config.test, task=config.task, **division)
        return with_task(
            found if target is None else dataclasses.replace(found, declared=target), config.task, horizons
        )
    return own_clients(config, data, target)


def own_clients(config: Config, data: Any, target: Target | None = None) -> Federation:
    """Make a federation of clients' own examples, as `from_clients` does, for the task that is asked for."""
    given = data if isinstance(data, Mapping) else {f"client-{i + 1}": each for i, each in enumerate(data)}
    pairs = {name: gather(name, each) if isinstance(each, Dataset) else each for name, each in given.items()}
    if target is None and config.task not in (None, "classification", "regression") and pairs:
        target = make_target(
            config.task, stacked([torch.as_tensor(y) for _, y in pairs.values()]), config.horizons or ()
        )
    regression = None if config.task is None else config.task == "regression"
    own: dict[str, Any] = {"validation": config.validation, "test": config.test, "seed": config.data_seed}
    return from_clients(pairs, name="own-data", regression=regression, target=target, **own)


def hold_out(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation | None]:
    """Hold a random share of the clients out of a run.

    Who is held out depends on the clients' names and `seed`, not on their order.

    Returns:
        The clients that take part, and those that do not: at least one, or None if `share` is 0.

    Raises:
        ConfigError: nobody would be left to take part.
    """
    if not share:
        return federation, None
    number = max(1, round(share * len(federation.names)))
    if number >= len(federation.names):
        raise ConfigError([f"holdout = {share:g}: of {len(federation.names)} clients, nobody is left to take part"])
    drawn = sorted(federation.names, key=lambda name: rng.seed_of(seed, "holdout", name))[:number]
    parts = [{n: s for n, s in federation.clients.items() if (n in drawn) is out} for out in (False, True)]
    stay, out = (dataclasses.replace(federation, clients=part) for part in parts)
    return stay, out
