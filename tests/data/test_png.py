import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from coterie.data.png import read_png
from coterie.errors import DataError


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(image, filters, header=(8, 2, 0, 0, 0)):
    """An image with the given filter a row, written from the PNG specification's definitions."""
    height, width, _ = image.shape
    rows = b""
    for i, kind in enumerate(filters):
        row, above = image[i].astype(int), image[i - 1].astype(int) if i else np.zeros((width, 3), int)
        left, corner = (np.concatenate([np.zeros((1, 3), int), each[:-1]]) for each in (row, above))
        p = left + above - corner
        near = [abs(p - left), abs(p - above), abs(p - corner)]
        paeth = np.where((near[0] <= near[1]) & (near[0] <= near[2]), left, np.where(near[1] <= near[2], above, corner))
        guess = [0, left, above, (left + above) // 2, paeth][kind]
        rows += bytes([kind]) + ((row - guess) % 256).astype(np.uint8).tobytes()
    packed = zlib.compress(rows)
    parts = [struct.pack(">IIBBBBB", width, height, *header), packed[:10], packed[10:], b""]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(chunk, [b"IHDR", b"IDAT", b"IDAT", b"IEND"], parts))


@pytest.mark.parametrize("filters", [[0] * 5, [1] * 5, [2] * 5, [3] * 5, [4] * 5, [4, 1, 3, 2, 0], [2, 4, 1, 4, 3]])
def test_every_filter(tmp_path, filters):
    image = np.random.default_rng(0).integers(256, size=(5, 7, 3)).astype(np.uint8)
    (tmp_path / "a.png").write_bytes(png(image, filters))
    assert np.array_equal(read_png(tmp_path / "a.png"), image)


def test_what_another_program_writes(tmp_path):
    image = np.random.default_rng(0).integers(256, size=(30, 20, 3)).astype(np.uint8)
    image[5:20] = 7
    Image.fromarray(image).save(tmp_path / "a.png")
    assert np.array_equal(read_png(tmp_path / "a.png"), image)


def test_damage_is_named(tmp_path):
    path = tmp_path / "a.png"
    whole = png(np.zeros((2, 2, 3), np.uint8), [0, 0])
    for data, words in [
        (b"GIF89a" + whole, "is not a PNG file"),
        (whole[:-20], "is damaged"),
        (whole[:50] + b"x" + whole[51:], "is damaged"),
        (png(np.zeros((2, 2, 3), np.uint8), [0, 0], header=(16, 2, 0, 0, 0)), "not an 8-bit RGB image"),
        (png(np.zeros((2, 2, 3), np.uint8), [0]), "is damaged"),
    ]:
        path.write_bytes(data)
        with pytest.raises(DataError, match=words):
            read_png(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_png(tmp_path / "none.png")
