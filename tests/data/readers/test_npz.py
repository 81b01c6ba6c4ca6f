import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data.readers.npz import read_pool


def test_one_part_with_named_owners(tmp_path):
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 2, 0])
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.array(["b", "a", "b", "a"]))
    pool = read_pool("own", tmp_path / "a.npz")
    assert pool.x.dtype == torch.float32
    assert pool.x.tolist() == x.tolist()
    assert (pool.num_classes, pool.owners, pool.owner.tolist()) == (3, ("a", "b"), [1, 0, 1, 0])


def test_bytes_are_images_and_floats_a_regression(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 5, 6), np.uint8), y=np.array([0.5, 1.5]))
    pool = read_pool("own", tmp_path / "a.npz")
    assert (tuple(pool.x.shape), pool.x.dtype, pool.num_classes) == ((2, 1, 5, 6), torch.uint8, None)
    assert pool.y.tolist() == [0.5, 1.5]


def test_two_parts_as_femnist_is_kept(tmp_path):
    parts = {}
    for part, size in (("train", 3), ("test", 2)):
        parts |= {f"x_{part}": np.full((size, 28, 28), size, np.uint8), f"y_{part}": np.arange(size)}
        parts |= {f"writer_{part}": np.arange(size) % 2}
    np.savez(tmp_path / "a.npz", **parts, writers=np.array(["f1", "f2"]))
    pool = read_pool("femnist", tmp_path / "a.npz", tuple("abc"))
    assert pool.published_test.tolist() == [False] * 3 + [True] * 2
    assert (pool.owners, pool.owner.tolist()) == (("f1", "f2"), [0, 1, 0, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((2, 1))}, r"has no array y; it has x"),
        ({"x": np.zeros((2, 1)), "y": np.zeros(3, int)}, r"x is \(2, 1\) and y \(3,\)"),
        ({"x": np.zeros((2, 1)), "y": np.array([0, -1])}, "the label -1 of example 1"),
        ({"x": np.array([[0.0], [np.nan]]), "y": np.array([0, 1])}, "row 1 of x has a missing"),
        ({"x": np.array([["a"], ["b"]]), "y": np.array([0, 1])}, "one row of numbers per example"),
        ({"x": np.zeros((2, 1)), "y": np.array([0, 1]), "owner": np.zeros(3, int)}, "one owner per example"),
        ({"x": np.zeros((0, 1)), "y": np.zeros(0, int)}, "has no examples"),
        ({"x": np.array([[1], [None]], object), "y": np.array([0, 1])}, "cannot be read as .npz"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, arrays, words):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=words):
        read_pool("own", tmp_path / "a.npz")


def test_damaged_files(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.random.default_rng(0).random((99, 9)), y=np.arange(99))
    data = (tmp_path / "a.npz").read_bytes()
    for broken in (data[:-300], b"no zip", data[:200] + b"xxxx" + data[204:]):
        (tmp_path / "a.npz").write_bytes(broken)
        with pytest.raises(DataError, match=r"a.npz' cannot be read"):
            read_pool("own", tmp_path / "a.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"not an .npz file: save x and y together"):
        read_pool("own", tmp_path / "one.npy")
    with pytest.raises(DataError, match="there is no file"):
        read_pool("own", tmp_path / "none.npz")
