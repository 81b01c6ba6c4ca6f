import hashlib
import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from coterie.core.errors import DataError
from coterie.data.readers import cifar
from coterie.data.readers.cifar import BATCHES, read_pool, unpickle


def batches(folder, monkeypatch, name="cifar10", key=b"labels", classes=10, labels=None):
    """Small batches in the published form, whose checksums are taken for the published ones."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    images, given, digests = [], [], {}
    for batch in BATCHES[name]:
        x, y = draw.integers(256, size=(4, 3072)).astype(np.uint8), draw.integers(classes, size=4).tolist()
        y = labels or y
        data = pickle.dumps({b"data": x, key: y, b"filenames": [b"a.png"] * 4}, protocol=2)
        (folder / batch).write_bytes(data)
        digests[batch] = hashlib.md5(data).hexdigest()
        images.append(x)
        given += y
    monkeypatch.setitem(BATCHES, name, digests)
    return np.concatenate(images).reshape(-1, 3, 32, 32), np.array(given)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "key", "classes"), [("cifar10", b"labels", 10), ("cifar100", b"fine_labels", 100)])
def test_python_batches(tmp_path, monkeypatch, name, key, classes, packed):
    images, labels = batches(tmp_path / name, monkeypatch, name, key, classes)
    if packed:
        with tarfile.open(tmp_path / name / cifar.ARCHIVES[name], "w:gz") as tar:
            for batch in BATCHES[name]:
                tar.add(tmp_path / name / batch, f"published/{batch}")
                (tmp_path / name / batch).unlink()
    pool = read_pool(name, cifar.FILES[name].require(tmp_path))
    assert np.array_equal(pool.x.numpy(), images)
    assert np.array_equal(pool.y.numpy(), labels)
    assert pool.num_classes == classes
    assert pool.published_test.sum() == 4
    assert pool.published_test[-4:].all()


def test_a_pickle_that_is_not_the_published_one_is_not_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match=r"data_batch_1' is not the published file.*not opened"):
        read_pool("cifar10", tmp_path)
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("function", [os.system, eval, np.load, getattr])
def test_even_a_right_checksum_runs_nothing(function):
    class Evil:
        def __reduce__(self):
            return function, ("true",)

    with pytest.raises(DataError, match="which is not allowed"):
        unpickle(pickle.dumps({b"data": Evil()}), "batch")
    with pytest.raises(DataError, match="not a batch"):
        unpickle(b"cut o", "batch")
    with pytest.raises(DataError, match="not a batch"):
        unpickle(pickle.dumps([1]), "batch")


def test_batches_that_hold_something_else(tmp_path, monkeypatch):
    batches(tmp_path, monkeypatch, labels=[1, 2, 3, 10])
    with pytest.raises(DataError, match=r"data_batch_1': the label 10 of example 3"):
        read_pool("cifar10", tmp_path)
    batches(tmp_path, monkeypatch, key=b"other")
    with pytest.raises(DataError, match="does not have one entry of labels per image"):
        read_pool("cifar10", tmp_path)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("x"), io.BytesIO())
    for batch in BATCHES["cifar10"]:
        (tmp_path / batch).unlink()
    with pytest.raises(DataError, match="does not contain data_batch_1"):
        read_pool("cifar10", tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b cut off")
    with pytest.raises(DataError, match="is damaged"):
        read_pool("cifar10", tmp_path)


def test_sheets_are_the_same_images(tmp_path, monkeypatch):
    images, labels = batches(tmp_path, monkeypatch)
    expected = read_pool("cifar10", tmp_path)
    for i, batch in enumerate(BATCHES["cifar10"]):
        sheet = images[4 * i : 4 * i + 4].transpose(0, 2, 3, 1).reshape(4, 1024, 3)
        Image.fromarray(np.ascontiguousarray(sheet)).save(tmp_path / f"{batch}.png")
        (tmp_path / batch).unlink()
    (tmp_path / "train_lables.json").write_text(json.dumps(labels[:-4].tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps(labels[-4:].tolist()))
    pool = read_pool("cifar10", tmp_path)
    assert np.array_equal(pool.x, expected.x)
    assert np.array_equal(pool.y, expected.y)
    assert np.array_equal(pool.published_test, expected.published_test)
    (tmp_path / "test_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(DataError, match=r"test_lables.json' is not a list of 4 labels"):
        read_pool("cifar10", tmp_path)
