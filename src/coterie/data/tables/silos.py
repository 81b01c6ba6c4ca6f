"""Makes a federation from sites' files: one CSV or Parquet file per site, or one file with a column of site names."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.errors import CoterieWarning, DataError
from coterie.data.federation import Federation, Split, split_client
from coterie.data.tables.infer import infer
from coterie.data.tables.preprocessing import apply_preprocessing, find_misfits, fit, read_like, targets
from coterie.data.tables.reading import MISSING, Table, canonical, read_table
from coterie.data.tables.schema import Schema, read_schema

__all__ = ["Silos", "agree_on_schema", "apply_preprocessing", "load_silos", "read_like", "sha256"]


@dataclass(frozen=True)
class Silos:
    """Which files to read, and how."""

    files: tuple[str, ...]
    target: str | None = None  # a column, or a comparison such as num>0; None: the schema's
    schema: str | None = None  # a file; None: inferred from the files
    columns: tuple[str, ...] = ()  # column names of files without a header
    missing: tuple[str, ...] = MISSING
    site_column: str | None = None
    group: str | None = None
    drop: tuple[str, ...] = ()
    regression: bool | None = None
    task: str | None = None  # the kind of target; None: classes or a number, as `regression` says
    horizons: tuple[float, ...] = ()  # of survival: the ends of the intervals; empty: by the times of events
    levels: tuple[str, ...] = ()  # of an ordinal target, in their order; empty: numbers in theirs


def load_silos(silos: Silos, *, validation: float = 0.1, test: float = 0.3, seed: int = 0) -> Federation:
    """Read, check, split, impute and standardise each site's rows, using only the site's own data.

    Raises:
        DataError: Files do not fit the schema, or a site has too few rows; the message lists all problems.
    """
    schema, sites = agree_on_schema(silos)
    problems: list[str] = []
    xs, ys, splits, records, groups, start = [], [], {}, {}, [], 0
    for client, whole in sites.items():
        table, y = _with_target(schema, whole)
        try:
            own = _groups(silos, table)
            split = _split(schema, client, table, y, validation, test, seed, own)
        except DataError as error:
            problems.append(f"'{table.file}': {error}")
            continue
        _warn_about_duplicates(client, table, split)
        records[client] = fit(schema, table, split.train.tolist())
        xs.append(apply_preprocessing(table, records[client]))
        ys.append(y)
        groups.append(own)
        splits[client] = Split(*(part + start for part in (split.train, split.validation, split.test)))
        start += len(table)
    if problems:
        raise DataError("\n".join(problems))
    target = schema.to_predict()
    y_pool = torch.from_numpy(np.concatenate(ys)).to(target.dtype)
    read = [*silos.files, *([silos.schema] if silos.schema else [])]
    return Federation(
        *("silos", torch.cat(xs), y_pool, splits, target.num_values),
        declared=target if schema.kind not in ("classification", "regression") else None,
        classes=schema.classes,
        preprocessing=records,
        groups=None if silos.group is None else np.concatenate([each for each in groups if each is not None]),
        files={file: sha256(file) for file in read},
    )


def agree_on_schema(silos: Silos) -> tuple[Schema, dict[str, Table]]:
    """Return the given schema, or one that fits all files, and each site's table.

    Raises:
        DataError: The files do not fit; the message lists all problems.
    """
    given = read_schema(silos.schema) if silos.schema else None
    columns = silos.columns or (given.names if given else ())
    missing = silos.missing if given is None else given.missing
    tables, problems = [], []
    for file in silos.files:
        try:
            tables.append(read_table(file, columns=columns, missing=missing))
        except DataError as error:
            problems.append(str(error))
    excluded = [name for name in (silos.site_column, silos.group, *silos.drop) if name is not None]
    if not problems and given is None:
        given = infer(
            tables,
            silos.target or "",
            excluded=excluded,
            regression=silos.regression,
            missing=missing,
            names=columns,
            task=silos.task,
            horizons=silos.horizons,
            levels=silos.levels,
        )
    if given is not None:
        inputs = {column.name for column in given.columns}
        problems += [
            f"'{name}' is an input of the schema, so --group and --drop cannot use it: make the schema with that flag"
            for name in excluded
            if name in inputs
        ]
        problems += [problem for table in tables for problem in find_misfits(given, table)]
        problems += [problem for table in tables for problem in _rows_without_name(silos, table)]
    if problems or given is None:
        raise DataError("\n".join(problems))
    return given, _sites(silos, tables)


def sha256(file: str | Path) -> str:
    """Return the checksum of a file."""
    try:
        with Path(file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror}") from error


def _rows_without_name(silos: Silos, table: Table) -> list[str]:
    """Return a message for rows without a site or group, if these columns are used."""
    problems = []
    for key, name in (("site_column", silos.site_column), ("group", silos.group)):
        if name is not None and name not in table.columns:
            problems.append(f"'{table.file}' has no column '{name}' ({key}); it has {', '.join(table.columns)}")
        elif name is not None and None in table.columns[name]:
            line = table.lines[table.columns[name].index(None)]
            problems.append(f"'{table.file}' line {line}: column '{name}' ({key}) is empty")
    return problems


def _sites(silos: Silos, tables: Sequence[Table]) -> dict[str, Table]:
    if silos.site_column is not None:
        names = [canonical(cell or "") for cell in tables[0].columns[silos.site_column]]
        rows: dict[str, list[int]] = {name: [] for name in dict.fromkeys(names)}
        for row, name in enumerate(names):
            rows[name].append(row)
        return {name: tables[0].take(own) for name, own in rows.items()}
    paths = [Path(table.file) for table in tables]
    stems = [path.stem for path in paths]
    if len(set(stems)) < len(stems):  # a/data.csv and b/data.csv
        stems = [f"{path.parent.name}-{path.stem}" for path in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{place}-{stem}" for place, stem in enumerate(stems, 1)]
    return dict(zip(stems, tables, strict=True))


def _with_target(schema: Schema, table: Table) -> tuple[Table, NDArray[np.float64]]:
    values = targets(schema, table)
    known = [row for row, value in enumerate(values) if value is not None]
    if len(known) < len(values):
        first = table.lines[next(row for row, value in enumerate(values) if value is None)]
        warnings.warn(
            f"'{table.file}': {len(values) - len(known)} rows have no {' and '.join(schema.target_columns([]))}, the "
            f"target, and are ignored (the first is line {first})",
            CoterieWarning,
            stacklevel=3,
        )
        table = table.take(known)
    return table, np.array([values[row] for row in known], np.float64)


def _groups(silos: Silos, table: Table) -> NDArray[np.int64] | None:
    """Return a number for each row's group; None if no column names one."""
    if silos.group is None:
        return None
    names = [canonical(cell or "") for cell in table.columns[silos.group]]
    return np.unique(np.array(names), return_inverse=True)[1].astype(np.int64)


def _split(
    schema: Schema,
    client: str,
    table: Table,
    y: NDArray[np.float64],
    validation: float,
    test: float,
    seed: int,
    groups: NDArray[np.int64] | None,
) -> Split:
    labels = schema.to_predict().strata(y)
    split = split_client(client, len(table), labels, validation, test, seed, groups=groups)
    if schema.kind in ("classification", "ordinal") and labels is not None and len(np.unique(labels)) < 2:
        raise DataError(
            f"client '{client}' has only one class: {schema.target} is {schema.classes[int(labels[0])]} in every row, "
            "so nothing can be learnt or measured there; leave it out"
        )
    return split


def _warn_about_duplicates(client: str, table: Table, split: Split) -> None:
    rows: list[tuple[Any, ...]] = list(zip(*table.columns.values(), strict=True))
    trained = {rows[row]: row for row in split.train}
    twice = [row for row in split.test if rows[row] in trained]
    if twice:
        first = f"line {table.lines[twice[0]]} repeats line {table.lines[trained[rows[twice[0]]]]}"
        warnings.warn(
            f"'{table.file}': {len(twice)} of {len(split.test)} test rows of client '{client}' are identical to "
            f"training rows ({first}), so its test results are optimistic; --group keeps a person's rows together",
            CoterieWarning,
            stacklevel=3,
        )
