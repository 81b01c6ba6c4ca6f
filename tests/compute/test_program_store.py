"""Steps that are kept on disk: the same bits without compiling, and what is wrong with them is found."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.compute import compiled, entries, program_store
from coterie.compute.compiled import NotStored, compiling, observing, stored_only
from coterie.compute.entries import read_entry, write_entry
from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.optimizers import SGD
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.training import train
from coterie.engine.stacked import stacked
from coterie.experiment.progress import Silent
from tests.compute.test_replay import batches
from tests.marks import compiles

pytestmark = [compiles, pytest.mark.xdist_group("steps on disk"), pytest.mark.usefixtures("compiled_once")]
CLIENTS = 3


@pytest.fixture(autouse=True)
def nothing_compiled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_new_process(monkeypatch)


def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(compiled, "_unrepeatable", set())


def no_compiler(*_: Any) -> Any:
    raise AssertionError("it is compiled")


def trained(lr: float = 0.1, threads: int = 1, decay: float = 0.0) -> list[Tensor]:
    """Three clients' models after a few steps; their carry has a momentum."""
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(lr, momentum=0.9, weight_decay=decay), params, data)

    with compiling(threads=threads):
        return tree.leaves(stacked(one, (params,), batches(20, 5)))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def programs(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.json") if not path.name.startswith("replay-")]


def the_key(folder: Path) -> str:
    (path,) = programs(folder)
    return path.stem


def test_what_is_found_on_disk_gives_the_same_bits_and_compiles_nothing(
    no_programs_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stored_only(), pytest.raises(NotStored):
        trained()
    expected = trained()
    assert len(programs(no_programs_on_disk)) == 1
    as_in_a_new_process(monkeypatch)
    monkeypatch.setattr(compiled, "_compile", no_compiler)
    for threads in (1, 2):
        with stored_only(), observing() as seen:
            assert same(trained(threads=threads), expected)
        assert [each.path for each in seen] == ["replayed"]
    assert not same(trained(lr=0.2), expected)  # another step size, which enters the same step as a value
    assert compiled.compilations() == 1
    with pytest.raises(AssertionError, match="it is compiled"):
        trained(decay=0.1)  # another step


def test_a_step_that_reads_constants_is_not_kept(no_programs_on_disk: Path) -> None:
    trained()
    (known,) = compiled._compiled.values()
    assert known.replayed is not None
    program_store.save("another", dataclasses.replace(known.replayed, has_constants=True))
    assert program_store.load("another") is None
    program_store.save("another", known.replayed)
    assert program_store.load("another") is not None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change(path: Path) -> None:
    path.write_text(path.read_text().replace('"inputs": ', '"inputs": 1'))


def rewrite(path: Path, **about: Any) -> None:
    entry = read_entry(path.stem)
    write_entry(path.stem, {**{name: each for name, each in entry.items() if name not in ("version", "key")}, **about})


def other_fields(path: Path) -> None:
    rewrite(path, fields=21)


def other_operands(path: Path) -> None:
    rewrite(path, owner=[1000 for _ in read_entry(path.stem)["owner"]])


def far_away(path: Path) -> None:
    entry = read_entry(path.stem)
    beyond = [1 << 40 if owner >= entry["inputs"] else 0 for owner in entry["owner"]]
    rewrite(path, offset=beyond)


def other_kernels(path: Path) -> None:
    rewrite(path, kernels=[[at, "nothing"] for at, _ in read_entry(path.stem)["kernels"]])


def no_operations(path: Path) -> None:
    rewrite(path, ops=[])


def a_library_that_is_gone(path: Path) -> None:
    rewrite(path, libraries=[{**each, "file": "gone.so"} for each in read_entry(path.stem)["libraries"]])


def a_library_that_has_changed(path: Path) -> None:
    rewrite(path, libraries=[{**each, "sha256": "0" * 64} for each in read_entry(path.stem)["libraries"]])


DAMAGES = [
    *(truncate, change, other_fields, other_operands, far_away, other_kernels, no_operations),
    *(a_library_that_is_gone, a_library_that_has_changed),
]


def test_a_damaged_entry_is_made_anew(no_programs_on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained()
    key = the_key(no_programs_on_disk)
    path, good = entries.entry_path(key), entries.entry_path(key).read_text()
    assert program_store.load(key) is not None
    for damage in DAMAGES:
        path.write_text(good)
        damage(path)
        assert path.read_text() != good
        assert program_store.load(key) is None, damage.__name__
    as_in_a_new_process(monkeypatch)
    assert same(trained(), expected)
    assert path.read_text() == good


def test_an_entry_of_another_version_is_made_anew(no_programs_on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    key = the_key(no_programs_on_disk)
    monkeypatch.setattr(entries, "VERSION", 0)
    assert program_store.load(key) is None


def test_a_wrong_program_is_found_out(
    no_programs_on_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The program of a step with weight decay stands where that of ours should be."""
    expected = trained()
    right = the_key(no_programs_on_disk)
    good = entries.entry_path(right).read_text()
    trained(decay=0.5)
    (wrong,) = {path.stem for path in programs(no_programs_on_disk)} - {right}
    about = read_entry(wrong)
    write_entry(right, {name: each for name, each in about.items() if name not in ("version", "key")})
    assert program_store.load(right) is not None  # nothing is wrong with it of itself
    as_in_a_new_process(monkeypatch)
    with caplog.at_level(logging.INFO, "coterie"):
        assert same(trained(), expected)
    assert "a step that was kept on disk gives other results" in caplog.text
    assert entries.entry_path(right).read_text() == good


def test_a_step_without_a_key_is_not_kept(no_programs_on_disk: Path) -> None:
    class Odd:
        def __call__(self, value: Any) -> Any:
            return 2 * value

    odd = Odd()

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        return carry + odd(batch.x.sum(0))

    data = batches(4, 5)
    alone = Batches(data.x, data.y, *(leaf[0] for leaf in data[2:6]))
    with compiling():
        scan(step, torch.zeros(4), (), alone)
    assert compiled.compilations() == 1
    assert not programs(no_programs_on_disk)


DATA = {
    f"{i}": (torch.randn(30, 4, generator=torch.Generator().manual_seed(i)), torch.arange(30) % 2) for i in range(3)
}
HOW: dict[str, Any] = {"model": "linear", "rounds": 4, "batch_size": 10, "reference": False, "report": False}
HOW |= {"engine": "stacked", "compile": True, "workers": 2}


class StopAfterTwo(Silent):
    def round(self, record: dict[str, Any], metric: str) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("first", ["recorded", "from disk"])
def test_a_run_resumed_with_the_other_kind_of_step_is_the_same_bit_for_bit(
    first: str, tmp_path: Path, no_programs_on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 10: begun with a step that was recorded and continued with the one on disk, and the other way round."""
    whole = coterie.run("fedmap", DATA, out=tmp_path / "whole", **HOW)
    assert programs(no_programs_on_disk)
    kept = {path: path.read_text() for path in programs(no_programs_on_disk)}
    as_in_a_new_process(monkeypatch)
    if first == "recorded":
        for path in kept:
            path.unlink()
    with pytest.raises(KeyboardInterrupt):
        coterie.run("fedmap", DATA, out=tmp_path / "run", progress=StopAfterTwo(), **HOW)
    assert [each.from_disk for each in compiled._compiled.values()] == [first == "from disk"] * len(kept)
    as_in_a_new_process(monkeypatch)
    for path in kept:
        path.unlink() if first == "from disk" else path.write_text(kept[path])
    resumed = coterie.resume(tmp_path / "run", data=DATA)
    assert [each.from_disk for each in compiled._compiled.values()] == [first == "recorded"] * len(kept)
    assert same(tree.leaves(resumed.views), tree.leaves(whole.views))
    assert [each["test"] for each in resumed.rounds] == [each["test"] for each in whole.rounds]
