import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from coterie.data import load
from coterie.data.idx import find_folder, load_idx_pool, read_idx
from coterie.data.pfedbred import USERS, deal
from coterie.errors import DataError

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (SHARED / "mnist").exists() and "COTERIE_DATA" not in os.environ, reason="MNIST is not here: set COTERIE_DATA"
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
    with pytest.raises(DataError, match=r"holds \(9,\) but has 3 bytes"):
        read_idx(path, 1)
    write(path, [0, 0, 9, 1, 0, 0, 0, 3], [1, 2, 3])
    with pytest.raises(DataError, match="first bytes are wrong"):
        read_idx(path, 1)
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.gz' is damaged"):
        read_idx(path, 1)


def test_a_missing_data_set_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"mnist is not here: copy the four files.*into"):
        find_folder("mnist")
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
def test_the_real_mnist(monkeypatch):
    if "COTERIE_DATA" not in os.environ:
        monkeypatch.setenv("COTERIE_DATA", str(SHARED))
    images, labels = load_idx_pool("mnist")
    assert images.shape == (70_000, 28, 28)
    # 6,903 zeros in the published files: 5,923 for training and 980 for testing
    assert (labels == 0).sum() == 6903
