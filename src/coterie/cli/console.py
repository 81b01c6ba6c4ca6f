"""Where words go. Nothing that is printed is mark-up: a client may be called '[bold]'."""

from __future__ import annotations

from rich.console import Console


def stdout() -> Console:
    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    return Console(markup=False, highlight=False, emoji=False, stderr=True)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Without breaking lines, so that paths and commands can be copied whole."""
    console.print(text, style=style, soft_wrap=True)
