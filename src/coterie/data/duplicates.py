"""Finds identical examples: a test example that was also trained on measures memory, not learning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import rng
from coterie.core.errors import CoterieWarning
from coterie.data.federation import Index, Split

_ROWS_PER_CHUNK = 4096  # hashed at once


def first_equal(x: Tensor) -> Index:
    """Return for each example the position of the first identical one, [n]; its own position if it is the first."""
    rows = x.detach().cpu().contiguous().flatten(1).numpy().view(np.uint8)
    key = _hashes(rows)
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(key[order]) != 0)) if len(key) else np.zeros(0, np.int64)
    first = np.arange(len(rows), dtype=np.int64)
    stops = np.append(starts[1:], len(rows))
    for several in np.flatnonzero(stops - starts > 1):
        _compare_bytes(rows, order[starts[several] : stops[several]], first)
    return first


def _compare_bytes(rows: NDArray[np.uint8], members: Index, first: Index) -> None:
    """Compare `members`, whose hashes are equal, byte by byte, and set their `first`."""
    while len(members) > 1:
        same = (rows[members] == rows[members[0]]).all(1)
        first[members[same]] = members[0]
        members = members[~same]


def _hashes(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Hash each row: a random linear function of its 8-byte words, modulo 2^64."""
    words = -(-rows.shape[1] // 8)
    factor = rng.generator(0, "hash").integers(2**64, size=words, dtype=np.uint64) | np.uint64(1)
    key = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _ROWS_PER_CHUNK):
        piece = rows[start : start + _ROWS_PER_CHUNK]
        if piece.shape[1] % 8:
            piece = np.pad(piece, ((0, 0), (0, -piece.shape[1] % 8)))
        key[start : start + _ROWS_PER_CHUNK] = piece.view(np.uint64) @ factor
    return key


def warn_about_leaks(name: str, first: Index, clients: Mapping[str, Split], advice: str) -> None:
    """Warn if test examples are identical to an example that any client trains on; `advice` says what to do."""
    trained = np.unique(first[_concatenated(split.train for split in clients.values())])
    leaked = {client: int(np.isin(first[split.test], trained).sum()) for client, split in clients.items()}
    total = sum(leaked.values())
    if total:
        most = max(leaked, key=lambda client: leaked[client])
        warnings.warn(
            f"{name}: {total} of {sum(len(split.test) for split in clients.values())} test examples are identical to a "
            f"training example (most of them, {leaked[most]}, at client '{most}'): {advice}",
            CoterieWarning,
            stacklevel=2,
        )


def _concatenated(parts: Iterable[Index]) -> Index:
    return np.concatenate([np.zeros(0, np.int64), *parts])
