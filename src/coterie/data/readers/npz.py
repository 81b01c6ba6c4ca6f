"""Reads `.npz` files of NumPy arrays, never with pickled objects.

A file has x [n, ...], y [n] and, for natural clients, owner [n] (or client) with their names in owners. Or it has two
parts, as LEAF's FEMNIST is often kept: x_train, y_train, writer_train and x_test, y_test, writer_test, with writers.
Inputs of bytes are images, [n, height, width] or [n, channels, height, width]. Floating-point targets mean a
regression.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie.data.pool import Pool
from coterie.data.readers.idx import check_labels
from coterie.data.readers.packed import load_arrays

_OWNERS = ("owner", "client", "writer")


def read_pool(name: str, path: Path, classes: tuple[str, ...] = ()) -> Pool:
    """Read and check all examples; `classes` are the names of the classes, if they have any."""
    arrays = read_arrays(path)
    parts = ("",) if "x" in arrays else ("_train", "_test")
    missing = [f"{key}{part}" for part in parts for key in ("x", "y") if f"{key}{part}" not in arrays]
    if missing:
        raise DataError(f"'{path}' has no array {', '.join(missing)}; it has {', '.join(arrays) or 'none'}")
    xs, ys = ([arrays[f"{key}{part}"] for part in parts] for key in ("x", "y"))
    for part, x, y in zip(parts, xs, ys, strict=True):
        if x.ndim < 2 or x.dtype.kind not in "buif" or y.dtype.kind not in "buif":
            raise DataError(f"'{path}': x{part} must have one row of numbers per example, and y{part} must be numbers")
        if len(x) != len(y) or x.shape[1:] != xs[0].shape[1:]:
            raise DataError(f"'{path}': x{part} is {x.shape} and y{part} {y.shape}: they do not match")
    x, y = np.concatenate(xs), np.concatenate(ys)
    if not len(x):
        raise DataError(f"'{path}' has no examples")
    owner, owners = _owner(path, arrays, parts, len(x))
    is_test = np.arange(len(x)) >= len(xs[0]) if len(parts) > 1 else None
    number: int | None = None
    if y.dtype.kind == "f":
        y = y.astype(np.float32)
    else:
        y = y.astype(np.int64)
        number = len(classes) or max(2, int(y.max()) + 1)
        check_labels(y, number, str(path))
    if x.dtype == np.uint8:
        x = x[:, None] if x.ndim == 3 else x
    else:
        x = x.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
        if len(bad):
            raise DataError(f"'{path}': row {bad[0]} of x has a missing or infinite number; {len(bad)} row(s) have one")
    return Pool(name, torch.from_numpy(x), torch.from_numpy(y), number, classes, owner, owners, is_test)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file by name."""
    if path.suffix != ".npz":
        raise DataError(f"'{path}' is not an .npz file: save x and y together with numpy.savez")
    found = load_arrays(path)
    if isinstance(found, np.ndarray):
        raise DataError(f"'{path}' cannot be read as .npz: it is a single array. Save x and y with numpy.savez")
    return found


def _owner(
    path: Path, arrays: dict[str, np.ndarray], parts: tuple[str, ...], size: int
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    key = next((key for key in _OWNERS if all(f"{key}{part}" in arrays for part in parts)), None)
    if key is None:
        return None, ()
    whose = np.concatenate([arrays[f"{key}{part}"] for part in parts])
    if whose.shape != (size,):
        raise DataError(f"'{path}': {key} is {whose.shape}, but must have one owner per example, ({size},)")
    names = arrays.get(f"{key}s")
    if whose.dtype.kind in "bui" and names is not None:
        check_labels(whose, len(names), f"{path}, {key}")
        return whose.astype(np.int64), tuple(map(str, names))
    found, owner = np.unique(whose, return_inverse=True)
    return owner.reshape(-1).astype(np.int64), tuple(map(str, found))
