"""Reads LEAF's JSON files: {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}.

A folder has the subfolders train/ and test/ (as LEAF's preprocess.sh writes them), or JSON files. Users are the natural
clients. FEMNIST: x has 784 numbers from 0 (ink) to 1 (paper), kept as bytes round(255 x). Sent140: x is [id, date,
query, user, text, origin]; the text becomes 25 tokens, see `tokens`. Others: x is a list of numbers.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie.data.download.locations import DatasetFiles
from coterie.data.pool import Pool

VOCABULARY_SIZE = 10_000  # token numbers; 0 is padding
WORDS_PER_TEXT = 25  # as in LEAF
_TEXT_COLUMN = 4  # of a Sent140 row
_WORD = re.compile(r"@\w+|https?://\S+|[#\w']+|[.,!?;]")
FEMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_LEAF_ADVICE = (
    "LEAF's repository (github.com/TalwalkarLab/leaf) makes it: in data/{0} run './preprocess.sh -s niid --sf 0.05 "
    "-k 10 -t sample', and copy its folders data/train and data/test into a folder {0}"
)
_MARKERS = ("train/*.json", "*.json", "data/train/*.json")
FILES = {
    "femnist": DatasetFiles("femnist", ("femnist",), ("*.npz", *_MARKERS), _LEAF_ADVICE.format("femnist")),
    "sent140": DatasetFiles("sent140", ("sent140",), _MARKERS, _LEAF_ADVICE.format("sent140")),
}


def read_pool(name: str, folder: Path, classes: tuple[str, ...] = ()) -> Pool:
    """Read all users with their training and test examples, in the order of their names."""
    folder = folder / "data" if (folder / "data" / "train").is_dir() else folder
    parts = {False: folder / "train", True: folder / "test"} if (folder / "train").is_dir() else {False: folder}
    found: dict[str, list[tuple[bool, np.ndarray, int]]] = {}
    for is_test, place in parts.items():
        for path in sorted(place.glob("*.json")):
            for user, inputs, labels in _read(path, name, len(classes) or None):
                mine = [(is_test, row, label) for row, label in zip(inputs, labels, strict=True)]
                found.setdefault(user, []).extend(mine)
    if not any(found.values()):
        raise DataError(f"'{folder}' has no LEAF data: its JSON files have no examples")
    users = sorted(user for user, rows in found.items() if rows)
    rows = [row for user in users for row in found[user]]
    shapes = {row[1].shape for row in rows}
    if len(shapes) > 1:
        raise DataError(f"'{folder}': inputs have different lengths: {', '.join(map(str, sorted(shapes)))}")
    x = np.stack([row[1] for row in rows])
    y = np.array([row[2] for row in rows], np.int64)
    owner = np.repeat(np.arange(len(users)), [len(found[user]) for user in users])
    published = np.array([row[0] for row in rows]) if len(parts) > 1 else None
    number = len(classes) or max(2, int(y.max()) + 1)
    return Pool(name, torch.from_numpy(x), torch.from_numpy(y), number, classes, owner, tuple(users), published)


def femnist(name: str, folder: Path) -> Pool:
    """Read FEMNIST: characters of 62 classes by writer."""
    return read_pool(name, folder, FEMNIST_CLASSES)


def sent140(name: str, folder: Path) -> Pool:
    """Read Sent140: tweets with their sentiment by author."""
    return read_pool(name, folder, ("negative", "positive"))


def tokens(text: str) -> np.ndarray:
    """Return the numbers of the first 25 words, padded with zeros, [25].

    A word's number is 1 + CRC-32(its lower-case UTF-8 bytes) mod 9,999: a vocabulary that needs no client to share its
    text. A word is a run of letters, digits, ' and #, or one of . , ! ? ; and all @names count as the word "@", all
    links as "http".
    """
    words = ["@" if w[0] == "@" else "http" if w.startswith("http") else w for w in _WORD.findall(text.lower())]
    numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY_SIZE - 1) for word in words[:WORDS_PER_TEXT]]
    return np.array(numbers + [0] * (WORDS_PER_TEXT - len(numbers)), np.int64)


def read_json(path: Path) -> Any:
    """Read a JSON file; errors give the position in the file."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not UTF-8 text: byte {error.start} (from 0) is {error.object[error.start]:#04x}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not valid JSON, perhaps cut off ({error}): get it again") from error


def _read(path: Path, name: str, classes: int | None) -> list[tuple[str, list[np.ndarray], list[int]]]:
    whole = read_json(path)
    users = whole.get("user_data") if isinstance(whole, dict) else None
    if not isinstance(users, dict):
        raise DataError(f"'{path}' is not a LEAF file: it has no table user_data")
    result = []
    for user, data in users.items():
        x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise DataError(f"'{path}', user '{user}': x and y are not two lists of the same length")
        where = f"'{path}', user '{user}'"
        result.append(
            (user, [_input(row, name, f"{where}, row {i}") for i, row in enumerate(x)], _labels(y, classes, where))
        )
    return result


def _labels(y: list[Any], classes: int | None, where: str) -> list[int]:
    for i, label in enumerate(y):
        if isinstance(label, bool) or not isinstance(label, int) or label < 0 or (classes and label >= classes):
            known = f"a class from 0 to {classes - 1}" if classes else "a class, 0 or more"
            raise DataError(f"{where}, row {i}: the label {label!r} is not {known}")
    return y


def _input(row: Any, name: str, where: str) -> np.ndarray:
    if name == "sent140":
        if not isinstance(row, list) or len(row) <= _TEXT_COLUMN or not isinstance(row[_TEXT_COLUMN], str):
            raise DataError(f"{where}: element {_TEXT_COLUMN} of x is not a text")
        return tokens(row[_TEXT_COLUMN])
    try:
        x = np.asarray(row, np.float32)
    except (TypeError, ValueError):
        raise DataError(f"{where}: x is not a list of numbers") from None
    if not np.isfinite(x).all():
        raise DataError(f"{where}: x has a missing or infinite number")
    if name != "femnist":
        return x
    if x.shape != (784,) or x.min() < 0 or x.max() > 1:
        raise DataError(f"{where}: x is not 784 numbers from 0 to 1")
    return np.rint(255 * x).astype(np.uint8).reshape(1, 28, 28)
