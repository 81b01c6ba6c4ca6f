"""Targets of tables that are more than one class or number: labels, times until an event, several targets at once.

`--target` then lists columns: `died,sepsis` (several labels), `days,died` (a time, and whether the event happened
then), or targets of different kinds. Each of these is a column or a comparison such as `stay>7`, or `days+died` for a
time and its event, and may say its kind and its weight in the loss: `died,stay:regression:0.1,days+died:survival`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError
from coterie.core.targets import Classes, Cox, Labels, Numbers, Ordered, Part, Several, Survival, Target
from coterie.core.targets.survival import usual_times
from coterie.data.tables.reading import Table, canonical, number, short
from coterie.data.tables.source import parse_target

OF_SEVERAL_COLUMNS = ("multilabel", "survival", "cox", "multitask")
TIMED = ("survival", "cox")
KINDS = ("classification", "regression", "ordinal", *TIMED)  # of one of several targets
NO_EVENT, EVENT = "0", "1"


@dataclass(frozen=True)
class Outcome:
    """One of the targets: `columns` are its column or comparison, or a time and its event."""

    name: str
    kind: str
    columns: tuple[str, ...]
    classes: tuple[str, ...] = ()
    times: tuple[float, ...] = ()  # of survival: the ends of the intervals
    weight: float = 1.0

    def problems(self, where: str) -> list[str]:
        """Return what is wrong with what a file says of it."""
        found = []
        if self.kind not in KINDS:
            found.append(f"{where}: kind = {self.kind!r}: choose from {', '.join(KINDS)}")
        elif len(self.columns) != (2 if self.kind in TIMED else 1):
            found.append(f"{where}: a {self.kind} needs {'a time and an event' if self.kind in TIMED else 'a column'}")
        elif self.kind in ("classification", "ordinal") and len(set(self.classes)) < 2:
            found.append(f"{where}: classes: at least two are needed")
        if not self.weight > 0:
            found.append(f"{where}: weight = {self.weight!r}: give a number above 0")
        return found

    def target(self) -> Target:
        """Return it as a target of its own."""
        if self.kind == "survival":
            return Survival(self.times)
        made: dict[str, Target] = {
            **{"classification": Classes(len(self.classes)), "regression": Numbers(()), "cox": Cox()},
        }
        return Ordered(len(self.classes)) if self.kind == "ordinal" else made[self.kind]


def parse_outcomes(text: str, task: str, columns: Sequence[str]) -> list[Outcome]:
    """Parse `--target` for a task of several columns; kinds that it does not say are empty.

    Raises:
        ConfigError: it cannot be read.
    """
    items = [text] if text in columns else [item.strip() for item in text.split(",")]
    if task in TIMED:
        parts = tuple(items) if len(items) == 2 else tuple(items[0].split("+")) if len(items) == 1 else ()
        if len(parts) != 2:
            raise ConfigError([f"target = '{text}': a {task} task needs a time and an event, as in --target days,died"])
        return [Outcome("+".join(parts), task, parts)]
    found, problems = list[Outcome](), list[str]()
    for item in items:
        words = [item] if item in columns else item.split(":")
        kind = words[1] if len(words) > 1 else ""
        weight = number(words[2]) if len(words) > 2 else 1.0
        if len(words) > 3 or weight is None or (kind and kind not in KINDS) or (task == "multilabel" and kind):
            problems.append(f"target '{item}': give column:kind:weight, with a kind of {', '.join(KINDS)}")
            continue
        two = words[0].split("+") if kind in TIMED and words[0] not in columns else [words[0]]
        found.append(Outcome(words[0], kind, tuple(two), weight=weight))
    if len({each.name for each in found}) < len(found):
        problems.append(f"target = '{text}': a column is named twice")
    if problems:
        raise ConfigError(problems)
    return found


def target_of(kind: str, outcomes: Sequence[Outcome]) -> Target:
    """Return the target that a schema's outcomes are together."""
    if kind == "multilabel":
        return Labels(tuple(each.name for each in outcomes))
    if kind == "multitask":
        return Several(tuple(Part(each.name, each.target(), each.weight, each.classes) for each in outcomes))
    return outcomes[0].target()


def values_of(outcome: Outcome, table: Table) -> NDArray[np.float64]:
    """Return an outcome's columns of `y`, [rows, 1 or 2], with NaN for what is missing. The table must fit."""
    found = []
    for place, text in enumerate(outcome.columns):
        wanted = parse_target(text, list(table.columns))
        cells = table.columns[wanted.column]
        is_number = outcome.kind == "regression" or (outcome.kind in TIMED and place == 0)
        classes = (NO_EVENT, EVENT) if outcome.kind in TIMED else outcome.classes
        index = {canonical(name): float(i) for i, name in enumerate(classes)}
        values: list[Any] = []
        for cell in cells:
            if cell is None:
                values.append(np.nan)
            elif wanted.sign:
                values.append(float(bool(wanted.holds(cell))))
            else:
                values.append(number(cell) if is_number else index[canonical(cell)])
        found.append(values)
    return np.array(found, np.float64).T


def misfits_of(outcome: Outcome, table: Table) -> list[tuple[str, list[int], str]]:
    """Return (column, rows, why) for cells that do not fit."""
    found = []
    for place, text in enumerate(outcome.columns):
        wanted = parse_target(text, list(table.columns))
        cells = table.columns[wanted.column]
        timed: tuple[str, ...] = () if place == 0 else (NO_EVENT, EVENT)
        classes = timed if outcome.kind in TIMED else outcome.classes
        known = set(map(canonical, classes))

        def fits(cell: str, wanted: Any = wanted, known: set[str] = known, timed: bool = outcome.kind in TIMED) -> bool:
            if wanted.sign:
                return wanted.holds(cell) is not None
            value = number(cell)
            return canonical(cell) in known if known else value is not None and (value >= 0 or not timed)

        wrong = [row for row, cell in enumerate(cells) if cell is not None and not fits(cell)]
        why = "it cannot be compared" if wanted.sign else ""
        why = why or (f"it must be one of {', '.join(classes)}" if classes else "it must be a number")
        if not classes and outcome.kind in TIMED:
            why = "a time must be a number from 0"
        found.append((wanted.column, wrong, f"target {outcome.name}: {why}"))
    return found


def times_of(outcome: Outcome, tables: Sequence[Table]) -> tuple[float, ...]:
    """Return the ends of intervals that suit the events in the tables, which must fit."""
    y = np.concatenate([values_of(outcome, table) for table in tables])
    return usual_times(y[~np.isnan(y).any(1)])


def described(outcome: Outcome) -> str:
    """Say in words what it is."""
    what = {
        "classification": f"{len(outcome.classes)} classes ({', '.join(outcome.classes)})",
        "ordinal": f"{len(outcome.classes)} levels in order ({', '.join(outcome.classes)})",
        "regression": "a number",
        "cox": "a time and its event, by Cox's likelihood",
    }
    spans = f"a time and its event, in {len(outcome.times)} intervals up to {short(f'{(outcome.times or (0,))[-1]:g}')}"
    return f"{outcome.name}: {what.get(outcome.kind, spans)}"
