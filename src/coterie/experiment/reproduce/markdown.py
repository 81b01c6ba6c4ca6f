"""Prints measured tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from coterie.experiment.reproduce.measured import Measured
from coterie.experiment.reproduce.scores import Pair, Row
from coterie.experiment.reproduce.tables import Entry, Table

FAR = 2.0  # standard deviations, from which on a difference needs an explanation
LEVEL = 0.05
OLDER = " †"  # after a row of which results are of older code


def markdown(table: Table, measured: Measured) -> str:
    """Return a table with all that belongs to it: its rows, each client's, and the tests between rows."""
    parts = [rows_of(table, measured)]
    if any(entry.clients for entry in table.entries):
        parts.append(details("Each client", clients_of(table, measured)))
    if measured.pairs:
        of = f", {table.protocol.metric}" * (table.protocol.over == "variation")
        parts.append(details(f"Every two methods{of}", tests_of(table, measured)))
    return "\n".join(parts)


def heading(table: Table, measured: Measured) -> str:
    """Say how the table was measured, and by which command."""
    small = measured.size == "small"
    command = f"coterie reproduce {measured.name}{' --size small' * small}"
    seeds = sorted({len(row.seeds) for row in measured.rows.values()})
    said = f"{seeds[0]} to {seeds[-1]} seeds" if len(seeds) > 1 else f"{seeds[0]} seed{'s' * (seeds[0] != 1)}"
    days = measured.dates[0] if measured.dates[0] == measured.dates[1] else " to ".join(measured.dates)
    words = [f"`{command}`, {said}, {days}, {_minutes(measured)} of rounds in all."]
    if small:
        words.append(
            f"**Small size**, the same for all rows: {table.small_words}. The full size is "
            f"`coterie reproduce {measured.name}`, about {hours(table.minutes_at('full'))} of one core."
        )
    if any(row.older for row in measured.rows.values()):
        words.append("† The method's code has changed since some of these results; the command runs them again.")
    if measured.rounds is not None:
        words.append(f"**Only {measured.rounds} rounds**, for a first look.")
    return " ".join([*words, table.note]).strip()


def hours(minutes: float) -> str:
    """Return a duration in words."""
    if minutes < 1:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 100 else f"{minutes / 60:,.0f} hours"


def _minutes(measured: Measured) -> str:
    seconds = sum(row.seconds for row in measured.rows.values())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def rows_of(table: Table, measured: Measured) -> str:
    """Return the rows: paper, paper's protocol, the validated round, and the gain over local training.

    At the small size the distance from the paper says nothing, and is left out.
    """
    local, full = local_row(table, measured), measured.size == "full"
    head = ["method", "paper" if full else "paper, at its size", table.protocol.words]
    head += [*["difference"] * full, "at the round that validation selects"]
    shows_gain = local is not None and table.protocol.over != "variation"
    head += ["over local at equal steps"] * shows_gain + ["models sent, a client and round"] * table.counts_models
    lines = []
    for entry in table.entries:
        row = measured.rows.get(entry.label)
        if row is None:
            lines.append([entry.label, paper_of(entry), *["not run"] * (len(head) - 2)])
            continue
        line = [
            entry.label + OLDER * bool(row.older),
            paper_of(entry),
            spread_of(row.protocol),
            *[difference_of(entry, row)] * full,
        ]
        line.append(spread_of(row.selected))
        if shows_gain:
            line.append("" if local is None else over_local(entry, row, local, measured.pairs))
        if table.counts_models:
            line.append("" if row.models is None else f"{row.models:.1f}")
        lines.append(line)
    return grid(head, lines)


def paper_of(entry: Entry) -> str:
    """Return the paper's number."""
    if entry.paper is None:
        return ""
    return f"{entry.paper:.2f}" + (f" ± {entry.sd:.2f}" if entry.sd is not None else "")


def spread_of(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation over seeds."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def difference_of(entry: Entry, row: Row) -> str:
    """Return how far the measured number is from the paper's; in bold type if that is far."""
    if entry.paper is None:
        return ""
    text = f"{np.mean(row.protocol) - entry.paper:+.2f}"
    return f"**{text}**" if is_far(entry, row) else text


def is_far(entry: Entry, row: Row) -> bool:
    """Tell whether the difference is more than two standard deviations: over seeds, and the paper's own if it has one.

    One seed has no standard deviation; from one point on, a difference then counts as far.
    """
    if entry.paper is None:
        return False
    gap = abs(float(np.mean(row.protocol)) - entry.paper)
    if len(row.protocol) < 2:
        return gap > 1
    return gap > FAR * math.hypot(float(np.std(row.protocol, ddof=1)), entry.sd or 0.0)


def local_row(table: Table, measured: Measured) -> Entry | None:
    """Return the entry that trained alone for as many steps, if it was measured."""
    return next((each for each in table.entries if each.equal_steps and each.label in measured.rows), None)


def over_local(entry: Entry, row: Row, local: Entry, pairs: Sequence[Pair]) -> str:
    """Return the gain over local training at equal steps, with its test."""
    if entry.label == local.label:
        return ""
    for pair in pairs:
        if {pair.first, pair.second} == {entry.label, local.label}:
            sign = 1 if pair.first == entry.label else -1
            spread = "" if math.isnan(pair.sd) else f" ± {pair.sd:.2f}"
            return f"{sign * pair.gain:+.2f}{spread} ({p_of(pair.p)})"
    return ""  # the same models as a row before


def p_of(p: float) -> str:
    """Return a p-value in words."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def clients_of(table: Table, measured: Measured) -> str:
    """Return each client's number: paper / measured."""
    entries = [entry for entry in table.entries if entry.clients and entry.label in measured.rows]
    count = len(entries[0].clients) if entries else 0
    lines = [
        [str(i + 1), *(f"{entry.clients[i]:.2f} / {measured.rows[entry.label].clients[i]:.2f}" for entry in entries)]
        for i in range(count)
    ]
    return grid(["client, paper / measured", *(entry.label for entry in entries)], lines)


def tests_of(table: Table, measured: Measured) -> str:
    """Return the matrix of gains: a row's over a column's, in bold type where Holm's p is below the level."""
    labels = list(dict.fromkeys(label for pair in measured.pairs for label in (pair.first, pair.second)))
    cells = {}
    for pair in measured.pairs:
        for sign, key in ((1, (pair.first, pair.second)), (-1, (pair.second, pair.first))):
            text = f"{sign * pair.gain:+.2f}"
            cells[key] = f"**{text}**" if pair.p < LEVEL else text
    lines = [[a, *("" if a == b else cells.get((a, b), "") for b in labels)] for a in labels]
    return grid(["gain over", *labels], lines)


def variants_of(shown: Mapping[str, tuple[Table, Measured]]) -> str:
    """Return one table of a table's schedules: what each row reaches by the paper's protocol."""
    labels = list(dict.fromkeys(entry.label for table, _ in shown.values() for entry in table.entries))
    of = {entry.label: entry for table, _ in shown.values() for entry in table.entries}
    lines = []
    for label in labels:
        line = [label, paper_of(of[label])]
        for _, measured in shown.values():
            row = measured.rows.get(label)
            line.append("" if row is None else spread_of(row.protocol))
        if any(line[2:]):
            lines.append(line)
    return grid(["method", "paper", *shown], lines)


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def details(summary: str, text: str) -> str:
    """Return text that is folded away until it is asked for."""
    return f"<details markdown><summary>{summary}</summary>\n\n{text}\n</details>\n"
