"""Which engine runs a run, and what is said about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core.batches import Batches
from coterie.core.task import Task
from coterie.engine import Choice, Engine
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Silent
from coterie.methods import FedAvg
from tests.marks import compiles

DATA = {
    f"{i}": (torch.randn(30, 4, generator=torch.Generator().manual_seed(i)), torch.arange(30) % 2) for i in range(3)
}
QUICK: dict[str, Any] = {"model": "linear", "rounds": 2, "batch_size": 10, "reference": False, "report": False}


@dataclasses.dataclass(frozen=True)
class Unstackable(FedAvg):
    """It looks at a value, which clients that are stacked do not have."""

    def local_update(self, task: Task, client: Any, down: Any, batches: Batches) -> Any:
        assert float(batches.count) < 1e9
        return super().local_update(task, client, down, batches)


class Heard(Silent):
    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, text: str) -> None:
        self.words.append(text)


def test_a_method_that_cannot_be_stacked_is_compared_with_one_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen for another method is tried first, and given up if it does not work."""
    chosen = Choice(Engine("stacked", compiled=True, threads=True, workers=2), {})
    monkeypatch.setattr(Choices, "replayed", lambda *_: chosen)
    result = coterie.run(Unstackable(), DATA, engine="auto", **QUICK)
    assert len(result.rounds) == 2


@compiles
@pytest.mark.parametrize("kind", ["loop", "stacked"])
def test_the_path_of_the_steps_is_what_was_seen(tmp_path: Path, kind: str) -> None:
    coterie.run("fedavg", DATA, engine=kind, compile=True, workers=1, out=tmp_path / "run", **QUICK)
    about = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert (about["engine"]["compiled"], about["steps"]["path"], about["steps"]["why"]) == (True, "replayed", "")


@compiles
def test_steps_that_are_refused_are_not_called_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("the compiler is out of order\nand more")

    monkeypatch.setattr("coterie.compute.compiled.compile_graph", refuse)
    monkeypatch.setattr("coterie.compute.compiled._compiled", {})
    monkeypatch.setattr("coterie.engine.autotune.unavailable", lambda: None)
    monkeypatch.setattr("coterie.compute.compiled.unavailable", lambda: None)
    heard = Heard()
    how: dict[str, Any] = {"engine": "loop", "compile": True, "workers": 1}
    coterie.run("fedavg", DATA, out=tmp_path / "run", progress=heard, **how, **QUICK)
    about = json.loads((tmp_path / "run" / "engine.json").read_text())
    assert (about["engine"]["compiled"], about["steps"]["path"]) == (False, "plain")
    assert "steps cannot be compiled here (the compiler is out of order)" in " ".join(heard.words)


@compiles
def test_a_resumed_run_says_that_it_continues_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Silent):
        def round(self, record: dict[str, Any], metric: str) -> None:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        coterie.run("fedavg", DATA, engine="stacked", compile=True, workers=1, out=out, progress=Stop(), **QUICK)
    monkeypatch.setenv("COTERIE_BACKEND", "plain")
    heard = Heard()
    coterie.resume(out, data=DATA, progress=heard)
    words = (
        "continued without compiling, so rounding differs from here on: COTERIE_BACKEND=plain asks for ordinary PyTorch"
    )
    assert words in heard.words
    assert words in json.loads((out / "engine.json").read_text())["notes"]
