import sys

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.core.errors import DataError
from coterie.data.loading import load
from coterie.data.readers import folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "coterie"


def picture(path, colour, size=(12, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def office(root, between=""):
    for domain, shade in (("amazon", 10), ("dslr", 20), ("webcam", 30)):
        for label in ("bike", "mug"):
            for i in range(4):
                picture(root / domain / between / label / f"{i}.png", (shade, i, 0 if label == "bike" else 50))
    return root


@pytest.mark.parametrize("between", ["", "images"])
def test_domains_are_clients_and_folders_classes(tmp_path, between):
    pool = folders.read_pool("office-31", office(tmp_path / "office-31", between), 16)
    assert pool.owners == ("amazon", "dslr", "webcam")
    assert pool.classes == ("bike", "mug")
    assert pool.x.shape == (24, 3, 16, 16)
    assert pool.x.dtype == torch.uint8
    assert pool.y.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 3
    assert pool.x[9, :, 5, 5].tolist() == [20, 1, 0]


def test_the_shorter_side_is_resized_and_the_middle_taken(tmp_path):
    image = np.zeros((10, 30, 3), np.uint8)
    image[:, 10:20] = 200
    Image.fromarray(image).save(tmp_path / "a.png")
    assert (folders.read_image(tmp_path / "a.png", 10) == 200).all()
    assert folders.read_image(tmp_path / "a.png", 20).shape == (3, 20, 20)


def test_made_once_and_again_when_an_image_changes(tmp_path, own_cache, monkeypatch):
    root = office(tmp_path / "office-31")
    first = folders.read_pool("office-31", root, 16)
    assert len(list(own_cache.iterdir())) == 1
    monkeypatch.setattr(folders, "read_image", lambda path, size: pytest.fail("made again"))
    assert torch.equal(folders.read_pool("office-31", root, 16).x, first.x)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent))
    picture(root / "amazon/bike/0.png", (99, 99, 99), size=(50, 50))
    assert folders.read_pool("office-31", root, 16).x[0, 0, 0, 0] == 99


def test_a_broken_image_is_named_and_nothing_half_written_stays(tmp_path, own_cache):
    root = office(tmp_path / "office-31")
    (root / "dslr/mug/2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"dslr/mug/2.png' cannot be read as an image"):
        folders.read_pool("office-31", root, 16)
    assert list(own_cache.iterdir()) == []


def test_what_is_no_such_folder(tmp_path):
    picture(tmp_path / "a/only/0.png", (1, 1, 1))
    with pytest.raises(DataError, match=r"1 class\(es\)"):
        folders.read_pool("own", tmp_path)
    (tmp_path / "a/other").mkdir()
    (tmp_path / "a/only/0.png").unlink()
    with pytest.raises(DataError, match="has no images"):
        folders.read_pool("own", tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'coterie\[images\]'"):
        folders.read_pool("office-31", office_of_text(tmp_path), 16)


def office_of_text(root):
    for label in ("bike", "mug"):
        (root / "amazon" / label).mkdir(parents=True)
        (root / "amazon" / label / "0.png").write_bytes(b"")
    return root


def test_by_name_with_resize_and_normalise(tmp_path, monkeypatch):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    office(tmp_path / "office-31")
    settings = {"partition": "natural", "scaling": "imagenet", "image_size": 16, "drop_duplicates": False}
    federation = load("office-31", 0, **settings)
    assert federation.names == ("amazon", "dslr", "webcam")
    red = federation.decode(federation.x)[0, 0, 0, 0]
    torch.testing.assert_close(red, torch.tensor((10 / 255 - 0.485) / 0.229))
