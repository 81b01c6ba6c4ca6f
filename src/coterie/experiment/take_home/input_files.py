"""Read rows for a client's model, prepared as in training, from CSV with a header, .npy, or .npz with an array x."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import DataError
from coterie.data.readers.packed import load_arrays
from coterie.data.tables.preprocessing import apply_preprocessing, read_like
from coterie.data.tables.reading import Table, read_table
from coterie.data.tables.schema import schema_from_dict
from coterie.experiment.take_home.load import target_of
from coterie.storage import files


def read_inputs(path: Path, client: Path, about: dict[str, Any]) -> Tensor:
    """Read inputs for a client's model.

    Args:
        path: the file.
        client: the client's folder, which says how its table was prepared.
        about: the content of its model.json.

    Returns:
        Inputs [rows, ...].

    Raises:
        DataError: the file cannot be read, or does not suit the model.
    """
    record = client / "preprocessing.json"
    if path.suffix.lower() in (".npy", ".npz"):
        return in_type(_checked(path, _array(path, "x"), about), about, path)
    if record.exists():
        preprocessing = files.read_json(record)
        return apply_preprocessing(_read_like(path, preprocessing), preprocessing)
    header, cells, lines = read_csv(path)
    return in_type(_features(path, header, cells, lines, about), about, path)


def in_type(x: Tensor, about: dict[str, Any], where: Any) -> Tensor:
    """Return inputs as the type of numbers that the model takes: tokens are whole numbers.

    Raises:
        DataError: it takes whole numbers, and some are not.
    """
    if about.get("input_dtype", "float32") == "float32":
        return x.float()
    whole = x.long()
    if bool((whole != x).any()):
        raise DataError(f"'{where}': this model takes whole numbers (tokens), and some of the inputs are not")
    return whole


def _read_like(path: Path, preprocessing: dict[str, Any]) -> Table:
    """Read a table as the site's own was read, except that the target may be absent and a header present."""
    schema = schema_from_dict(preprocessing["schema"], "preprocessing")
    if not schema.names or path.suffix.lower() in (".parquet", ".pq") or not path.is_file():
        return read_like(path, preprocessing)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = [cell.strip() for cell in file.readline().split(",")]
    if {column.name for column in schema.columns} & set(first):
        return read_table(path, missing=schema.missing)
    target = schema.target_columns(schema.names)
    inputs = [name for name in schema.names if name not in target]
    return read_table(path, columns=inputs if len(first) == len(inputs) else schema.names, missing=schema.missing)


def read_examples(path: Path, target: str | None, about: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Read the examples of a new site.

    Args:
        path: CSV with a target column, or .npz with arrays x and y.
        target: the name of the target column; by default `y` or, if there is none, the last column.
        about: the content of a model.json of the run. Classes may be given by name or by number.

    Returns:
        Inputs and targets.

    Raises:
        DataError: the file cannot be read, or does not suit the run.
    """
    if path.suffix.lower() == ".npz":
        x, y = _checked(path, _array(path, "x"), about), _array(path, "y")
        if len(x) != len(y):
            raise DataError(f"'{path}': {len(x)} rows of x, but {len(y)} of y")
        return x, _targets(path, y, about)
    if path.suffix.lower() == ".npy":
        raise DataError(f"'{path}' holds inputs only: give a .npz with arrays x and y, or a CSV with a target column")
    header, cells, lines = read_csv(path)
    name = target or ("y" if "y" in header else header[-1])
    if target is None and name in {f"x{i + 1}" for i in range(math.prod(about["input_shape"]))}:
        raise DataError(f"'{path}' has inputs only: name the column to predict with --target, or call it y")
    if name not in header:
        raise DataError(f"'{path}' has no column '{name}' (the target); it has {_some(header)}")
    place = header.index(name)
    wanted = [row.pop(place) for row in cells]
    x = _features(path, [*header[:place], *header[place + 1 :]], cells, lines, about)
    names = {each: i for i, each in enumerate(about.get("classes") or [])}
    values = [_number(path, cell, lines[i], name, names) for i, cell in enumerate(wanted)]
    return x, _targets(path, np.array(values), about)


def read_csv(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header, the cells of each row, and the rows' line numbers; raise `DataError` for a malformed file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{path}' cannot be read as CSV: {error}") from error
    if len(rows) < 2:
        raise DataError(f"'{path}' has no rows: give a header with the names of the columns, and a line per row")
    header = rows[0][1]
    if all(is_number(cell) for cell in header):
        raise DataError(f"'{path}' has no header: its first line should name the columns, but holds numbers")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise DataError(f"'{path}' has more than one column called {_some(twice)}")
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"'{path}' line {line} has {len(row)} cells, but the header has {len(header)} columns")
    return header, [row for _, row in rows[1:]], [line for line, _ in rows[1:]]


def _features(path: Path, header: list[str], cells: list[list[str]], lines: list[int], about: dict[str, Any]) -> Tensor:
    """Return columns x1, x2, ... by name, in whatever order; if named otherwise, all columns in their order."""
    width = math.prod(about["input_shape"])
    names = [f"x{i + 1}" for i in range(width)]
    missing = [name for name in names if name not in header]
    if len(missing) == 0:
        order = [header.index(name) for name in names]
    elif len(missing) < width:
        raise DataError(f"'{path}' lacks the columns {_some(missing)} of x1 to x{width}")
    elif len(header) != width:
        raise DataError(
            f"'{path}' has {len(header)} columns ({_some(header)}), but this model was trained on {width} inputs: give "
            "them in the order of training, or call them x1, x2, ..."
        )
    else:
        order = list(range(width))
    values = [[_number(path, row[i], line, header[i]) for i in order] for row, line in zip(cells, lines, strict=True)]
    return torch.tensor(values, dtype=torch.float32).reshape(-1, *about["input_shape"])


def _array(path: Path, name: str) -> np.ndarray:
    loaded = load_arrays(path)
    if isinstance(loaded, np.ndarray):
        return loaded
    if name not in loaded:
        raise DataError(f"'{path}' has no array '{name}'; it has {_some(list(loaded))}")
    return loaded[name]


def _checked(path: Path, x: np.ndarray, about: dict[str, Any]) -> Tensor:
    shape = tuple(about["input_shape"])
    if x.shape[1:] != shape or not len(x) or x.dtype.kind not in "biuf":
        raise DataError(f"'{path}': x is {x.dtype} {x.shape}; this model takes numbers of shape (rows, *{shape})")
    tensor = torch.from_numpy(x.astype(np.float32))
    bad = ~torch.isfinite(tensor.flatten(1)).all(1)
    if bool(bad.any()):
        raise DataError(f"'{path}' row {int(bad.nonzero()[0])} of x has a missing or infinite value")
    return tensor


def _targets(path: Path, y: np.ndarray, about: dict[str, Any]) -> Tensor:
    if about["kind"] == "regression":
        return torch.from_numpy(y.astype(np.float32))
    target = target_of(about)
    if target.shape and about["kind"] != "classification":
        if y.shape[1:] != target.shape or y.dtype.kind not in "biuf":
            raise DataError(
                f"'{path}': {target.words} needs a .npz file whose y has the shape (rows, {target.shape[0]}), or a "
                "table like those of the run's sites"
            )
        return torch.from_numpy(y.astype(np.float32))
    if y.dtype.kind not in "biu" and not (y.dtype.kind == "f" and np.array_equal(y, np.floor(y))):
        raise DataError(f"'{path}': the classes are {_some(class_names(about))}, or their numbers from 0")
    bad = np.flatnonzero((y < 0) | (y >= about["num_classes"]))
    if len(bad):
        last = about["num_classes"] - 1
        raise DataError(f"'{path}' row {bad[0] + 1} has class {y.flat[bad[0]]:g}; classes are numbered 0 to {last}")
    return torch.from_numpy(y.astype(np.int64))


def class_names(about: dict[str, Any]) -> list[str]:
    """Return the names of the classes, or their numbers if they have none."""
    return list(about.get("classes") or map(str, range(about["num_classes"] or 0)))


def _number(path: Path, cell: str, line: int, column: str, names: dict[str, int] | None = None) -> float:
    if names and cell in names:
        return float(names[cell])
    if not is_number(cell):
        what = "is empty" if not cell else f"holds '{cell[:40]}', not a finite number"
        also = f" (or one of {_some(list(names))})" if names else ""
        raise DataError(f"'{path}' line {line}, column '{column}' {what}{also}")
    return float(cell)


def is_number(cell: str) -> bool:
    """Return whether a cell is a finite number."""
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _some(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
