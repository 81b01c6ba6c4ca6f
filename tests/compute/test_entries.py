"""Entries about compiled code: what is damaged, of another version, or elsewhere is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.compute import entries
from coterie.compute.entries import library_entry, load_library, open_library, read_entry, save_library, write_entry
from coterie.compute.replay import library
from tests.marks import compiles

BAD = (OSError, ValueError, KeyError, TypeError)


def test_an_entry_is_read_as_it_was_written(no_programs_on_disk: Path) -> None:
    write_entry("one", {"numbers": [1, -2, 2**62], "words": "ä"})
    assert read_entry("one") == {"version": entries.VERSION, "key": "one", "numbers": [1, -2, 2**62], "words": "ä"}
    write_entry("one", {"numbers": []})
    assert read_entry("one")["numbers"] == []
    assert [path.name for path in no_programs_on_disk.iterdir()] == ["one.json"]  # no unfinished files


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def changed(text: str) -> str:
    return text.replace("17", "18")


def without_checksum(text: str) -> str:
    return json.dumps({"entry": json.loads(text)["entry"]})


def of_another_form(text: str) -> str:
    return "[1, 2]"


def empty(text: str) -> str:
    return ""


@pytest.mark.parametrize("damage", [truncated, changed, without_checksum, of_another_form, empty])
def test_a_damaged_entry_is_refused(damage: Any) -> None:
    write_entry("one", {"number": 17})
    path = entries.entry_path("one")
    path.write_text(damage(path.read_text()))
    with pytest.raises(BAD):
        read_entry("one")


def test_an_entry_of_another_version_or_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry("one", {"number": 17})
    entries.entry_path("two").write_text(entries.entry_path("one").read_text())
    with pytest.raises(ValueError, match="another version"):
        read_entry("two")
    monkeypatch.setattr(entries, "VERSION", entries.VERSION + 1)
    with pytest.raises(ValueError, match="another version"):
        read_entry("one")


@compiles
def test_a_library_is_opened_only_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = Path(library()._name).read_bytes()
    monkeypatch.setattr(entries, "cache_folder", lambda: tmp_path / "cache")
    place = tmp_path / "cache" / "library.so"
    place.parent.mkdir()
    place.write_bytes(content)
    save_library("one", str(place))
    found = load_library("one")
    assert found is not None
    assert found.scan
    about = library_entry(str(place))
    assert about["file"] == "library.so"
    place.rename(place.with_suffix(".old"))  # it stays what it is for those who have it open
    place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="has changed"):
        open_library(about)
    assert load_library("one") is None
    place.unlink()
    assert load_library("one") is None


def test_a_library_elsewhere_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "cache_folder", lambda: tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "library.so").write_bytes(b"something")
    save_library("one", str(tmp_path / "library.so"))
    assert not entries.entry_path("one").exists()
    with pytest.raises(ValueError):
        open_library({"file": "../library.so", "sha256": ""})


def test_what_cannot_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(entries, "entry_path", lambda key: tmp_path / "file" / f"{key}.json")
    monkeypatch.setattr(entries, "cache_folder", lambda: tmp_path)
    save_library("one", str(tmp_path / "file"))
    assert load_library("one") is None
