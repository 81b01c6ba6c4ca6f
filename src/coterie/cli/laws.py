"""`coterie laws`: whether a method keeps the laws that every method should."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from coterie.cli.console import say, show, stderr, stdout
from coterie.cli.errors import report_errors
from coterie.core.errors import ConfigError
from coterie.methods.fields import AnyMethod, find_method

if TYPE_CHECKING:
    from coterie.testing import Row

STYLES = {"held": "green", "broken": "red", "does not apply": "yellow"}


def laws(
    name: Annotated[str, typer.Argument(help="a registered method, or package.module:Class of your own")],
    only: Annotated[str, typer.Option(help="laws to ask for, by number: 1,5,12")] = "",
) -> None:
    """Ask a method for the laws that every method should keep, and print which it does."""
    from coterie.testing import LAWS, examine  # which no other command needs

    with report_errors():
        method, asked = _method(name), _numbers(only)
        coming = [law for law in LAWS.values() if not asked or law.number in asked]
        results = examine(method, asked)
        rows: list[Row] = []
        for place, law in enumerate(coming, start=1):
            with _working(f"{place} of {len(coming)}: law {law.number}, {law.name}"):
                rows.append(next(results))
        _print(rows)
        broken = sum(row.outcome == "broken" for row in rows)
        say(stdout(), f"{name} breaks {broken} of {len(rows)} laws." if broken else f"{name} breaks no law.")
        if broken:
            raise typer.Exit(1)


def _method(name: str) -> AnyMethod:
    cls, problems = find_method(name)
    if cls is None:
        raise ConfigError(problems)
    try:
        return cls()
    except TypeError as error:
        raise ConfigError(
            [f"method '{name}' cannot be made without arguments; give its fields defaults: {error}"]
        ) from error


def _numbers(only: str) -> list[int]:
    try:
        return [int(word) for word in only.split(",") if word.strip()]
    except ValueError:
        raise ConfigError([f"--only {only}: laws are numbers with commas between them, such as 1,5,12"]) from None


@contextlib.contextmanager
def _working(text: str) -> Iterator[None]:
    """Tell what is going on, on stderr: for as long as it does on a terminal, else in a line."""
    console = stderr()
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        say(console, text, "dim")
        yield


def _print(rows: list[Row]) -> None:
    table = Table()
    table.add_column("law", justify="right", no_wrap=True)
    for heading in ("", "result", "words"):
        table.add_column(heading)
    for row in rows:
        table.add_row(str(row.number), row.name, Text(row.outcome, STYLES[row.outcome]), row.words)
    show(stdout(), table)
