"""Progress in a notebook: one output, updated in place as HTML, without widgets or control characters."""

from __future__ import annotations

import html
import time
from importlib import import_module
from typing import Any, Literal

from coterie.experiment.progress import Progress, Silent, scores

SECONDS_BETWEEN = 0.2  # updates: a notebook draws no faster, and keeps every one of them until it has
LINES_KEPT = 40
DIM = "opacity:.65"

Heard = Progress | Literal[False] | None  # what users give: False is silence, None leaves it to where the run is


def listener(progress: Heard) -> Progress:
    """Return who hears the news of a run: whoever was given; else a notebook, if this is one; else nobody."""
    if progress is None and in_notebook():
        return NotebookProgress()
    return progress or Silent()


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return False
    return hasattr(shell, "kernel")


class NotebookProgress:
    """Show a bar while a run trains, a line for each that has ended, and remarks in between."""

    def __init__(self) -> None:
        notebook = import_module("IPython.display")  # which a notebook has
        self._html = notebook.HTML
        self._lines: list[str] = []
        self._bar = ""
        self._label, self._rounds, self._seconds = "", 0, 0.0
        self._last: tuple[str, int] = ("", 0)  # what the last round scored, and its number
        self._shown = 0.0
        self._output = notebook.display(notebook.HTML(""), display_id=True)

    def say(self, text: str) -> None:
        self._add(f'<div style="{DIM}">{html.escape(text)}</div>')

    def start(self, label: str, done: int, rounds: int) -> None:
        self._label, self._rounds, self._seconds, self._last = label, rounds, 0.0, ("", done)
        self._draw(done, "")

    def round(self, record: dict[str, Any], metric: str) -> None:
        self._seconds += record["seconds"]
        self._last = scores(record, metric), record["round"]
        if time.monotonic() - self._shown > SECONDS_BETWEEN:
            self._draw(record["round"], self._last[0])

    def stop(self) -> None:
        self._bar = ""
        words, number = self._last
        if words:
            line = f"{self._label} round {number}/{self._rounds}: {words}, {self._seconds:.1f} s"
            self._add(f"<div>{html.escape(line)}</div>")
        else:
            self._update()

    def _draw(self, done: int, words: str) -> None:
        label = html.escape(f"{self._label} round {done}/{self._rounds} {words}")
        self._bar = f'<div><progress value="{done}" max="{self._rounds}"></progress> {label}</div>'
        self._update()

    def _add(self, line: str) -> None:
        self._lines = [*self._lines, line][-LINES_KEPT:]
        self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        self._output.update(self._html(f"<div>{''.join(self._lines)}{self._bar}</div>"))
