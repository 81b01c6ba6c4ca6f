"""How a plan is printed: all of it by `coterie plan`, and bytes and warnings in the first lines of a run."""

from __future__ import annotations

from rich.console import Console

from coterie.cli.console import say, stderr, stdout
from coterie.core.units import bytes_in_words
from coterie.experiment.plan import RunPlan
from coterie.experiment.plan_costs import Traffic


def show_plan(console: Console, found: RunPlan) -> None:
    """Print all that a plan says, and then its warnings."""
    for name, line in _lines(found):
        say(console, f"{name:<10}{line}")
    _show_warnings(console, found)
    if not found.warnings:
        say(console, "No warnings.")


def show_first_look(found: RunPlan) -> None:
    """Print what a run's first lines say: bytes, on standard output, and warnings, on standard error."""
    if found.traffic is not None and found.traffic.total:
        say(stdout(), _traffic(found.traffic), "dim")
    _show_warnings(stderr(), found)


def _show_warnings(console: Console, found: RunPlan) -> None:
    """Print each warning as a note."""
    for warning in found.warnings:
        say(console, f"Note: {warning}.", "yellow")


def _traffic(traffic: Traffic) -> str:
    """Say how many bytes a round and the run send."""
    about = "" if traffic.exact else "about "
    up, down, total = (bytes_in_words(number) for number in (traffic.up, traffic.down, traffic.total))
    return f"{about}{up} up and {down} down a round, {total} in all rounds"


def _lines(found: RunPlan) -> list[tuple[str, str]]:
    train = sorted(each["train"] for each in found.clients.values())
    steps, memory, probe = found.steps, found.memory, found.probe or {}
    lines = [
        ("clients", f"{len(train)}, with {_range(train[0], train[-1])} training examples each, {sum(train):,} in all"),
        ("steps", f"{_range(steps['least'], steps['most'])} of a client and round, {steps['all']:,} of all in the run"),
        ("hearing", found.hearing),
    ]
    if found.pull is not None:
        words = f"{found.pull.strength:.2g} of the data's gradient over a round (by {found.pull_option})"
        if found.pull.movement is not None:
            words += f"; with it a model moves {found.pull.movement:.2g} times as far as without"
        lines.append(("pull", words))
    if found.progress is not None:
        lines.append(("progress", f"a round moves what a client deploys {found.progress:.2g} times as far as alone"))
    if found.weights is not None:
        own, strongest, others = found.weights.own, found.weights.strongest, found.weights.others
        lines.append(("weights", f"{own:.2g} for itself, {strongest:.2g} for the next; {others:.1f} others count"))
    if found.traffic is not None:
        lines.append(("traffic", _traffic(found.traffic) if found.traffic.total else "nothing is sent"))
    if found.privacy is not None:
        lines.append(("privacy", found.privacy["words"]))
    if found.seconds is not None:
        lines.append(("time", f"roughly {_time(found.seconds[0])} to {_time(found.seconds[1])}"))
    paged = "; clients' states beyond half the limit lie in files" if memory.paged else ""
    parts = {"a model": memory.model, "clients": memory.clients, "server": memory.server, "data": memory.data}
    sizes = ", ".join(f"{name} {bytes_in_words(size)}" for name, size in parts.items())
    lines.append(("memory", f"{sizes} (limit for states: {bytes_in_words(memory.limit)}){paged}"))
    tried = f"{probe['clients']} clients, {probe['rounds']} rounds of at most {probe['steps']} steps"
    return [*lines, ("measured", f"on {tried}, in {probe['seconds']:.1f} s")]


def _range(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
