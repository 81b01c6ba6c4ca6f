"""Where words go. Nothing that is printed is mark-up: a client may be called '[bold]'."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def stdout() -> Console:
    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    return Console(markup=False, highlight=False, emoji=False, stderr=True)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Without breaking lines, so that paths and commands can be copied whole."""
    console.print(text, style=style, soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Where there is no terminal to fit it into, as wide as it needs to be."""
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(console.width, needed)
    console.print(table)
