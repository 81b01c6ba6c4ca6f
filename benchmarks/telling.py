"""What every benchmark ends with: its table, its targets, the exit code, and all of it as JSON for `all.py`.

    {"title", "columns", "rows", "notes": [sentence],
     "targets": [{"name", "value", "target", "at_most", "reached"}],
     "plot": {"title", "log", "bars": [{"label", "value", "target", "at_most"}]},    a target may be null
     "tables": [{"title", "columns", "rows"}]}                                      what is shown beside

A value reaches its target if it is at least that or, with `at_most`, at most. With --quick nothing is judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Sequence[Any]
Told = dict[str, Any]


def parser(doc: str | None, json: bool = True) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    found.add_argument("--quick", action="store_true", help="a smoke test: small, and no target is judged")
    if json:
        found.add_argument("--json", type=Path, help="write the table and the targets here, too", metavar="FILE")
    return found


def target(name: str, value: float, limit: float, *, at_most: bool = False) -> Told:
    reached = value <= limit if at_most else value >= limit
    return {"name": name, "value": value, "target": limit, "at_most": at_most, "reached": reached}


def bar(label: str, value: float, limit: float | None = None, *, at_most: bool = False) -> Told:
    return {"label": label, "value": value, "target": limit, "at_most": at_most}


def plot(title: str, bars: Sequence[Told], *, log: bool = False) -> Told:
    return {"title": title, "log": log, "bars": list(bars)}


def by_target(targets: Sequence[Told]) -> Told:
    """Of targets in different units: each value over its target."""
    bars = [bar(each["name"], each["value"] / each["target"], 1.0, at_most=each["at_most"]) for each in targets]
    return plot("value over its target", bars, log=True)


def cell(value: Any) -> str:
    """A number for people: three digits that count."""
    if isinstance(value, int):
        return f"{value:,}"
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}") if isinstance(value, float) else str(value)


def tell(
    asked: argparse.Namespace,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    targets: Sequence[Told],
    drawn: Told,
    *,
    tables: Sequence[Told] = (),
    notes: Sequence[str] = (),
) -> int:
    """Print, write what --json asks for, and return the exit code: 1 if a target was missed."""
    told = {"title": title, "columns": list(columns), "rows": list(rows), "targets": list(targets), "plot": drawn}
    told |= {"tables": list(tables), "notes": list(notes)}
    console = Console(width=max(Console().width, 150))
    for each in (told, *tables):
        table = Table(*each["columns"], title=each["title"], title_justify="left")
        for row in each["rows"]:
            table.add_row(*map(cell, row))
        console.print(table)
    print(*notes, sep="\n", end="\n" if notes else "")
    for each in targets:
        judged = "quick" if asked.quick else "yes" if each["reached"] else "no"
        print(f"{each['name']}: {cell(each['value'])} target {limit(each)} reached {judged}")
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(not asked.quick and not all(each["reached"] for each in targets))


def limit(judged: Told) -> str:
    return f"{'<=' if judged['at_most'] else '>='} {cell(float(judged['target']))}"
