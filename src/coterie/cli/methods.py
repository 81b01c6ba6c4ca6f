"""`coterie methods`: what there is, and the paper, equations and flags of each."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.cli.flags import OPTIMIZER, shown
from coterie.errors import ConfigError
from coterie.hyper import Hyper, find_method, hyper_parameters
from coterie.local import OPTIMIZERS
from coterie.methods import METHODS


def methods(name: Annotated[str | None, typer.Argument(help="one of them, to see its paper and flags")] = None) -> None:
    """List the methods, or show one: paper, equations, flags."""
    with in_words():
        if name is None:
            _list(stdout())
        else:
            _show(stdout(), name)


def about(cls: type) -> str:
    """The docstring of the file that a method is."""
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")


def _list(console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, cls in METHODS.items():
        table.add_row(name, (about(cls).splitlines() or [""])[0])
    console.print(table)
    console.print("'coterie methods NAME' shows the equations and flags of one.", style="dim")


def _show(console: Console, name: str) -> None:
    cls, problems = find_method(name)
    if cls is None:
        raise ConfigError(problems)
    say(console, about(cls))
    console.print()
    own = hyper_parameters(cls)
    if own:
        console.print(_table(f"Flags of {name}", [(each, shown(each.default), each.help) for each in own]))
    else:
        console.print(f"{name} has no flags of its own.")
    default = next((field.default for field in dataclasses.fields(cls) if field.name == "optimizer"), None)  # type: ignore[arg-type]
    if default is not None:
        console.print(_table("Flags of its optimiser", list(_optimizer_rows(default))))
        console.print("A data set's optimiser takes the place of these defaults ('coterie data').", style="dim")


def _optimizer_rows(default: Any) -> list[tuple[Hyper, str, str]]:
    """Every setting that some optimiser has, with the default of the one that the method uses."""
    names = {cls: name for name, cls in OPTIMIZERS.items()}
    rows = {OPTIMIZER.name: (OPTIMIZER, names.get(type(default), type(default).__name__), OPTIMIZER.help)}
    for cls in OPTIMIZERS.values():
        for each in hyper_parameters(cls):
            owners = [name for name, other in OPTIMIZERS.items() if each.name in _fields(other)]
            only = "" if len(owners) == len(OPTIMIZERS) else f" ({', '.join(owners)})"
            value = shown(getattr(default, each.name)) if hasattr(default, each.name) else ""
            rows.setdefault(each.name, (each, value, each.help + only))
    return list(rows.values())


def _fields(cls: type) -> set[str]:
    return {each.name for each in hyper_parameters(cls)}


def _table(title: str, rows: list[tuple[Hyper, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("flag", "default", "allowed", "meaning"):
        table.add_column(heading)
    for each, default, meaning in rows:
        table.add_row(each.flag, default, each.allowed, meaning)
    return table
