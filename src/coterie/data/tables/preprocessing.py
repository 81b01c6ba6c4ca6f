"""Turns a site's table into the inputs of a model, using only what the site's own training rows say.

A missing number becomes the median of the site's training rows, and numbers are standardised by their mean and standard
deviation. A missing category becomes the most frequent one, and a category becomes one feature for each category of the
schema. A column that the site never filled in is 0 throughout, the mean of a standardised column.

What is learnt is a record in plain JSON. Training uses nothing but the record, so a later prediction from a file sees
the same inputs to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.tables.outcomes import TIMED, misfits_of, values_of
from coterie.data.tables.reading import Table, canonical, number, read_table, short
from coterie.data.tables.schema import Column, Schema, schema_from_dict
from coterie.data.tables.source import parse_target

MAX_CELLS_SHOWN = 3  # wrong cells of one column that a message quotes


def find_misfits(schema: Schema, table: Table, *, target: bool = True) -> list[str]:
    """Return a message for everything in a file that does not fit the schema, with column, line and reason."""
    problems = []
    for column in schema.columns:
        if column.name not in table.columns:
            problems.append(f"'{table.file}' has no column '{column.name}'; it has {', '.join(table.columns)}")
        elif column.kind == "number":
            wrong = _cells(table, column.name, lambda cell: number(cell) is None)
            problems += _describe(table, column.name, wrong, "the schema says number")
        else:
            known = set(column.categories)
            wrong = _cells(table, column.name, lambda cell, known=known: canonical(cell) not in known)
            problems += _describe(table, column.name, wrong, f"the schema allows {', '.join(column.categories)}")
    return [*problems, *_target_misfits(schema, table)] if target else problems


def _target_misfits(schema: Schema, table: Table) -> list[str]:
    lacking = [name for name in schema.target_columns(list(table.columns)) if name not in table.columns]
    if lacking:
        return [
            f"'{table.file}' has no column '{name}', the target; it has {', '.join(table.columns)}" for name in lacking
        ]
    if schema.outcomes:
        found = [each for outcome in schema.outcomes for each in misfits_of(outcome, table)]
        return [line for column, rows, why in found for line in _describe(table, column, rows, why)]
    wanted = parse_target(schema.target, list(table.columns))
    if schema.kind == "regression":
        wrong = _cells(table, wanted.column, lambda cell: number(cell) is None)
        return _describe(table, wanted.column, wrong, "the target must be a number")
    if wanted.sign:
        wrong = _cells(table, wanted.column, lambda cell: wanted.holds(cell) is None)
        return _describe(table, wanted.column, wrong, f"it cannot be compared as {schema.target} says")
    known = set(map(canonical, schema.classes))
    wrong = _cells(table, wanted.column, lambda cell: canonical(cell) not in known)
    return _describe(table, wanted.column, wrong, f"the schema's classes are {', '.join(schema.classes)}")


def targets(schema: Schema, table: Table) -> list[Any]:
    """Return each row's class number, its value in a regression, or a row of `y`; None if it is missing.

    The table must fit. Of several targets, some may be missing, which are NaN.
    """
    if schema.outcomes:
        y = np.concatenate([values_of(outcome, table) for outcome in schema.outcomes], 1)
        missing = np.isnan(y).any(1) if schema.kind in TIMED else np.isnan(y).all(1)
        return [None if gone else row for gone, row in zip(missing.tolist(), y, strict=True)]
    wanted = parse_target(schema.target, list(table.columns))
    cells = table.columns[wanted.column]
    if schema.kind == "regression":
        return [None if cell is None else number(cell) for cell in cells]
    if wanted.sign:
        return [None if cell is None else float(bool(wanted.holds(cell))) for cell in cells]
    place = {canonical(name): float(i) for i, name in enumerate(schema.classes)}
    return [None if cell is None else place[canonical(cell)] for cell in cells]


def fit(schema: Schema, table: Table, train: Sequence[int]) -> dict[str, Any]:
    """Learn a site's record from its training rows only; the table must fit the schema."""
    own = table.take(train)
    columns = {column.name: _fit_column(column, own.columns[column.name]) for column in schema.columns}
    return {"format": 1, "schema": schema.to_dict(), "columns": columns, "features": list(schema.features)}


def _fit_column(column: Column, cells: Sequence[str | None]) -> dict[str, Any]:
    filled = [cell for cell in cells if cell is not None]
    record: dict[str, Any] = {"kind": column.kind, "missing": len(cells) - len(filled)}
    if column.kind == "category":
        count = Counter(map(canonical, filled))
        mode = max(column.categories, key=lambda each: count[each]) if filled else None
        return {**record, "mode": mode, "categories": list(column.categories)}
    values = np.array([number(cell) for cell in filled], np.float64)
    if not len(values):
        return {**record, "median": 0.0, "mean": 0.0, "std": 1.0}
    median = float(np.median(values))
    imputed = np.concatenate([values, np.full(record["missing"], median)])
    std = float(imputed.std())
    return {**record, "median": median, "mean": float(imputed.mean()), "std": std if std > 0 else 1.0}


def apply_preprocessing(table: Table, preprocessing: Mapping[str, Any]) -> Tensor:
    """Return the inputs of the site's model, [rows, features] float32; raise `DataError` if the table does not fit."""
    schema = schema_from_dict(preprocessing["schema"], "preprocessing")
    problems = find_misfits(schema, table, target=False)
    if problems:
        raise DataError("\n".join(problems))
    parts = []
    for column in schema.columns:
        cells, learnt = table.columns[column.name], preprocessing["columns"][column.name]
        if column.kind == "number":
            values = np.array([learnt["median"] if cell is None else number(cell) for cell in cells], np.float64)
            parts.append(((values - learnt["mean"]) / learnt["std"])[:, None])
        else:
            chosen = np.array([learnt["mode"] if cell is None else canonical(cell) for cell in cells], object)
            parts.append(np.stack([chosen == category for category in column.categories], 1).astype(np.float64))
    with np.errstate(over="ignore"):  # reported below
        x = np.concatenate(parts, 1).astype(np.float32)
    if not np.isfinite(x).all():
        row, place = (int(index[0]) for index in np.nonzero(~np.isfinite(x)))
        name = schema.features[place]
        raise DataError(f"'{table.file}' line {table.lines[row]}, column '{name}': the number is too large")
    return torch.from_numpy(x)


def read_like(path: str | Path, preprocessing: Mapping[str, Any]) -> Table:
    """Read a file as the site's own was read: with the same column names and markers of missing values."""
    schema = schema_from_dict(preprocessing["schema"], "preprocessing")
    return read_table(path, columns=schema.names, missing=schema.missing)


def _cells(table: Table, column: str, wrong: Any) -> list[int]:
    return [row for row, cell in enumerate(table.columns[column]) if cell is not None and wrong(cell)]


def _describe(table: Table, column: str, rows: Sequence[int], why: str) -> list[str]:
    cells = table.columns[column]
    if not rows:
        return []
    where = ", ".join(f"line {table.lines[row]} ('{short(cells[row] or '')}')" for row in rows[:MAX_CELLS_SHOWN])
    more = f" and {len(rows) - MAX_CELLS_SHOWN} more" if len(rows) > MAX_CELLS_SHOWN else ""
    return [f"'{table.file}' column '{column}', {where}{more}: {why}"]
