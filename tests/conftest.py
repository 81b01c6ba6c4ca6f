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


@pytest.fixture
def workers_keep_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker was handed stays with it, however late it begins.

    Else this process takes back what no worker has begun: on a busy machine it may do everything itself, and a test of
    what workers do would depend on luck.
    """
    from coterie.engine.process_pool import ProcessPool

    monkeypatch.setattr(ProcessPool, "_take_back", lambda self: None)
    monkeypatch.setattr(ProcessPool, "_work_waits", lambda self: False)
