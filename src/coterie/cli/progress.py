"""Shows the progress of a run: a bar on a terminal, plain lines elsewhere (in a notebook, too), nothing when quiet."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.status import Status

from coterie.cli.console import say, stdout
from coterie.experiment.progress import Progress, Silent, scores

CHOOSING_ENGINE = "choosing the fastest engine, and compiling if that saves time (up to half a minute)"
BETWEEN_RUNS = "writing results, preparing the next step"


def watch(quiet: bool, *, measures: bool, debug: bool = False) -> contextlib.AbstractContextManager[Progress]:
    """Return a progress display for one `with` block.

    Args:
        quiet: Show nothing.
        measures: Say that the run begins by measuring engines, which takes a while.
        debug: Show no bar, since it would be drawn over a debugger's prompt.
    """
    console = stdout()
    if quiet:
        return contextlib.nullcontext(Silent())
    return Bars(console, measures) if console.is_terminal and not debug else Lines(console, measures)


class Lines:
    """Prints one line per round."""

    def __init__(self, console: Console, measures: bool) -> None:
        self._console, self._measures = console, measures
        self._label, self._rounds = "", 0

    def __enter__(self) -> Self:
        if self._measures:
            self.say(CHOOSING_ENGINE)
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        say(self._console, text, "dim")

    def start(self, label: str, done: int, rounds: int) -> None:
        self._label, self._rounds = label, rounds
        if done:
            self.say(_resuming(label, done, rounds))

    def round(self, record: dict[str, Any], metric: str) -> None:
        line = (
            f"{self._label} round {record['round']}/{self._rounds} {scores(record, metric)} {record['seconds']:.1f} s"
        )
        say(self._console, line)

    def stop(self) -> None: ...


class Bars:
    """Shows a bar during the rounds, a spinner in between, and one line for each finished run."""

    def __init__(self, console: Console, measures: bool) -> None:
        self._console = console
        self._spinner = Status(CHOOSING_ENGINE if measures else "preparing", console=console)
        self._bar: Bar | None = None
        self._seconds = 0.0
        self._last: tuple[str, int] = ("", 0)  # what the last round scored, and its number

    def __enter__(self) -> Self:
        self._spinner.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._drop_bar()
        self._spinner.stop()

    def say(self, text: str) -> None:
        say(self._console, text, "dim")

    def start(self, label: str, done: int, rounds: int) -> None:
        self._spinner.stop()
        if done:
            self.say(_resuming(label, done, rounds))
        self._seconds, self._last = 0.0, ("", done)
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description} round {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[scores]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        self._bar = Bar(*columns, console=self._console, transient=True)
        self._bar.add_task(label, total=rounds, completed=done, scores="")
        self._bar.start()

    def round(self, record: dict[str, Any], metric: str) -> None:
        self._seconds += record["seconds"]
        self._last = (scores(record, metric), record["round"])
        if self._bar is not None:
            short = self._last[0].replace(f" {metric}", "")  # a line of 80 characters holds no more
            self._bar.update(self._bar.task_ids[0], completed=record["round"], scores=short)

    def stop(self) -> None:
        words, number = self._last
        label = self._bar.tasks[0].description if self._bar is not None else ""
        self._drop_bar()
        if words:
            say(self._console, f"{label} round {number}: {words}, {self._seconds:.1f} s")
        self._spinner.update(BETWEEN_RUNS)
        self._spinner.start()

    def _drop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _resuming(label: str, done: int, rounds: int) -> str:
    if done >= rounds:
        return f"{label}: all {rounds} rounds are already done"
    return f"{label}: continuing after round {done} of {rounds}"
