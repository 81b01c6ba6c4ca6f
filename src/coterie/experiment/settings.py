"""Published experiments by name: one TOML file each, under `coterie/settings/PAPER/NAME.toml`.

A setting is a layer of values, above the defaults of its data set and below what the user says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from coterie.errors import ConfigError
from coterie.hyper import suggest

# One is given instead of the other.
RIVALS = {"local_epochs": "local_steps", "fraction": "clients_per_round", "data": "silos"}
WORDS = ("about", "paper", "table")


@dataclass(frozen=True)
class Setting:
    """`values` are keys of `Config`; `about` says what is the paper's and what is not."""

    about: str
    paper: str
    table: str  # where in the paper its results are
    values: Mapping[str, Any]


@cache
def settings() -> dict[str, Setting]:
    """All settings by name, PAPER/NAME, sorted."""
    found = {}
    papers = [folder for folder in files("coterie").joinpath("settings").iterdir() if folder.is_dir()]
    for folder in papers:
        for file in folder.iterdir():
            if file.name.endswith(".toml"):
                told = tomllib.loads(file.read_text(encoding="utf-8"))
                values = {key: value for key, value in told.items() if key not in WORDS}
                words = {key: told[key] for key in WORDS}
                found[f"{folder.name}/{file.name.removesuffix('.toml')}"] = Setting(**words, values=values)
    return dict(sorted(found.items()))


def find_setting(name: str) -> Setting:
    known = settings()
    if name not in known:
        raise ConfigError([f"there is no setting '{name}'{suggest(name, known)}; 'coterie data settings' lists them"])
    return known[name]


def named_by(setting: Any, key: str, default: str) -> str:
    """What a setting, if there is one of that name, has for `key` (method, data)."""
    found = settings().get(setting) if isinstance(setting, str) else None
    return default if found is None else str(found.values.get(key, default))


def over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper`, and what it leaves open from `lower`.

    Where two keys exclude each other, the upper one counts. A method's hyper-parameters do not carry over to another
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
