import gzip
import os
import zipfile

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data import load
from coterie.data.readers.idx import FILES, read_idx, read_pool
from coterie.data.readers.pfedbred import USERS, deal
from tests.places import SHARED

needs_data = pytest.mark.skipif(
    not (SHARED / "mnist").exists() and "COTERIE_DATA" not in os.environ, reason="MNIST was not found: set COTERIE_DATA"
)


def write(path, header, body, truncate=0):
    data = gzip.compress(bytes(header) + bytes(body))
    path.write_bytes(data[: len(data) - truncate])


def test_reads_what_the_format_says(tmp_path):
    write(tmp_path / "a.gz", [0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3], [1, 2, 3, 4, 5, 6])
    assert read_idx(tmp_path / "a.gz", 3).tolist() == [[[1, 2, 3]], [[4, 5, 6]]]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.gz"
    with pytest.raises(DataError, match=r"a\.gz' is missing"):
        read_idx(path, 1)
    write(path, [0, 0, 8, 1, 0, 0, 0, 3], [1, 2, 3], truncate=6)
    with pytest.raises(DataError, match=r"a\.gz' is damaged"):
        read_idx(path, 1)
    write(path, [0, 0, 8, 1, 0, 0, 0, 9], [1, 2, 3])
    with pytest.raises(DataError, match=r"contain \(9,\) but has 3 bytes"):
        read_idx(path, 1)
    write(path, [0, 0, 9, 1, 0, 0, 0, 3], [1, 2, 3])
    with pytest.raises(DataError, match="first bytes are wrong"):
        read_idx(path, 1)
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.gz' is damaged"):
        read_idx(path, 1)


def test_a_missing_data_set_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "own"))
    with pytest.raises(DataError, match="mnist was not found: 'coterie data get mnist' downloads it; or copy"):
        FILES["mnist"].require()
    monkeypatch.delenv("COTERIE_DATA")
    with pytest.raises(DataError, match="COTERIE_DATA"):
        load("pfedbred-mnist", 0)


@pytest.mark.parametrize("slots", [2, 3])
def test_the_recipe_deals_each_image_once_and_each_user_its_labels(slots):
    digits = np.random.default_rng(0).integers(10, size=70_000)
    users = deal(digits, slots, 0, slot_labels=False)
    together = np.concatenate([own for own, _ in users])
    assert len(users) == USERS
    assert len(np.unique(together)) == len(together)
    for user, (own, labels) in enumerate(users):
        assert (labels == digits[own]).all()
        assert set(labels) <= {(user + slot) % 10 for slot in range(slots)}
        assert len(own) >= 10 * slots


def test_the_authors_wrong_labels_can_be_had():
    digits = np.random.default_rng(0).integers(10, size=70_000)
    right, wrong = deal(digits, 3, 0, slot_labels=False), deal(digits, 3, 0, slot_labels=True)
    differ = [(a[1] != b[1]).sum() for a, b in zip(right, wrong, strict=True)]
    assert sum(count > 0 for count in differ) == 90  # all users but those with u mod 10 = 0
    assert all(labels[:30].tolist() == [0] * 10 + [1] * 10 + [2] * 10 for _, labels in wrong)


@needs_data
def test_the_real_mnist():
    pool = read_pool("mnist", FILES["mnist"].require(os.environ.get("COTERIE_DATA", str(SHARED))))
    assert pool.x.shape == (70_000, 1, 28, 28)
    assert pool.x.dtype == torch.uint8
    # 6,903 zeros in the published files: 5,923 for training and 980 for testing
    assert [(pool.y[pool.published_test == part] == 0).sum() for part in (False, True)] == [5923, 980]


def idx(values):
    values = np.asarray(values, np.uint8)
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def published(folder, name="mnist", packed=True, classes=10, labels=None):
    """Four files in the published form, of 5 and 3 images of 3 x 2 (EMNIST: 3 x 3) pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix, second = ("", "t10k") if not name.startswith("emnist") else (f"{name}-", "test")
    draw = np.random.default_rng(0)
    made = []
    for part, size in (("train", 5), (second, 3)):
        images, given = draw.integers(256, size=(size, 3, 3 if prefix else 2)), draw.integers(classes, size=size)
        given = given if labels is None else np.resize(labels, size)
        made.append((images, given))
        for what, values in (("images-idx3", images), ("labels-idx1", given)):
            data, file = idx(values), f"{prefix}{part}-{what}-ubyte"
            (folder / (file + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return np.concatenate([images for images, _ in made]), np.concatenate([given for _, given in made])


@pytest.mark.parametrize("packed", [True, False])
def test_a_pool_has_the_training_images_and_then_the_test_images(tmp_path, packed):
    images, labels = published(tmp_path, packed=packed)
    pool = read_pool("mnist", tmp_path)
    assert np.array_equal(pool.x[:, 0].numpy(), images)
    assert np.array_equal(pool.y.numpy(), labels)
    assert pool.published_test.tolist() == [False] * 5 + [True] * 3
    assert pool.x.dtype == torch.uint8


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("name", "classes"), [("emnist-byclass", 62), ("emnist-balanced", 47)])
def test_emnist_is_turned_upright(tmp_path, name, classes, zipped):
    images, labels = published(tmp_path, name, classes=classes)
    if zipped:
        with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as whole:
            for path in list(tmp_path.glob("*.gz")):
                whole.write(path, f"gzip/{path.name}")
                path.unlink()
    pool = read_pool(name, FILES[name].require(_as_root(tmp_path)))
    assert np.array_equal(pool.x[:, 0].numpy(), images.transpose(0, 2, 1))
    assert np.array_equal(pool.y.numpy(), labels)
    assert pool.num_classes == classes == len(pool.classes) == len(set(pool.classes))


def _as_root(folder):
    root = folder.parent / f"{folder.name}-root"
    root.mkdir()
    (root / "emnist").symlink_to(folder)
    return root


def test_labels_out_of_range_and_files_that_do_not_fit_are_named(tmp_path):
    published(tmp_path, labels=[1, 2, 11])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz': the label 11 of example 2 .* out of range"):
        read_pool("mnist", tmp_path)
    published(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx([1, 2])))
    with pytest.raises(DataError, match=r"has 3 images but .* 2 labels"):
        read_pool("mnist", tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros((3, 5, 5)))))
    with pytest.raises(DataError, match=r"images of \(5, 5\) pixels"):
        read_pool("mnist", tmp_path)


def test_a_file_that_claims_to_be_enormous_is_not_believed(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 3] + [255] * 12)))
    with pytest.raises(DataError, match="more than any published file"):
        read_idx(tmp_path / "a.gz", 3)
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 127, 255, 255, 255, 1, 2])))
    with pytest.raises(DataError, match="would unpack"):
        read_idx(tmp_path / "b.gz", 1)
    (tmp_path / "c.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2])))
    with pytest.raises(DataError, match="but has more"):
        read_idx(tmp_path / "c.gz", 1)
