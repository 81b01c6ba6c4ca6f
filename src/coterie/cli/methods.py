"""`coterie methods`: list the methods, or show one with its paper, equations and flags."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.flags import OPTIMIZER, format_default
from coterie.core.errors import ConfigError
from coterie.core.optimizers import OPTIMIZERS
from coterie.experiment.tuning.space import range_of
from coterie.methods import METHODS
from coterie.methods.fields import Hyper, find_method, hyper_parameters
from coterie.parts import server_optimizers, sums

OPTIMIZER_NAMES = {OPTIMIZER.name, *(each.name for cls in OPTIMIZERS.values() for each in hyper_parameters(cls))}


def methods(name: Annotated[str | None, typer.Argument(help="a method, to see its paper and flags")] = None) -> None:
    """List the methods, or show one: paper, equations, flags."""
    with report_errors():
        if name is None:
            _list(stdout())
        else:
            _show(stdout(), name)


def about(cls: type) -> str:
    """Return the docstring of the module that defines a method."""
    return inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")


def _list(console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, cls in METHODS.items():
        table.add_row(name, " ".join(about(cls).split("\n\n")[0].split()))
    console.print(table)
    summed = [name for name, cls in METHODS.items() if sums.why_not(cls()) is None]
    say(console, f"Over Flower, messages can be summed securely (deploy.secure) of: {', '.join(summed)}.", "dim")
    stepped = [name for name, cls in METHODS.items() if server_optimizers.why_not(cls()) is None]
    say(console, f"A server optimiser (--server-optimizer) or robust averages go with: {', '.join(stepped)}.", "dim")
    console.print("'coterie methods NAME' shows the equations and flags of a method.", style="dim")


def _show(console: Console, name: str) -> None:
    cls, problems = find_method(name)
    if cls is None:
        raise ConfigError(problems)
    say(console, about(cls))
    console.print()
    own = hyper_parameters(cls)
    if own:
        console.print(_table(f"Flags of {name}", [(each, format_default(each.default), each.help) for each in own]))
    else:
        console.print(f"{name} has no flags.")
    if all(each.default is not dataclasses.MISSING for each in dataclasses.fields(cls)):  # type: ignore[arg-type]
        reason = "it sends nothing" if name == "local" else sums.why_not(cls())
        say(console, f"Secure sums over Flower (deploy.secure): {'yes' if reason is None else f'no, {reason}'}.")
        reason = "it has no server" if name == "local" else server_optimizers.why_not(cls())
        say(console, f"Server optimisers (--server-optimizer): {'yes' if reason is None else f'no, {reason}'}.")
    default = next((field.default for field in dataclasses.fields(cls) if field.name == "optimizer"), None)  # type: ignore[arg-type]
    if default is not None:
        console.print(_table("Flags of its optimiser", list(_optimizer_rows(default))))
        console.print(
            "If the data set has default optimiser settings ('coterie data'), they replace these.", style="dim"
        )


def searched(hyper: Hyper) -> str:
    """Return the range in which `coterie tune` looks, if it does of itself."""
    found = range_of(hyper, by_type=hyper.name not in OPTIMIZER_NAMES)
    return "" if found is None else str(found)


def _optimizer_rows(default: Any) -> list[tuple[Hyper, str, str]]:
    """Return every setting of every optimiser, with the default of the optimiser that the method uses."""
    names = {cls: name for name, cls in OPTIMIZERS.items()}
    rows = {OPTIMIZER.name: (OPTIMIZER, names.get(type(default), type(default).__name__), OPTIMIZER.help)}
    for cls in sorted(OPTIMIZERS.values(), key=lambda each: each is not type(default)):  # its own ranges come first
        for each in hyper_parameters(cls):
            owners = [name for name, other in OPTIMIZERS.items() if each.name in _fields(other)]
            only = "" if len(owners) == len(OPTIMIZERS) else f" ({', '.join(owners)})"
            value = format_default(getattr(default, each.name)) if hasattr(default, each.name) else ""
            rows.setdefault(each.name, (each, value, each.help + only))
    return list(rows.values())


def _fields(cls: type) -> set[str]:
    return {each.name for each in hyper_parameters(cls)}


def _table(title: str, rows: list[tuple[Hyper, str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("flag", "default", "allowed", "searched", "meaning"):
        table.add_column(heading)
    for each, default, meaning in rows:
        table.add_row(each.flag, default, each.allowed, searched(each), meaning)
    return table
