"""`coterie data get`: download a data set."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from coterie.cli.console import say, stderr, stdout
from coterie.cli.errors import report_errors
from coterie.core.errors import ConfigError, DataError
from coterie.core.extensions import suggest
from coterie.data import SOURCES
from coterie.data.download.catalogue import DOWNLOADS
from coterie.data.download.fetch import get
from coterie.data.download.locations import destination


def data_get(
    name: Annotated[str, typer.Argument(help="a data set that 'coterie data' lists")],
    data_dir: Annotated[
        str | None,
        typer.Option("--data-dir", help="folder to download to (default: COTERIE_DATA, or a folder in your home)"),
    ] = None,
) -> None:
    """Download a data set, verify it, and put it where runs find it.

    To continue an interrupted download, run the same command again.
    """
    with report_errors() as stopped:
        stopped.advice = "Run the same command again to continue."
        source = SOURCES.get(name)
        if name not in DOWNLOADS:
            if source is None:
                raise ConfigError([f"there is no data set '{name}'{suggest(name, [*SOURCES, *DOWNLOADS])}"])
            if source.files is None:
                say(stdout(), f"{name} needs no files.")
                return
            if source.files.name not in DOWNLOADS:
                raise DataError(f"{name} cannot be downloaded automatically: {source.files.advice}")
            name = source.files.name
        folder, routes = DOWNLOADS[name]
        into = destination(data_dir) / folder
        if source is not None and source.files is not None and (found := source.files.find(data_dir)):
            say(stdout(), f"{name} is already in {found}")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Progress(*columns, console=stderr(), transient=True) as bar:
            task = bar.add_task(name, total=None)
            files = get(into, routes, lambda here, total: bar.update(task, completed=here, total=total))
        say(stdout(), f"{name}: {len(files)} file{'s' * (len(files) != 1)} in {into}, checksums verified.")
        if source is not None and source.files is not None and source.files.find() is None:
            say(stdout(), f"Use it with --data-dir {destination(data_dir)}, or set COTERIE_DATA.")
