"""`coterie data`: list the data sets and models that have a name. Each subcommand has its own file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli.console import say, show, stdout
from coterie.cli.data_get import data_get
from coterie.cli.data_show import data_settings, data_show
from coterie.cli.flags import format_default
from coterie.cli.panels import Listed
from coterie.core.extensions import about_entry, added
from coterie.data import SOURCES, Source
from coterie.data.download.catalogue import DOWNLOADS
from coterie.models import MODELS, options_of

app = typer.Typer(rich_markup_mode=None)
app.command("get", cls=Listed)(data_get)
app.command("show", cls=Listed)(data_show)
app.command("settings", cls=Listed)(data_settings)
DataDir = Annotated[str | None, typer.Option("--data-dir", help="folder with the data sets (default: COTERIE_DATA)")]


@app.callback(invoke_without_command=True)
def data(ctx: typer.Context, data_dir: DataDir = None) -> None:
    """List the data sets, their settings, and the models."""
    if ctx.invoked_subcommand is not None:
        return
    console = stdout()
    sets = _table("Data sets (--data)", "name", "what it is", "examples", "classes", "licence", "source", "available")
    for name, source in SOURCES.items():
        facts = source.facts
        cells = (facts.size, facts.classes, facts.licence, facts.origin)
        sets.add_row(name, source.about, *cells, _availability(source, data_dir))
    for name, entry in added("data source").items():
        sets.add_row(*about_entry("data source", name, entry), "", "", "", "", "yes")
    show(console, sets)
    say(
        console,
        "get: 'coterie data get NAME' downloads it. ask: the authors provide it; the same command explains how.",
    )
    defaults = _table("Default settings of each data set", "name", "settings")
    for name, source in SOURCES.items():
        defaults.add_row(name, _settings(source.defaults))
    show(console, defaults)
    models = _table("Models (--model)", "name", "what it is", "options")
    for name, factory in MODELS.items():
        models.add_row(name, (inspect.getdoc(factory) or "").split("\n")[0], _options(name))
    show(console, models)
    say(console, "Options of a model: --model cnn:features=128. Your own model: --model package.module:factory.", "dim")
    say(console, "Published experiments (--setting) and partitions (--partition): coterie data settings.")
    say(
        console,
        "Your own data: --silos a.csv b.csv --target COLUMN, --data FILE.npz, --data FOLDER/ (images or LEAF), "
        "--data package.module:function.",
        "dim",
    )


def _options(model: str) -> str:
    return ", ".join(
        f"{key}={'/'.join(map(str, value)) if isinstance(value, tuple) else format_default(value)}"
        for key, value in options_of(model).items()
    )


def _availability(source: Source, data_dir: str | None) -> str:
    if source.files is None or source.files.find(data_dir) is not None:
        return "yes"
    return "get" if source.files.name in DOWNLOADS else "ask"


def _settings(defaults: Mapping[str, Any]) -> str:
    words = []
    for key, value in defaults.items():
        flat = {"optimizer" if k == "name" else k: v for k, v in value.items()} if isinstance(value, Mapping) else None
        words += [f"{name} {format_default(each)}" for name, each in (flat or {key: value}).items()]
    return ", ".join(words)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(heading, no_wrap=i == 0, style="bold" if i == 0 else "")
    return table
