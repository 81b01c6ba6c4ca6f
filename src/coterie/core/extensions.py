"""What a name means: one of the library's own things, one that an installed package adds, or an import path.

Whatever can be added without changing Coterie is found in the same way, wherever a name is asked for: on the command
line, in a file, or from Python.

- `cosine`: a name of the library's own;
- `warm-restarts`: a name that an installed package adds, by an entry point of the group that `GROUPS` names;
- `my_package.schedules:Restarts`: an import path, from the current folder too.

Words after further colons are options: `cosine:least=0.1`, `my_package.schedules:Restarts:period=10`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from coterie.core.errors import ConfigError
from coterie.core.importing import import_path
from coterie.core.user_code import in_user_code

T = TypeVar("T")

GROUPS = {
    "method": "coterie.methods",
    "model": "coterie.models",
    "augmentation": "coterie.augmentations",
    "data source": "coterie.data_sources",
    "partition": "coterie.partitions",
    "sampler": "coterie.samplers",
    "server optimizer": "coterie.server_optimizers",
    "optimizer": "coterie.optimizers",
    "schedule": "coterie.schedules",
    "loss": "coterie.losses",
    "metric": "coterie.metrics",
    "callback": "coterie.callbacks",
    "report section": "coterie.report_sections",
}


def find(kind: str, name: str, known: Mapping[str, T]) -> T:
    """Find a thing by its name or import path, without options.

    Args:
        kind: one of `GROUPS`, which is also what messages call it.
        name: a name, or `package.module:name`.
        known: the library's own things of this kind. They come first: a package cannot replace one.

    Raises:
        ConfigError: there is no such thing, or it cannot be imported.
    """
    if name in known:
        return known[name]
    if name in added(kind):
        found: T = _load(kind, added(kind)[name])
        return found
    if ":" in name:
        found = import_path(name, kind)
        return found
    names = list(dict.fromkeys([*known, *added(kind)]))
    has = f"there are {', '.join(names)}, or" if names else "give an import path,"
    raise ConfigError([f"there is no {kind} '{name}'{suggest(name, names)}; {has} package.module:name"])


def with_options(kind: str, text: str, known: Mapping[str, T]) -> tuple[T, list[str]]:
    """Find a thing that may have options after its name: `NAME[:word...]` or `package.module:NAME[:word...]`.

    Returns:
        What was found, and the words after its name.

    Raises:
        ConfigError: there is no such thing, or it cannot be imported.
    """
    first, *words = text.split(":")
    if first in known or first in added(kind) or not words or not words[0].replace(".", "").isidentifier():
        return find(kind, first, known), words  # a word such as `least=0.1` is no part of an import path
    return find(kind, f"{first}:{words[0]}", known), words[1:]


@functools.cache
def added(kind: str) -> dict[str, EntryPoint]:
    """Return what installed packages add, by name, without importing it."""
    return {entry.name: entry for entry in entry_points(group=GROUPS[kind])}


def about_entry(kind: str, name: str, entry: EntryPoint) -> tuple[str, str]:
    """Return a name that a package adds, and the first line of its docstring, or why it cannot be imported."""
    origin = f" (package {entry.dist.name})" if entry.dist else ""
    try:
        about = (inspect.getdoc(find(kind, name, {})) or "").split("\n")[0]
    except ConfigError as error:
        return name, error.problems[0]
    return name, f"{about}{origin}".strip()


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean '...'?)" if one of the `known` names is close to `name`, and else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _load(kind: str, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        origin = f" of package {entry.dist.name}" if entry.dist else ""
        why = f"{type(error).__name__}: {error}{in_user_code(error)}"
        raise ConfigError([f"{kind} '{entry.name}'{origin} cannot be imported ({entry.value}): {why}"]) from error
