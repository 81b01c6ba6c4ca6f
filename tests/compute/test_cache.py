"""Compiled steps are kept in a folder of the user's own; where there can be none, a temporary one serves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coterie.compute import cache


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = cache.folder.__wrapped__  # not the one that is kept
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find() == (tmp_path / "coterie" / "torchinductor", None)
    assert (tmp_path / "coterie" / "torchinductor").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # where no folder can be made
    found = cache.folder.__wrapped__()
    assert found.path.is_dir()
    assert "compiled steps are not kept" in (found.why_temporary or "")
    assert "Not a directory" in (found.why_temporary or "")


def test_a_folder_with_a_space_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchInductor's command line for the compiler would fall apart."""
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my home"))
    found = cache.folder.__wrapped__()
    assert " " not in str(found.path)
    assert "whose path has a space" in (found.why_temporary or "")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_the_environment_is_as_it_was_afterwards(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(cache.VARIABLE, before)
    with cache.environment():
        assert os.environ[cache.VARIABLE] == (before or str(cache.cache_folder()))
    assert os.environ.get(cache.VARIABLE) == before


def test_the_folder_that_pytorch_names_of_itself_is_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(cache.VARIABLE, default_cache_dir())
    with cache.environment():
        assert os.environ[cache.VARIABLE] == str(cache.cache_folder())
    assert os.environ[cache.VARIABLE] == default_cache_dir()
