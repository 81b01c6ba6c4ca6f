"""Printing to the terminal. Text is never interpreted as mark-up: a client may be called '[bold]'."""

from __future__ import annotations

import os

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def stdout() -> Console:
    """Return a console that prints to standard output."""
    return Console(markup=False, highlight=False, emoji=False, force_terminal=_terminal())


def stderr() -> Console:
    """Return a console that prints to standard error."""
    return Console(markup=False, highlight=False, emoji=False, force_terminal=_terminal(), stderr=True)


def _terminal() -> bool | None:
    """Tell what is no terminal, though it looks like one: a notebook's cell (!coterie run), which moves no cursor."""
    return False if "JPY_PARENT_PID" in os.environ else None


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print text without breaking lines, so that paths and commands can be copied."""
    console.print(text, style=style, soft_wrap=True)


def show(console: Console, table: Table) -> None:
    """Print a table. Without a terminal it is as wide as it needs to be."""
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(console.width, needed)
    console.print(table)
