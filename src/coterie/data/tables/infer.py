"""Infers a schema from files: which columns are numbers, which are categories, and what the target is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from coterie.core.errors import CoterieWarning, DataError
from coterie.data.tables.outcomes import OF_SEVERAL_COLUMNS, Outcome, misfits_of, parse_outcomes, times_of
from coterie.data.tables.reading import MISSING, Table, canonical, number, short
from coterie.data.tables.schema import Column, Schema
from coterie.data.tables.source import Source, parse_target

MAX_CATEGORIES = 50  # a column with more different words is text
MAX_RARE_CATEGORIES = 10  # more than these must occur twice on average to be categories
MAX_DECIMAL_CLASSES = 20  # a target with more different decimal numbers is a regression


def infer(
    tables: Sequence[Table],
    target: str,
    *,
    excluded: Sequence[str] = (),
    regression: bool | None = None,
    missing: Sequence[str] = MISSING,
    names: Sequence[str] = (),
    task: str | None = None,
    horizons: Sequence[float] = (),
    levels: Sequence[str] = (),
) -> Schema:
    """Infer a schema that fits all tables.

    A column is a number if every cell is one, else a category if it has few different words. Free text, and numbers
    mixed with a few words, are refused.

    Args:
        tables: The sites' tables.
        target: The column to predict, or a comparison such as num>0.
        excluded: Columns that are not inputs.
        regression: Whether the target is a number to predict; by default decided from its values.
        missing: Cells that mean a missing value.
        names: The column names of files without a header.
        task: The kind of target; None: classes or a number.
        horizons: Of survival, the ends of the intervals; by default such that they have as many events each.
        levels: Of an ordinal target, the levels in their order; by default numbers in theirs.

    Raises:
        DataError: The tables do not fit together; the message lists all problems.
    """
    problems: list[str] = []
    everywhere = list(dict.fromkeys(name for table in tables for name in table.columns))
    outcomes = parse_outcomes(target, task, everywhere) if task in OF_SEVERAL_COLUMNS else []
    texts = [text for each in outcomes for text in each.columns] or [target]
    to_predict = [parse_target(text, everywhere).column for text in texts]
    for name in dict.fromkeys([*to_predict, *excluded, *everywhere]):
        lacking = [table.file for table in tables if name not in table.columns]
        if len(lacking) == len(tables):
            problems.append(f"no file has a column '{name}'; there are {', '.join(everywhere)}")
        elif lacking and (name not in excluded):
            problems.append(
                f"column '{name}' is not in {_files(lacking)}: add it there (empty cells are missing values), "
                f"or leave it out everywhere with --drop {name}"
            )
    columns = []
    for name in everywhere:
        if name not in to_predict and name not in excluded:
            column, problem = _infer_column(name, [table for table in tables if name in table.columns])
            columns.append(column)
            problems += problem
    if not columns and not problems:
        problems.append("there are no inputs left: every column is the target, the group, the site, or dropped")
    regression = {"regression": True, None: regression}.get(task, False)
    kind, classes, more = (str(task), (), []) if outcomes else _infer_one(target, tables, regression, task, levels)
    if problems or more:
        raise DataError("\n".join([*problems, *more]))
    if outcomes:
        outcomes = _infer_outcomes(outcomes, tables, str(task), horizons, levels)
    for column in columns:
        if column.kind == "number" and all(_is_identifier(table.columns[column.name]) for table in tables):
            warnings.warn(
                f"column '{column.name}' looks like an identifier (a different whole number in every row) but is used "
                f"as an input: --drop {column.name} removes it, --group {column.name} keeps a person's rows together",
                CoterieWarning,
                stacklevel=2,
            )
    return Schema(target, kind, tuple(columns), classes, tuple(missing), tuple(names), tuple(outcomes))


def _infer_column(name: str, tables: Sequence[Table]) -> tuple[Column, list[str]]:
    cells = [(table, row, cell) for table in tables for row, cell in enumerate(table.columns[name]) if cell is not None]
    odd = [(table, row, cell) for table, row, cell in cells if number(cell) is None]
    if not odd:
        return Column(name, "number"), []
    words = sorted({canonical(cell) for _, _, cell in cells}, key=_order)
    table, row, cell = odd[0]
    if len(odd) < len(cells) / 2 and len(words) > len({cell for _, _, cell in odd}) + 2:
        return Column(name, "number"), [
            f"column '{name}' has numbers, except in {len(odd)} of {len(cells)} cells, the first in '{table.file}' "
            f"line {table.lines[row]}: '{short(cell)}'. Correct it, add it to --missing, or remove the column with "
            f"--drop {name}"
        ]
    if len(words) > MAX_CATEGORIES or len(words) > max(MAX_RARE_CATEGORIES, len(cells) / 2):
        return Column(name, "category"), [
            f"column '{name}' is text ({len(words)} different values in {len(cells)} cells, such as '{short(cell)}' in "
            f"'{table.file}' line {table.lines[row]}): remove it with --drop {name}"
        ]
    return Column(name, "category", tuple(words)), []


def _is_identifier(cells: Sequence[str | None]) -> bool:
    different = {canonical(cell) for cell in cells if cell is not None}
    return len(cells) >= 20 and len(different) == len(cells) and all(each.lstrip("-").isdigit() for each in different)


def _infer_one(
    text: str, tables: Sequence[Table], regression: bool | None, task: str | None, levels: Sequence[str]
) -> tuple[str, tuple[str, ...], list[str]]:
    """Return the kind of one target, its classes, and problems."""
    wanted = parse_target(text, list(dict.fromkeys(name for table in tables for name in table.columns)))
    kind, classes, problems = _infer_target(wanted, tables, regression)
    if task != "ordinal" or problems:
        return kind, classes, problems
    if levels:
        new = [name for name in classes if canonical(name) not in set(map(canonical, levels))]
        if new:
            problems = [f"target '{text}' has values that are not among the levels: {', '.join(new[:5])}"]
        return "ordinal", tuple(map(canonical, levels)), problems
    words = [name for name in classes if number(name) is None]
    if words and not wanted.sign:
        problems = [
            f"target '{text}' has levels in words ({', '.join(words[:5])}): say their order with --levels a,b,c"
        ]
    return "ordinal", classes, problems


def _infer_outcomes(
    given: Sequence[Outcome], tables: Sequence[Table], task: str, horizons: Sequence[float], levels: Sequence[str]
) -> list[Outcome]:
    """Complete targets by what the tables hold; raise `DataError` if these do not fit."""
    found, problems = list[Outcome](), list[str]()
    for each in given:
        kind, classes = each.kind, tuple[str, ...]()
        if kind in ("", "classification", "ordinal", "regression"):
            regression = False if task == "multilabel" else {"": None, "regression": True}.get(kind, False)
            kind, classes, more = _infer_one(each.columns[0], tables, regression, kind or None, levels)
            problems += more
            if task == "multilabel" and len(classes) > 2:
                problems.append(f"target '{each.name}' has {len(classes)} values: a label holds or does not, as 0 or 1")
        made = replace(each, kind=kind, classes=classes)
        wrong = [] if problems else [(t, *bad) for t in tables for bad in misfits_of(made, t) if bad[1]]
        for table, column, rows, why in wrong[:3]:
            cell = short(table.columns[column][rows[0]] or "")
            problems.append(f"'{table.file}' column '{column}', line {table.lines[rows[0]]} ('{cell}'): {why}")
        if kind == "survival" and not problems:
            made = replace(made, times=tuple(horizons) or times_of(made, tables))
        found.append(made)
    if problems:
        raise DataError("\n".join(problems))
    return found


def _infer_target(
    target: Source, tables: Sequence[Table], regression: bool | None
) -> tuple[Literal["classification", "regression"], tuple[str, ...], list[str]]:
    cells = [
        (table, row, cell)
        for table in tables
        for row, cell in enumerate(table.columns.get(target.column, []))
        if cell is not None
    ]
    if not cells:
        return "regression", (), []  # reported already, or reported with the rows
    if target.sign:
        if regression:
            return "regression", (), [f"target '{target.classes()[1]}' is true or false, so it cannot be a regression"]
        return "classification", target.classes(), []
    odd = [(table, row, cell) for table, row, cell in cells if number(cell) is None]
    values = {canonical(cell) for _, _, cell in cells}
    decimal = any("." in value or "e" in value for value in values)
    if regression or (regression is None and not odd and decimal and len(values) > MAX_DECIMAL_CLASSES):
        problems = [
            f"target '{target.column}' must be a number, but '{table.file}' line {table.lines[row]} has '{short(cell)}'"
            for table, row, cell in odd[:3]
        ]
        return "regression", (), problems
    if len(values) > MAX_CATEGORIES and regression is None:
        what = "text" if odd else "whole numbers"
        return (
            "classification",
            (),
            [
                f"target '{target.column}' has {len(values)} different values ({what}): add --regression if it is a "
                "number to predict, or --no-regression if they are classes"
            ],
        )
    if len(values) < 2:
        return (
            "classification",
            (),
            [f"target '{target.column}' is {next(iter(values))} in every row: a classification needs two classes"],
        )
    return "classification", tuple(sorted(values, key=_order)), []


def _order(value: str) -> tuple[bool, float, str]:
    as_number = number(value)
    return as_number is None, as_number or 0.0, value


def _files(files: Sequence[str]) -> str:
    return ", ".join(f"'{file}'" for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
