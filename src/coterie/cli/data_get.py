"""`coterie data get`: fetch a data set."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from coterie.cli.console import say, stderr, stdout
from coterie.cli.errors import in_words
from coterie.data import SOURCES
from coterie.data.fetch import get
from coterie.data.locations import destination
from coterie.data.ways import WAYS
from coterie.errors import ConfigError, DataError
from coterie.hyper import suggest


def data_get(
    name: Annotated[str, typer.Argument(help="a data set of 'coterie data'")],
    data_dir: Annotated[
        str | None,
        typer.Option("--data-dir", help="where to; by default what COTERIE_DATA names, or a folder of the user's own"),
    ] = None,
) -> None:
    """Fetch a data set, check it, and put it where runs find it.

    A download that breaks off is taken up again by the same command.
    """
    with in_words() as ending:
        ending.advice = "The same command goes on from there."
        source = SOURCES.get(name)
        if name not in WAYS:
            if source is None:
                raise ConfigError([f"there is no data set '{name}'{suggest(name, [*SOURCES, *WAYS])}"])
            if source.files is None:
                say(stdout(), f"{name} needs no files.")
                return
            if source.files.name not in WAYS:
                raise DataError(f"{name} cannot be fetched by one command: {source.files.advice}")
            name = source.files.name
        folder, ways = WAYS[name]
        into = destination(data_dir) / folder
        if source is not None and source.files is not None and (found := source.files.find(data_dir)):
            say(stdout(), f"{name} is here already: {found}")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=stderr(), transient=True) as bar:
            task = bar.add_task(name, total=None)
            files = get(into, ways, lambda here, total: bar.update(task, completed=here, total=total))
        say(stdout(), f"{name}: {len(files)} file{'s' * (len(files) != 1)} in {into}, checksums right.")
        if source is not None and source.files is not None and source.files.find() is None:
            say(stdout(), f"Use it with --data-dir {destination(data_dir)}, or set COTERIE_DATA.")
