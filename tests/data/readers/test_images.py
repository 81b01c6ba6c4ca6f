import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from coterie.core.errors import DataError
from coterie.data.readers.images import read_rgb


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, rows):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_every_pixel_is_read(tmp_path):
    image = np.random.default_rng(0).integers(256, size=(30, 20, 3)).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "a.png")
    assert np.array_equal(np.asarray(read_rgb(tmp_path / "a.png")), image)


def test_a_grey_image_becomes_rgb(tmp_path):
    Image.fromarray(np.full((2, 2), 7, np.uint8)).save(tmp_path / "a.png")
    assert np.asarray(read_rgb(tmp_path / "a.png")).tolist() == [[[7, 7, 7]] * 2] * 2


@pytest.mark.parametrize("size", [2**15, 2**17])  # the second is beyond Pillow's own limit, too
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_huge_image_is_refused_by_its_header(tmp_path, size):
    (tmp_path / "a.png").write_bytes(png(size, size, b""))  # nothing to decode: only the header can tell
    with pytest.raises(DataError, match=r"a\.png'.*(too large|cannot be read as an image: .*exceeds limit)"):
        read_rgb(tmp_path / "a.png")


def test_the_limit_counts_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(png(3, 2, bytes(2 * (1 + 9))))
    assert read_rgb(tmp_path / "a.png", max_pixels=6).size == (3, 2)
    with pytest.raises(DataError, match="is too large: 3 x 2 pixels, but at most 5 are read"):
        read_rgb(tmp_path / "a.png", max_pixels=5)


def test_damage_is_named(tmp_path):
    path = tmp_path / "a.png"
    noise = np.random.default_rng(0).bytes(64 * 3)
    whole = png(64, 64, (b"\0" + noise) * 64)
    for data in (b"no image" + whole, whole[: len(whole) // 2], whole[:20] + b"x" + whole[21:], png(64, 64, b"\0")):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"a\.png' cannot be read as an image"):
            read_rgb(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rgb(tmp_path / "none.png")


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"a\.png' needs Pillow: pip install 'coterie\[images\]'"):
        read_rgb(tmp_path / "a.png")
