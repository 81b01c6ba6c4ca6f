"""Reads folders of images, DOMAIN/CLASS/IMAGE (Office-31, Office-Home); each domain is a natural client.

Images are resized so that the shorter side is `size`, and cropped to the middle size x size pixels. The result is kept
as bytes in one memory-mapped file in the cache folder, which is written once and read page by page.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import torch

from coterie.core.errors import DataError
from coterie.data.download.locations import DatasetFiles, cache_folder
from coterie.data.pool import Pool
from coterie.data.readers.images import read_rgb

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"}
MAX_ASPECT = 100  # resized until its shorter side fits, a longer image would fill the memory
_FROM_AUTHORS = "its authors provide it ({0}): download it, and unpack its folders DOMAIN/CLASS with images"
FILES = {
    "office-31": DatasetFiles(
        "office-31",
        ("office-31", "office31", "Office-31"),
        ("amazon/*", "Amazon/*"),
        _FROM_AUTHORS.format("faculty.cc.gatech.edu/~judy/domainadapt") + " into a folder office-31",
    ),
    "office-home": DatasetFiles(
        "office-home",
        ("office-home", "OfficeHomeDataset_10072016", "OfficeHome"),
        ("Art/*", "Product/*"),
        _FROM_AUTHORS.format("hemanthdv.org/officeHomeDataset.html") + " into a folder office-home",
    ),
}


def read_pool(name: str, folder: Path, size: int = 224) -> Pool:
    """Read all images, as squares with `size` pixels a side; the domains are the owners."""
    domains = _folders(folder)
    # Office-31 as published has a folder images/ between the domain and its classes.
    inside = {place: place / "images" if (place / "images").is_dir() else place for place in domains}
    classes = sorted({each.name for place in domains for each in _folders(inside[place])})
    if len(classes) < 2:
        raise DataError(
            f"'{folder}' has {len(classes)} class(es): images must be in folders DOMAIN/CLASS, with two classes or more"
        )
    paths, y, owner = [], [], []
    for i, place in enumerate(domains):
        for each in _folders(inside[place]):
            found = sorted(path for path in each.iterdir() if path.suffix.lower() in SUFFIXES)
            paths += found
            y += [classes.index(each.name)] * len(found)
            owner += [i] * len(found)
    if not paths:
        raise DataError(f"'{folder}' has no images ({', '.join(sorted(SUFFIXES))}) in folders DOMAIN/CLASS")
    x = torch.from_numpy(_cached(name, paths, size))
    names = tuple(place.name for place in domains)
    return Pool(name, x, torch.tensor(y), len(classes), tuple(classes), np.array(owner, np.int64), names)


def _folders(place: Path) -> list[Path]:
    return sorted(each for each in place.iterdir() if each.is_dir() and not each.name.startswith("."))


def _cached(name: str, paths: list[Path], size: int) -> np.ndarray:
    """Return [n, 3, size, size] bytes, memory-mapped from a cache that is renewed when an image changes."""
    fingerprint = hashlib.sha256(str(size).encode())
    for path in paths:
        stat = path.stat()
        fingerprint.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    file = cache_folder() / f"{name}-{size}-{fingerprint.hexdigest()[:16]}.npy"
    if not file.exists():
        _write(file, paths, size)
    # Copy on write: changing the tensor must not change the file.
    return np.load(file, mmap_mode="c", allow_pickle=False)  # type: ignore[no-any-return]


def _write(file: Path, paths: list[Path], size: int) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=(len(paths), 3, size, size))
        for i, path in enumerate(paths):
            images[i] = read_image(path, size)
        images.flush()
        del images
        os.replace(temporary, file)
    except OSError as error:
        raise DataError(f"'{file}' cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_image(path: Path, size: int) -> np.ndarray:
    """Return [3, size, size] bytes: the middle of the image, after its shorter side is resized to `size`."""
    rgb = read_rgb(path)
    width, height = rgb.size
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise DataError(f"'{path}' is {width} x {height} pixels: at most {MAX_ASPECT} times as long as wide are read")
    scale = size / min(width, height)
    wide, high = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    resized = rgb.resize((wide, high), resample=2).crop((left, top, left + size, top + size))  # 2: bilinear
    return np.asarray(resized, np.uint8).transpose(2, 0, 1)
