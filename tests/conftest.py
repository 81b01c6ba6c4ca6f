"""What every test begins with."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_programs_on_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps that earlier runs left on disk would be taken instead of compiled: a test finds those it made itself."""
    from coterie.compute import entries

    folder = tmp_path_factory.getbasetemp() / "programs" / str(next(_numbers))
    monkeypatch.setattr(entries, "entry_path", lambda key: folder / f"{key}.json")
    return folder
