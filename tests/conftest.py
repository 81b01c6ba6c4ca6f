"""What every test begins with."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()
_made: dict[Any, Any] = {}  # what `compiled_once` has compiled in this process


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share what a fixture makes in one process (of `pytest -n 2 --dist loadgroup`): it is made once.

    These are tests of a module that use the same of its fixtures, and tests of a method that look at its run, which
    `joined` makes.
    """
    for item in items:
        if next(item.iter_markers("xdist_group"), None) is not None:
            continue
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        used = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        shared = sorted(name for name, definitions in used.items() if definitions[-1].scope == "module")
        if "joined" in used and "method" in parameters:
            item.add_marker(pytest.mark.xdist_group(f"joined {parameters['method']}"))
        elif shared:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {' '.join(shared)}"))


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power: what a process wrote is there without waiting for the disk, 50 times a run.

    Tests of what is waited for (`tests/storage/test_files.py`) replace `os.fsync` themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def no_programs_on_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps that earlier runs left on disk would be taken instead of compiled: a test finds those it made itself."""
    from coterie.compute import entries

    folder = tmp_path_factory.getbasetemp() / "programs" / str(next(_numbers))
    monkeypatch.setattr(entries, "entry_path", lambda key: folder / f"{key}.json")
    return folder


@pytest.fixture
def package_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """package_of(kind, name="module:function", ...): an installed package that adds these names."""
    from coterie.core import extensions

    facts = tmp_path / "ours-1.0.dist-info"

    def install(kind: str, **names: str) -> None:
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
        with (facts / "entry_points.txt").open("a") as file:
            file.write(f"[{extensions.GROUPS[kind]}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()))
        extensions.added.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    extensions.added.cache_clear()


@pytest.fixture
def workers_keep_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker was handed stays with it, however late it begins.

    Else this process takes back what no worker has begun: on a busy machine it may do everything itself, and a test of
    what workers do would depend on luck.
    """
    from coterie.engine.process_pool import ProcessPool

    monkeypatch.setattr(ProcessPool, "_take_back", lambda self: None)
    monkeypatch.setattr(ProcessPool, "_work_waits", lambda self: False)


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile a step once for all tests of this process that ask for this, each of which begins with nothing compiled.

    Steps are the same where the store of steps on disk takes them for the same. What comes after compiling, such as
    keeping a step on disk, is done in every test.
    """
    from coterie.compute import compiled
    from coterie.compute.step_key import step_key

    really = compiled._compile

    def once(program: Any, example: list[Any], to_repeat: bool) -> Any:
        key = step_key(program, [compiled._kind(value, value.shape) for value in example]), to_repeat
        if key[0] is None:
            return really(program, example, to_repeat)
        if key not in _made:
            _made[key] = really(program, example, to_repeat)
        return _made[key]

    monkeypatch.setattr(compiled, "_compile", once)
