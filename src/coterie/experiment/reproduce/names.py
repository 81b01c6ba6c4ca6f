"""Finds tables by what a user calls them: a table's name, a paper's, or all."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.tables import Size, Table


def find_table(name: str) -> Table:
    """Return the table of that name; raise `ConfigError`, with a suggestion, if there is none."""
    if name not in TABLES:
        raise ConfigError([f"there is no table '{name}'{suggest(name, TABLES)}; 'coterie reproduce' lists them"])
    return TABLES[name]


def chosen(names: Sequence[str], size: Size) -> list[tuple[str, Size]]:
    """Return the tables that names stand for, each with its size; of a paper's or all tables, the quickest first.

    A paper's name, or all, takes tables without a small size at full size; a table that is named must have it.

    Raises:
        ConfigError: there is no such table, or it has no small size.
    """
    found: dict[str, Size] = {}
    several = False
    for name in names:
        group = [each for each in TABLES if name == "all" or paper_of(each) == name]
        several = several or bool(group)
        for each in group:
            found.setdefault(each, size if size in TABLES[each].sizes() else "full")
        if not group:
            if size not in find_table(name).sizes():
                raise ConfigError([f"{name} has no small size, as its full size is small: leave out --size"])
            found[name] = size
    order = sorted(found, key=lambda each: TABLES[each].minutes_at(found[each])) if several else list(found)
    return [(each, found[each]) for each in order]


def paper_of(name: str) -> str:
    """Return the paper of a table or figure, by which its name begins."""
    return name.split("-")[0]
