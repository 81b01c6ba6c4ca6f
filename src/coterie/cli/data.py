"""`coterie data`: the data sets and networks that have a name. Its subcommands have files of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import typer
from rich.table import Table

from coterie.cli.console import say, stdout
from coterie.cli.flags import shown
from coterie.data import SOURCES
from coterie.models import MODELS

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def data(ctx: typer.Context) -> None:
    """List the data sets, their settings, and the models."""
    if ctx.invoked_subcommand is not None:
        return
    console = stdout()
    sets = _table("Data sets (--data)", "name", "what it is", "its defaults")
    for name, source in SOURCES.items():
        sets.add_row(name, source.about, _settings(source.defaults))
    console.print(sets)
    models = _table("Models (--model)", "name", "what it is")
    for name, factory in MODELS.items():
        models.add_row(name, (inspect.getdoc(factory) or "").split("\n")[0])
    console.print(models)
    say(
        console,
        "Your own model: --model package.module:factory. Your own files: --silos a.csv b.csv --target COLUMN.",
        "dim",
    )


def _settings(defaults: Mapping[str, Any]) -> str:
    words = []
    for key, value in defaults.items():
        flat = {"optimizer" if k == "name" else k: v for k, v in value.items()} if isinstance(value, Mapping) else None
        words += [f"{name} {shown(each)}" for name, each in (flat or {key: value}).items()]
    return ", ".join(words)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, no_wrap=i == 0, style="bold" if i == 0 else "")
    return table
