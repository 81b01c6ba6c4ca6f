"""Shows the sites while a federation runs: a live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.cli.console import say

Status = dict[str, Any]


@contextlib.contextmanager
def watch_sites(console: Console, quiet: bool) -> Iterator[Callable[[Status], None]]:
    """Yield a function that displays the status of the federation (the content of sites.json)."""
    if quiet:
        yield lambda status: None
    elif console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=2) as live:
            yield lambda status: live.update(site_table(status))
    else:
        yield ChangeLines(console)


class ChangeLines:
    """Prints one line whenever a round closes or a message is refused."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[str] = set()  # no line is printed twice

    def __call__(self, status: Status) -> None:
        sites, closed = status["sites"], status["round"]
        losses = [each["loss"] for each in sites.values() if each["loss"] is not None]
        words = [f"round {closed} of {status['rounds']} closed"] if closed else []
        words += [f"mean loss {sum(losses) / len(losses):.4g}"] if closed and losses else []
        words = [status["doing"]] if status["doing"] and closed in (0, status["rounds"]) else words
        silent = [name for name, each in sites.items() if each["state"] in ("silent", "failed")]
        refused = {name: each["refused"] for name, each in sites.items() if each["refused"]}
        words += [f"silent: {', '.join(silent)}"] if silent else []
        words += [f"refused from {name}: {_counts(codes)}" for name, codes in refused.items()]
        line = "; ".join(words)
        if line and line not in self._printed:
            self._printed.add(line)
            say(self._console, line)


def site_table(status: Status) -> Table:
    """Return one row per site. The validation metric is that of the previous round, which a message evaluates."""
    title = f"{status['run']}: {status['doing'] or 'round ' + str(status['round']) + ' closed'}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("site")
    table.add_column("state")
    for name in (
        "round",
        "last seen",
        "loss",
        (status["metric"] or "metric").replace("_", " "),
        "sent",
        "received",
        "refused",
    ):
        table.add_column(name, justify="right")
    for name, each in status["sites"].items():
        seen = f"{max(0.0, time.time() - each['seen']):.0f} s ago" if each["seen"] else "-"
        numbers = ["-" if each[key] is None else f"{each[key]:.3f}" for key in ("loss", "metric")]
        size = [_bytes(each[key]) for key in ("bytes_up", "bytes_down")]
        table.add_row(name, each["state"], str(each["round"]), seen, *numbers, *size, _counts(each["refused"]) or "0")
    return table


def _bytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _counts(refused: dict[str, int]) -> str:
    return ", ".join(f"{number} {code}" for code, number in refused.items())
