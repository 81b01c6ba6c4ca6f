import json
import zlib

import numpy as np
import pytest
import torch

from coterie.core.errors import DataError
from coterie.data.loading import read
from coterie.data.readers import leaf


def write(path, users):
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(data["y"]) for data in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": users}))


def image(value):
    return [value] * 784


def test_femnist_with_its_writers_in_several_files(tmp_path):
    write(tmp_path / "train/a.json", {"f2": {"x": [image(1.0), image(0.2)], "y": [61, 1]}})
    write(tmp_path / "train/b.json", {"f1": {"x": [image(0.0)], "y": [2]}})
    write(tmp_path / "test/a.json", {"f2": {"x": [image(0.5)], "y": [0]}})
    pool = leaf.femnist("femnist", tmp_path)
    assert pool.owners == ("f1", "f2")
    assert pool.owner.tolist() == [0, 1, 1, 1]
    assert pool.y.tolist() == [2, 61, 1, 0]
    assert pool.published_test.tolist() == [False, False, False, True]
    assert pool.x.dtype == torch.uint8
    assert pool.x.shape == (4, 1, 28, 28)
    assert pool.x[:, 0, 0, 0].tolist() == [0, 255, 51, 128]
    assert pool.num_classes == 62


def test_sent140_becomes_tokens_by_the_documented_rule(tmp_path):
    rows = [["1", "Mon", "NO_QUERY", "ann", "Hello, @bob! SEE http://x.y/z hello", "training"]]
    write(tmp_path / "train/a.json", {"ann": {"x": rows, "y": [1]}})
    write(tmp_path / "test/a.json", {"ann": {"x": rows, "y": [0]}})
    pool = leaf.sent140("sent140", tmp_path)
    words = ["hello", ",", "@", "!", "see", "http", "hello"]
    expected = [1 + zlib.crc32(word.encode()) % 9_999 for word in words]
    assert pool.x[0].tolist() == expected + [0] * 18
    assert pool.x.shape == (2, 25)
    assert pool.classes == ("negative", "positive")
    assert leaf.tokens("a " * 99).tolist() == [1 + zlib.crc32(b"a") % 9_999] * 25
    assert leaf.tokens("").tolist() == [0] * 25
    assert leaf.tokens("Ünïcode").max() < leaf.VOCABULARY_SIZE


def test_any_other_leaf_folder_by_its_path(tmp_path):
    write(tmp_path / "all.json", {"u": {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 2]}, "nobody": {"x": [], "y": []}})
    pool = read(f"{tmp_path}/")
    assert pool.x.tolist() == [[1, 2], [3, 4]]
    assert pool.owners == ("u",)
    assert (pool.num_classes, pool.published_test) == (3, None)


@pytest.mark.parametrize(
    ("users", "words"),
    [
        ({"u": {"x": [image(0.0)], "y": [62]}}, r"a.json', user 'u', row 0: the label 62 is not a class from 0 to 61"),
        ({"u": {"x": [image(0.0)], "y": ["3"]}}, r"user 'u', row 0: the label '3'"),
        ({"u": {"x": [image(0.0)], "y": [1, 2]}}, "user 'u': x and y are not two lists of the same length"),
        ({"u": {"x": [image(0.0), image(2.0)], "y": [1, 1]}}, "row 1: x is not 784 numbers from 0 to 1"),
        ({"u": {"x": [image(float("nan"))], "y": [1]}}, "missing or infinite"),
        ({"u": {"x": [["a"]], "y": [1]}}, "x is not a list of numbers"),
        ({"u": {"x": [], "y": []}}, "no example"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, users, words):
    write(tmp_path / "a.json", users)
    with pytest.raises(DataError, match=words):
        leaf.femnist("femnist", tmp_path)


def test_text_that_is_not_what_it_should_be(tmp_path):
    path = tmp_path / "a.json"
    for data, words in [
        (b'{"user_data": {"caf\xe9": {}}}', r"a.json' is not UTF-8 text: byte 19 \(from 0\) is 0xe9"),
        (b'{"user_data": {"u"', r"a.json' is not valid JSON, perhaps cut off \(.*line 1"),
        (b"[1]", "has no table user_data"),
    ]:
        path.write_bytes(data)
        with pytest.raises(DataError, match=words):
            leaf.femnist("femnist", tmp_path)
    write(path, {"u": {"x": [["1", "2"]], "y": [1]}})
    with pytest.raises(DataError, match="user 'u', row 0: element 4 of x is not a text"):
        leaf.sent140("sent140", tmp_path)


def test_inputs_of_different_lengths(tmp_path):
    write(tmp_path / "a.json", {"u": {"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}})
    with pytest.raises(DataError, match="different lengths"):
        leaf.read_pool("own", tmp_path)


def test_classes_have_their_names():
    assert len(leaf.FEMNIST_CLASSES) == len(set(leaf.FEMNIST_CLASSES)) == 62
    assert np.array([leaf.FEMNIST_CLASSES[i] for i in (0, 10, 36)]).tolist() == ["0", "A", "a"]
