"""The idx format of MNIST, Fashion-MNIST and EMNIST: a magic number, the shape, and bytes; plain, gzipped, or (EMNIST)
gzipped in a zip archive. A file that is missing or damaged is named, with what to do."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch

from coterie.data.locations import Files
from coterie.data.pool import Pool
from coterie.errors import DataError

MOST_BYTES = 2**33  # no published file is larger
_DIGITS = "0123456789"
_CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CLASSES = {
    "mnist": tuple(_DIGITS),
    "fashion-mnist": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "emnist-byclass": tuple(_DIGITS + _CAPITALS + _CAPITALS.lower()),
    "emnist-balanced": tuple(_DIGITS + _CAPITALS + "abdefghnqrt"),  # letters of one shape in both cases are one class
}
_FOUR = "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, ..."
_EMNIST = "'coterie data get emnist' fetches NIST's archive gzip.zip (562 MB)"
FILES = {
    "mnist": Files(
        "mnist",
        ("mnist", "MNIST/raw"),
        ("train-images-idx3-ubyte*",),
        f"'coterie data get mnist' fetches it; or copy {_FOUR}",
    ),
    "fashion-mnist": Files(
        "fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        ("train-images-idx3-ubyte*",),
        "'coterie data get fashion-mnist' fetches it; or install Debian's package dataset-fashion-mnist, or copy "
        + _FOUR,
        ("/usr/share/datasets/fashion-mnist",),
    ),
    **{
        name: Files(
            name,
            ("emnist", "emnist/gzip", "EMNIST/raw"),
            (f"{name}-train-images-idx3-ubyte*", "gzip.zip"),
            f"{_EMNIST}; or copy its {name}-train-images-idx3-ubyte.gz and the three beside it",
        )
        for name in ("emnist-byclass", "emnist-balanced")
    },
}


def read_pool(name: str, folder: Path) -> Pool:
    """The official training and test files laid end to end; images [n, 1, height, width]."""
    prefix, parts = (f"{name}-", ("train", "test")) if name.startswith("emnist") else ("", ("train", "t10k"))
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for part in parts:
        found = read_idx(folder / f"{prefix}{part}-images-idx3-ubyte.gz", 3)
        wanted = read_idx(folder / f"{prefix}{part}-labels-idx1-ubyte.gz", 1)
        if len(found) != len(wanted):
            raise DataError(f"'{folder}': {len(found)} {part} images but {len(wanted)} labels")
        if found.shape[1:] != (images[0].shape[1:] if images else found.shape[1:]):
            raise DataError(f"'{folder}': {part} images are {found.shape[1:]} pixels, the others {images[0].shape[1:]}")
        check_labels(wanted, len(CLASSES[name]), f"{folder / f'{prefix}{part}-labels-idx1-ubyte.gz'}")
        images.append(found)
        labels.append(wanted)
    x = np.empty((sum(map(len, images)), 1, *images[0].shape[1:]), np.uint8)
    start = 0
    while images:  # each file's images are freed once they are in the pool
        piece = images.pop(0)
        # EMNIST's images are published with rows and columns exchanged.
        x[start : start + len(piece), 0] = piece.transpose(0, 2, 1) if prefix else piece
        start += len(piece)
    y = np.concatenate(labels).astype(np.int64)
    is_test = np.arange(len(y)) >= len(labels[0])
    return Pool(
        name,
        torch.from_numpy(x),
        torch.from_numpy(y),
        len(CLASSES[name]),
        CLASSES[name],
        published_test=is_test,
    )


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise DataError(
            f"'{where}': the label {labels[bad[0]]} of example {bad[0]} (from 0) is out of range: there are {classes} "
            f"classes, 0 to {classes - 1}; {len(bad)} label{'s are' if len(bad) > 1 else ' is'} wrong: get it again"
        )


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in an idx file of unsigned bytes; `path` ends in .gz, and may be there without it, or in gzip.zip."""
    try:
        with _opened(path) as (file, shown):
            return _parse(file, dimensions, shown)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"'{path}' is damaged or not a gzip file ({error}): get it again") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    plain, archive = path.with_suffix(""), path.parent / "gzip.zip"
    if path.exists():
        with gzip.open(path) as file:
            yield file, str(path)  # type: ignore[misc]
    elif plain.exists():
        with plain.open("rb") as file:
            yield file, str(plain)
    elif archive.exists():
        with zipfile.ZipFile(archive) as whole:
            member = next((name for name in whole.namelist() if Path(name).name == path.name), None)
            if member is None:
                raise DataError(f"'{archive}' holds no {path.name}: get it again")
            with whole.open(member) as packed, gzip.open(packed) as file:
                yield file, f"{archive}/{member}"  # type: ignore[misc]
    else:
        raise DataError(f"'{path}' is missing")


def _parse(file: IO[bytes], dimensions: int, shown: str) -> np.ndarray:
    head = file.read(4 + 4 * dimensions)
    if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) < 4 + 4 * dimensions:
        raise DataError(
            f"'{shown}' is not an idx file of bytes with {dimensions} dimension(s): its first bytes (the magic number) "
            f"are {head[:4].hex(' ') or 'missing'}, not {bytes([0, 0, 8, dimensions]).hex(' ')}. Get it again"
        )
    shape = tuple(int(size) for size in np.frombuffer(head, ">u4", dimensions, offset=4))
    size = int(np.prod(shape, dtype=object))
    if size > MOST_BYTES:
        raise DataError(f"'{shown}' says it holds {shape}, which is too large to be true: get it again")
    # Read piece by piece, so that a file which lies about its size does not cost the memory it claims.
    data = bytearray()
    while len(data) < size and (piece := file.read(min(2**22, size - len(data)))):
        data += piece
    left = len(file.read(1))
    if len(data) != size or left:
        more = "more" if left else f"{len(data)} bytes"
        raise DataError(f"'{shown}' says it holds {shape} but has {more}: get it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
