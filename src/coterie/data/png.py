"""Enough of PNG for the sheets of CIFAR-10: 8 bits a channel, RGB, not interlaced."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from coterie.errors import DataError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 2**28


def read_png(path: Path) -> np.ndarray:
    """[height, width, 3], uint8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    try:
        return _decode(data, path)
    except (struct.error, zlib.error, ValueError) as error:
        raise DataError(f"'{path}' is damaged ({error}): get it again") from error


def _decode(data: bytes, path: Path) -> np.ndarray:
    if data[:8] != _SIGNATURE:
        raise DataError(f"'{path}' is not a PNG file: its first bytes are wrong")
    place, packed, header = 8, [], b""
    while True:
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + length]
        (expected,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        if zlib.crc32(body, zlib.crc32(kind)) != expected:
            raise ValueError(f"the checksum of a part {kind.decode('latin1')} is wrong")
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed.append(body)
        elif kind == b"IEND":
            break
        place += 12 + length
    width, height, *rest = struct.unpack(">IIBBBBB", header)
    if rest != [8, 2, 0, 0, 0] or width * height > _MOST_PIXELS:
        raise DataError(f"'{path}' is not an 8-bit RGB image without interlacing")
    flat = zlib.decompressobj().decompress(b"".join(packed), height * (3 * width + 1))
    return _unfilter(np.frombuffer(flat, np.uint8).reshape(height, 3 * width + 1), width)


def _unfilter(rows: np.ndarray, width: int) -> np.ndarray:
    """Undo PNG's filters: 0 none, 1 left neighbour, 2 the one above, 3 mean of both, 4 Paeth; all modulo 256."""
    kinds = rows[:, 0]
    out = rows[:, 1:].reshape(len(rows), width, 3).copy()
    if kinds.max(initial=0) > 4:
        raise ValueError(f"there is no filter {kinds.max()}")
    left = kinds == 1  # does not look at other rows: all at once
    out[left] = np.cumsum(out[left], axis=1, dtype=np.uint8)
    for i in np.flatnonzero(kinds > 1):
        above = out[i - 1] if i else np.zeros_like(out[0])
        if kinds[i] == 2:
            out[i] += above
        else:
            out[i] = _by_pixel(out[i].astype(int), above.astype(int), kinds[i] == 4)
    return out


def _by_pixel(row: np.ndarray, above: np.ndarray, paeth: bool) -> np.ndarray:
    a = c = np.zeros(3, int)  # left, above left
    for j, b in enumerate(above):
        if paeth:
            p = a + b - c
            da, db, dc = abs(p - a), abs(p - b), abs(p - c)
            guess = np.where((da <= db) & (da <= dc), a, np.where(db <= dc, b, c))
        else:
            guess = (a + b) // 2
        row[j] = (row[j] + guess) % 256
        a, c = row[j], b
    return row.astype(np.uint8)
