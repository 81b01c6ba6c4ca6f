"""Reads the idx format of MNIST, Fashion-MNIST and EMNIST: a magic number, the shape, and bytes.

Files may be plain, gzipped or, for EMNIST, gzipped in a zip archive. Errors name the file and say what to do.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie.data.download.locations import DatasetFiles
from coterie.data.pool import Pool
from coterie.data.readers.packed import check_unpacked

MAX_BYTES = 2**33  # larger than any published file
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
_FOUR_FILES = "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, ..."
_EMNIST = "'coterie data get emnist' downloads NIST's archive gzip.zip (562 MB)"
FILES = {
    "mnist": DatasetFiles(
        "mnist",
        ("mnist", "MNIST/raw"),
        ("train-images-idx3-ubyte*",),
        f"'coterie data get mnist' downloads it; or copy {_FOUR_FILES}",
    ),
    "fashion-mnist": DatasetFiles(
        "fashion-mnist",
        ("fashion-mnist", "FashionMNIST/raw"),
        ("train-images-idx3-ubyte*",),
        "'coterie data get fashion-mnist' downloads it; or install Debian's package dataset-fashion-mnist, or copy "
        + _FOUR_FILES,
        ("/usr/share/datasets/fashion-mnist",),
    ),
    **{
        name: DatasetFiles(
            name,
            ("emnist", "emnist/gzip", "EMNIST/raw"),
            (f"{name}-train-images-idx3-ubyte*", "gzip.zip"),
            f"{_EMNIST}; or copy its {name}-train-images-idx3-ubyte.gz and the three beside it",
        )
        for name in ("emnist-byclass", "emnist-balanced")
    },
}


def read_pool(name: str, folder: Path) -> Pool:
    """Read the official training files, then the test files; images are [n, 1, height, width]."""
    prefix, parts = (f"{name}-", ("train", "test")) if name.startswith("emnist") else ("", ("train", "t10k"))
    images, labels = (
        [folder / f"{prefix}{part}-{what}-ubyte.gz" for part in parts] for what in ("images-idx3", "labels-idx1")
    )
    shapes = [read_shape(path, 3) for path in images]
    if shapes[0][1:] != shapes[1][1:]:
        raise DataError(f"'{images[1]}' has images of {shapes[1][1:]} pixels, '{images[0]}' of {shapes[0][1:]}")
    if prefix and shapes[0][1] != shapes[0][2]:
        raise DataError(
            f"'{images[0]}' has images of {shapes[0][1:]} pixels, but those of EMNIST are square: get it again"
        )
    x = np.empty((shapes[0][0] + shapes[1][0], 1, *shapes[0][1:]), np.uint8)
    y = []
    for path, of, place in zip(images, labels, np.split(x[:, 0], [shapes[0][0]]), strict=True):
        given = read_idx(of, 1)
        if len(given) != len(place):
            raise DataError(f"'{path}' has {len(place)} images but '{of}' {len(given)} labels")
        check_labels(given, len(CLASSES[name]), str(of))
        y.append(given.astype(np.int64))
        read_idx(path, 3, place)
    if prefix:  # EMNIST's images are published with rows and columns exchanged
        for start in range(0, len(x), 4096):
            x[start : start + 4096] = x[start : start + 4096].transpose(0, 1, 3, 2).copy()
    labelled = torch.from_numpy(np.concatenate(y))
    is_test = np.arange(len(x)) >= shapes[0][0]
    return Pool(name, torch.from_numpy(x), labelled, len(CLASSES[name]), CLASSES[name], published_test=is_test)


def check_labels(labels: np.ndarray, classes: int, where: str) -> None:
    """Raise `DataError` with the first label outside 0 to classes - 1; `where` names the file."""
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise DataError(
            f"'{where}': the label {labels[bad[0]]} of example {bad[0]} (from 0) is out of range: there are {classes} "
            f"classes, 0 to {classes - 1}; {len(bad)} label{'s are' if len(bad) > 1 else ' is'} wrong: get it again"
        )


def read_idx(path: Path, dimensions: int, out: np.ndarray | None = None) -> np.ndarray:
    """Read the array of an idx file of unsigned bytes.

    Args:
        path: A path that ends in .gz; the file may also be present without .gz, or inside gzip.zip.
        dimensions: The number of dimensions that the array must have.
        out: An array of the right shape to read into.
    """
    with _opened(path) as (file, shown):
        shape = _shape(file, dimensions, shown)
        check_unpacked(path, _packed(path), math.prod(shape))
        out = np.empty(shape, np.uint8) if out is None else out  # pages are allocated as they are written
        whole, size = memoryview(out.reshape(-1)), 0  # type: ignore[arg-type]
        while size < len(whole) and (read := file.readinto(whole[size : size + 2**22])):  # type: ignore[attr-defined]
            size += read
        left = len(file.read(1))
        if size < len(whole) or left:
            more = "more" if left else f"{size} bytes"
            raise DataError(f"'{shown}' should contain {shape} but has {more}: get it again")
        return out


def read_shape(path: Path, dimensions: int) -> tuple[int, ...]:
    """Read only the shape of the array in an idx file."""
    with _opened(path) as (file, shown):
        shape = _shape(file, dimensions, shown)
        check_unpacked(path, _packed(path), math.prod(shape))
        return shape


def _packed(path: Path) -> int:
    """Return how many bytes the file, or the archive that it is in, has on the disk."""
    found = next(each for each in (path, path.with_suffix(""), path.parent / "gzip.zip") if each.exists())
    return found.stat().st_size


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], str]]:
    plain, archive = path.with_suffix(""), path.parent / "gzip.zip"
    try:
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
                    raise DataError(f"'{archive}' does not contain {path.name}: get it again")
                with whole.open(member) as packed, gzip.open(packed) as file:
                    yield file, f"{archive}/{member}"  # type: ignore[misc]
        else:
            raise DataError(f"'{path}' is missing")
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"'{path}' is damaged or not a gzip file ({error}): get it again") from error


def _shape(file: IO[bytes], dimensions: int, shown: str) -> tuple[int, ...]:
    head, magic = file.read(4 + 4 * dimensions), bytes([0, 0, 8, dimensions])
    if head[:4] != magic or len(head) < 4 + 4 * dimensions:
        raise DataError(
            f"'{shown}' is not an idx file of bytes with {dimensions} dimension(s): its first bytes are wrong (the "
            f"magic number is {head[:4].hex(' ') or 'missing'}, not {magic.hex(' ')}); get it again"
        )
    shape = tuple(int(size) for size in np.frombuffer(head, ">u4", dimensions, offset=4))
    if math.prod(shape) > MAX_BYTES:
        raise DataError(f"'{shown}' claims to contain {shape}, more than any published file: get it again")
    return shape
