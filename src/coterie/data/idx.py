"""MNIST and Fashion-MNIST in their published form: four gzipped idx files.

They are looked for under the folder in the environment variable COTERIE_DATA, then where Debian's package
`dataset-fashion-mnist` puts them. A file that is missing or damaged is named, with what to do.
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from coterie.errors import DataError

FOLDERS = {
    "mnist": ([], "copy the four files of MNIST (train-images-idx3-ubyte.gz, ...)"),
    "fashion-mnist": (
        [Path("/usr/share/datasets/fashion-mnist")],
        "install Debian's package dataset-fashion-mnist, or copy the four files (train-images-idx3-ubyte.gz, ...)",
    ),
}


def load_idx_pool(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(images [70000, 28, 28] uint8, labels [70000]): the official training and test files laid end to end."""
    folder = find_folder(name)
    images = [read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3) for part in ("train", "t10k")]
    labels = [read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1) for part in ("train", "t10k")]
    for part, found, wanted in zip(("train", "t10k"), images, labels, strict=True):
        if len(found) != len(wanted):
            raise DataError(f"'{folder}': {len(found)} {part} images but {len(wanted)} labels")
    return np.concatenate(images), np.concatenate(labels).astype(np.int64)


def find_folder(name: str) -> Path:
    installed, advice = FOLDERS[name]
    own = os.environ.get("COTERIE_DATA")
    places = [*([Path(own) / name] if own else []), *installed]
    for place in places:
        if (place / "train-images-idx3-ubyte.gz").exists():
            return place
    into = f"'{places[0]}'" if own else f"a folder '{name}' and name its parent in COTERIE_DATA"
    raise DataError(f"the data set {name} is not here: {advice} into {into}")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in a gzipped idx file of unsigned bytes."""
    try:
        with gzip.open(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise DataError(f"'{path}' is missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' is damaged or not a gzip file ({error}): copy it again") from error
    if data[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(
            f"'{path}' is not an idx file of bytes with {dimensions} dimension(s): its first bytes are wrong"
        )
    shape = np.frombuffer(data, ">u4", dimensions, offset=4)
    start = 4 + 4 * dimensions
    if len(data) - start != int(np.prod(shape, dtype=np.int64)):
        raise DataError(
            f"'{path}' says it holds {tuple(map(int, shape))} but has {len(data) - start} bytes: copy it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
