"""Files that are made to fill the memory are refused before they do."""

import contextlib
import gzip
import io
import random
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import tomli_w
from PIL import Image

from coterie.core.errors import ConfigError, CoterieError, DataError
from coterie.core.toml import read_toml
from coterie.data.readers import packed
from coterie.data.readers.folders import read_image
from coterie.data.readers.idx import read_idx
from coterie.data.readers.npz import read_arrays
from coterie.data.tables.schema import read_schema
from tests.deploy.mutations import changed

ZEROS = 40 * 2**20


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(packed, "ALWAYS_ALLOWED_BYTES", 2**20)


@pytest.fixture
def memory():
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_a_gzip_bomb_is_refused(tmp_path, memory):
    path = tmp_path / "images.gz"
    header = bytes([0, 0, 8, 3]) + np.array([ZEROS // 784, 28, 28], ">u4").tobytes()
    with gzip.open(path, "wb") as file:
        file.write(header)
        for _ in range(ZEROS // 2**20):
            file.write(bytes(2**20))
    with pytest.raises(DataError, match=r"would unpack .* more than 100 times"):
        read_idx(path, 3)
    assert memory() < 5 * 2**20


def test_a_gzip_file_with_more_than_it_says_is_read_no_further(tmp_path, memory):
    path = tmp_path / "labels.gz"
    with gzip.open(path, "wb") as file:
        file.write(bytes([0, 0, 8, 1]) + np.array([10], ">u4").tobytes())
        for _ in range(ZEROS // 2**20):
            file.write(bytes(2**20))
    with pytest.raises(DataError, match="has more"):
        read_idx(path, 1)
    assert memory() < 5 * 2**20


def test_a_zip_bomb_is_refused(tmp_path, memory):
    path = tmp_path / "own.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as whole, whole.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, {"shape": (ZEROS,), "fortran_order": False, "descr": "|u1"})
        for _ in range(ZEROS // 2**20):
            file.write(bytes(2**20))
    with pytest.raises(DataError, match=r"own.npz' would unpack"):
        read_arrays(path)
    assert memory() < 5 * 2**20


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_an_array_that_claims_more_than_its_file_has_is_refused(suffix, tmp_path, memory):
    path = tmp_path / f"own.{suffix}"
    header = {"shape": (2**31, 2**6), "fortran_order": False, "descr": "<f8"}
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, header)
    content.write(bytes(100))
    path.write_bytes(content.getvalue())
    if suffix == "npz":
        with zipfile.ZipFile(path, "w") as whole:
            whole.writestr("x.npy", content.getvalue())
    with pytest.raises(DataError, match="claims an array"):
        packed.load_arrays(path)
    assert memory() < 5 * 2**20


def test_arrays_with_much_in_common_are_read(tmp_path):
    x = np.repeat(np.random.default_rng(0).integers(256, size=(100, 784), dtype=np.uint8), 20, 0)
    np.savez_compressed(tmp_path / "own.npz", x=x)
    assert (read_arrays(tmp_path / "own.npz")["x"] == x).all()
    np.save(tmp_path / "own.npy", x)
    assert (packed.load_arrays(tmp_path / "own.npy") == x).all()


def test_an_image_with_huge_dimensions_is_refused_before_it_is_decoded(tmp_path, memory, monkeypatch):
    path = tmp_path / "huge.png"  # a small image, with other dimensions in its header
    Image.new("L", (1, 1)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = np.array((17_000, 17_000), ">u4").tobytes()
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    path.write_bytes(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(DataError, match="too large"):
        read_image(path, 224)
    assert memory() < 5 * 2**20


def test_an_image_that_is_a_line_is_refused_before_it_is_enlarged(tmp_path, memory):
    Image.new("L", (1, 100_000)).save(tmp_path / "line.png")
    with pytest.raises(DataError, match="times as long as wide"):
        read_image(tmp_path / "line.png", 224)
    assert memory() < 5 * 2**20


ODD = ["x = " + "[" * 5000, "x = " + "9" * 5000, "\0", "x = 1\nx = 2", "[a]\n[a]", "= 1", 'x = "\\ud800"', "x = nan"]


@pytest.mark.parametrize("text", ODD)
def test_odd_toml_is_refused_in_words(text, tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(DataError):
        read_schema(path)
    if text != "x = nan":
        with pytest.raises(ConfigError):
            read_toml(path)


def test_a_schema_of_anything_is_read_or_refused(tmp_path):
    columns = [{"name": "age", "kind": "number"}, {"name": "sex", "kind": "category", "categories": ["f", "m"]}]
    real = {"format": 1, "target": "ill", "kind": "classification", "classes": ["no", "yes"], "columns": columns}
    draw, path, read = random.Random(0), tmp_path / "schema.toml", 0
    for _ in range(300):
        values = changed(real, draw)
        try:
            path.write_text(tomli_w.dumps(values))
        except (TypeError, ValueError, AttributeError):
            continue  # it cannot be written as TOML
        with contextlib.suppress(CoterieError):
            read_schema(path).describe()
            read += 1
    assert read
