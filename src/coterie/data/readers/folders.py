"""Folders of images, domain/class/image (Office-31, Office-Home): each domain is a natural client.

Images are resized so that the shorter side is `size`, the middle size x size pixels are taken, and the result is kept
as bytes in one memory-mapped file in the cache folder: it is made once, and read page by page.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.data.locations import Files, cache
from coterie.data.pool import Pool
from coterie.errors import DataError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp"}
_ASK = "its authors give it out ({0}): download and unpack it, so that there are folders DOMAIN/CLASS with images,"
FILES = {
    "office-31": Files(
        "office-31",
        ("office-31", "office31", "Office-31"),
        ("amazon/*", "Amazon/*"),
        _ASK.format("faculty.cc.gatech.edu/~judy/domainadapt") + " into a folder office-31",
    ),
    "office-home": Files(
        "office-home",
        ("office-home", "OfficeHomeDataset_10072016", "OfficeHome"),
        ("Art/*", "Product/*"),
        _ASK.format("hemanthdv.org/officeHomeDataset.html") + " into a folder office-home",
    ),
}


def read_pool(name: str, folder: Path, size: int = 224) -> Pool:
    domains = _folders(folder)
    # Office-31 as published has a folder images/ between the domain and its classes.
    inside = {place: place / "images" if (place / "images").is_dir() else place for place in domains}
    classes = sorted({each.name for place in domains for each in _folders(inside[place])})
    if len(classes) < 2:
        raise DataError(
            f"'{folder}' has {len(classes)} class(es): images lie in folders DOMAIN/CLASS, of two classes or more"
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
    """[n, 3, size, size], memory-mapped; made again when an image has changed."""
    told = hashlib.sha256(str(size).encode())
    for path in paths:
        stat = path.stat()
        told.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    file = cache() / f"{name}-{size}-{told.hexdigest()[:16]}.npy"
    if not file.exists():
        _write(file, paths, size)
    # Copy on write: the tensor may not be changed on disk.
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
    """[3, size, size] bytes: the middle of the image, its shorter side resized to `size`."""
    image_of = _pillow()
    try:
        with image_of(path) as image:
            rgb = image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"'{path}' cannot be read as an image: {error}") from error
    width, height = rgb.size
    scale = size / min(width, height)
    wide, high = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (wide - size) // 2, (high - size) // 2
    resized = rgb.resize((wide, high), resample=2).crop((left, top, left + size, top + size))  # 2: bilinear
    return np.asarray(resized, np.uint8).transpose(2, 0, 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow: pip install 'coterie[images]'") from error
    return Image.open
