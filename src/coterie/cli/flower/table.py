"""The table of sites while a federation runs: alive on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coterie.cli.console import say

Told = dict[str, Any]


@contextlib.contextmanager
def watching(console: Console, quiet: bool) -> Iterator[Callable[[Told], None]]:
    if quiet:
        yield lambda told: None
    elif console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=2) as live:
            yield lambda told: live.update(site_table(told))
    else:
        yield Changes(console)


class Changes:
    """One line whenever a round is closed or a message was refused."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()  # no line comes twice

    def __call__(self, told: Told) -> None:
        sites, closed = told["sites"], told["round"]
        losses = [each["loss"] for each in sites.values() if each["loss"] is not None]
        words = [f"round {closed} of {told['rounds']} closed"] if closed else []
        words += [f"mean loss {sum(losses) / len(losses):.4g}"] if closed and losses else []
        words = [told["doing"]] if told["doing"] and closed in (0, told["rounds"]) else words
        silent = [name for name, each in sites.items() if each["state"] in ("silent", "failed")]
        refused = {name: each["refused"] for name, each in sites.items() if each["refused"]}
        words += [f"silent: {', '.join(silent)}"] if silent else []
        words += [f"refused from {name}: {_counts(codes)}" for name, codes in refused.items()]
        line = "; ".join(words)
        if line and line not in self._said:
            self._said.add(line)
            say(self._console, line)


def site_table(told: Told) -> Table:
    """The metric is on validation examples, of the round before: a message evaluates what the last one trained."""
    title = f"{told['run']}: {told['doing'] or 'round ' + str(told['round']) + ' closed'}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("site")
    table.add_column("state")
    for name in (
        "round",
        "last seen",
        "loss",
        (told["metric"] or "metric").replace("_", " "),
        "sent",
        "received",
        "refused",
    ):
        table.add_column(name, justify="right")
    for name, each in told["sites"].items():
        seen = f"{max(0.0, time.time() - each['seen']):.0f} s ago" if each["seen"] else "-"
        numbers = ["-" if each[key] is None else f"{each[key]:.3f}" for key in ("loss", "metric")]
        size = [_bytes(each[key]) for key in ("bytes_up", "bytes_down")]
        table.add_row(name, each["state"], str(each["round"]), seen, *numbers, *size, _counts(each["refused"]) or "0")
    return table


def _bytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def _counts(refused: dict[str, int]) -> str:
    return ", ".join(f"{number} {code}" for code, number in refused.items())
