"""Find published experiments by name. Each is a TOML file, `coterie/settings/PAPER/NAME.toml`.

The values of a setting override the defaults of its data set, and what the user gives overrides them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest

# Pairs of settings of which only one can be given.
RIVALS = {"local_epochs": "local_steps", "fraction": "clients_per_round", "data": "silos"}
WORDS = ("about", "paper", "table")


@dataclass(frozen=True)
class Setting:
    """Hold a published experiment: `values` are keys of `Config`; `about` says which of them are the paper's own."""

    about: str
    paper: str
    table: str  # where in the paper its results are
    values: Mapping[str, Any]


@cache
def settings() -> dict[str, Setting]:
    """Return all settings by name, PAPER/NAME, in alphabetical order."""
    found = {}
    papers = [folder for folder in files("coterie").joinpath("settings").iterdir() if folder.is_dir()]
    for folder in papers:
        for file in folder.iterdir():
            if file.name.endswith(".toml"):
                content = tomllib.loads(file.read_text(encoding="utf-8"))
                values = {key: value for key, value in content.items() if key not in WORDS}
                words = {key: content[key] for key in WORDS}
                found[f"{folder.name}/{file.name.removesuffix('.toml')}"] = Setting(**words, values=values)
    return dict(sorted(found.items()))


def find_setting(name: str) -> Setting:
    """Return the setting of that name; raise `ConfigError`, with a suggestion, if there is none."""
    known = settings()
    if name not in known:
        raise ConfigError([f"there is no setting '{name}'{suggest(name, known)}; 'coterie data settings' lists them"])
    return known[name]


def named_by(setting: Any, key: str, default: str) -> str:
    """Return a setting's value for `key` (method, data), or `default` if there is no such setting or value."""
    found = settings().get(setting) if isinstance(setting, str) else None
    return default if found is None else str(found.values.get(key, default))


def over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `upper`, and those of `lower` for what it leaves open.

    If two keys exclude each other, the one in `upper` counts. A method's hyper-parameters do not carry over to another
    method, nor an optimiser's to another optimiser.
    """
    values = {**lower, **upper}
    for pair in (*RIVALS.items(), *((other, one) for one, other in RIVALS.items())):
        if pair[0] in upper and pair[1] not in upper:
            values.pop(pair[1], None)
    for table, same in (
        ("hyper", upper.get("method", lower.get("method")) == lower.get("method", upper.get("method"))),
        ("optimizer", _name(upper.get("optimizer")) in (None, _name(lower.get("optimizer")))),
    ):
        below, above = lower.get(table), upper.get(table, {})
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            values[table] = {**(below if same else {}), **above}
    return values


def _name(optimizer: Any) -> Any:
    return optimizer.get("name") if isinstance(optimizer, Mapping) else None
