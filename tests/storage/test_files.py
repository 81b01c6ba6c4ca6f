"""A file is the old one or the new one, never half of one."""

import json
import math
import os

import pytest
import torch

from coterie.core.errors import CheckpointError
from coterie.storage import files


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "value.txt"
    files.write_text(path, "old")

    def fails(temporary):
        temporary.write_text("ha")
        raise OSError(28, os.strerror(28))

    with pytest.raises(CheckpointError, match=r"value.txt' cannot be written: No space left"):
        files.write(path, fails)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("number", "waits", "syncs"), [(2, 3, 0), (files.SYNC_ONCE_FILES, 0, 1)])
def test_few_files_wait_for_the_disk_one_by_one_and_many_together(tmp_path, monkeypatch, number, waits, syncs):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append("file"))
    monkeypatch.setattr(os, "sync", lambda: seen.append("disk"))
    with files.together(number):
        for name in "abc":
            files.write_text(tmp_path / name, name)
        assert seen == ["file"] * waits
    assert seen == ["file"] * waits + ["disk"] * syncs


def test_a_block_in_a_block_leaves_the_wait_to_the_outer_one(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "sync", lambda: seen.append("disk"))
    with files.together(100):
        with files.together(100):
            files.write_text(tmp_path / "a", "a")
        assert not seen
    assert seen == ["disk"]


def test_json_has_null_for_what_is_not_finite():
    value = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf}}
    assert json.loads(files.to_json(value)) == {"a": [1.0, None, [None, 2]], "b": {"c": None}}


def test_tensors_come_back_and_a_changed_file_is_named(tmp_path):
    path, value = tmp_path / "folder" / "t.safetensors", torch.arange(6.0).reshape(2, 3)
    files.write_tensors(path, {"a": value, "transposed": value.T, "again": value})
    expected = files.checksum(path)
    found = files.read_tensors(path, expected)
    assert torch.equal(found["transposed"], value.T)
    assert torch.equal(found["again"], value)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"t.safetensors' is corrupted"):
        files.read_tensors(path, expected)
    with pytest.raises(CheckpointError, match=r"none' cannot be read"):
        files.check(tmp_path / "none", expected)
