"""Candidates side by side do what they do one after another, and methods that cannot be trained so are noticed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.core.batches import Batches
from coterie.core.method import CountedParams, Info
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import quadratic_penalty, train
from coterie.core.tree import Params
from coterie.data.minibatches import Plan
from coterie.experiment.setup import Setup
from coterie.experiment.several.merged import MergedFederation
from coterie.experiment.simulation import Simulation
from coterie.experiment.tuning import candidates
from coterie.experiment.tuning.side_by_side import WithNumbers, agree, kind_of
from coterie.experiment.tuning.space import Numbers, Values, with_values
from coterie.experiment.tuning.tune import prepare_searches, run_tuning
from coterie.methods import Ditto, FedAvg, FedProx
from tests.experiment.tuning.kit import SMALL, federation

STACKED: dict[str, Any] = {**SMALL, "engine": "stacked", "rounds": 6, "trials": 4}
SITES = federation("same", sites=3, rows=20, features=4)


def searched(methods: list[Any], out: Path, **changed: Any) -> dict[str, Any]:
    """The values, curves and fates of all candidates."""
    searches = prepare_searches(methods, SITES, **{**STACKED, **changed})
    run_tuning(searches, out, test=False, report=False)
    return {label: one.candidates for label, one in searches.methods.items()}


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for label, ones in expected.items():
        for mine, other in zip(found[label], ones, strict=True):
            assert mine.values == pytest.approx(other.values)
            assert bool(mine.diverged) == bool(other.diverged)
            assert len(mine.curve) == len(other.curve)
            for here, there in zip(mine.curve, other.curve, strict=True):
                assert here == pytest.approx(there, abs=1e-5)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each piece of merged work is for."""
    seen: list[int] = []
    real = MergedFederation.union

    def noted(self: MergedFederation, works: Any) -> Any:
        seen.append(len(works))
        return real(self, works)

    monkeypatch.setattr(MergedFederation, "union", noted)
    return seen


def test_side_by_side_is_one_after_another(tmp_path: Path, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = searched(["ditto"], tmp_path / "together")
    assert set(widths) == {2, 4}  # the rungs: four candidates, then two
    monkeypatch.setattr(candidates.Engines, "shared", lambda *_: None)
    assert_alike(found, searched(["ditto"], tmp_path / "alone"))


def test_what_is_mapped_is_not_put_into_words() -> None:
    """`vmap` asks a function without a name for its `repr`, at every call: all of the federation's data, once."""
    sim = Simulation.start(FedAvg(), Task(torch.nn.Linear(4, 2), num_classes=2), SITES, Plan(10, 1), 3, seed=0)
    assert len(repr(WithNumbers(sim, "_local_update"))) < 200


def test_a_stop_in_between_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = searched(["fedavg"], tmp_path / "whole")
    real, calls = MergedFederation.answer, []

    def stopping(self: MergedFederation, asked: Any, say: Any) -> Any:
        calls.append(asked)
        if len(calls) in (2, 9):
            raise KeyboardInterrupt
        return real(self, asked, say)

    monkeypatch.setattr(MergedFederation, "answer", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            searched(["fedavg"], tmp_path / "stopped")
    found = searched(["fedavg"], tmp_path / "stopped")
    for label, ones in expected.items():
        assert [(one.values, one.curve) for one in found[label]] == [(one.values, one.curve) for one in ones]


def test_one_that_diverges_leaves_the_others_alone(tmp_path: Path) -> None:
    wide = {"search": {"lr": Numbers(0.01, 1e30, log=True)}, "model": "mlp"}
    found = searched([], tmp_path, **wide)["local"]
    fates = [bool(one.diverged) for one in found]
    assert any(fates)
    assert not fates[0]
    assert all(one.curve for one in found if not one.diverged)


@dataclasses.dataclass(frozen=True)
class Branching(FedProx):
    """A method that branches on a number."""

    mu: float = 0.5

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        if self.mu > 0.2:
            return super().local_update(task, client, down, batches)
        return FedAvg(self.optimizer).local_update(task, client, down, batches)


@dataclasses.dataclass(frozen=True)
class Deaf(FedProx):
    """A method that does not hear a number that is a tensor."""

    mu: float = 0.5

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], CountedParams, Info]:
        strength = torch.tensor(self.mu if isinstance(self.mu, float) else 9.0)
        w, loss = train(task, self.optimizer, down, batches, quadratic_penalty, (down, strength))
        return (), CountedParams(task.sent(w), batches.count), {"loss": loss}


def pair(method: Any, *values: Values) -> bool:
    setup: Setup = coterie.prepare(method, SITES, **{k: v for k, v in SMALL.items() if k != "optimizer"})
    config = setup.config
    sims = [
        Simulation.start(with_values(setup.method, own), setup.task, setup.federation, config.plan(), 3, 0)
        for own in values
    ]
    return agree(sims, values)


@pytest.mark.parametrize("method", [Ditto(SGD(0.1)), FedProx(SGD(0.1)), FedAvg(SGD(0.1, momentum=0.5))])
def test_methods_whose_numbers_are_values_agree(method: Any) -> None:
    name = {"Ditto": "lam", "FedProx": "mu"}.get(type(method).__name__)
    own = [{"lr": lr, **({name: strength} if name else {})} for lr, strength in ((0.3, 0.1), (0.1, 2.0))]
    assert pair(method, *own)


def test_methods_that_need_to_know_a_number_do_not() -> None:
    assert pair(Branching(SGD(0.1)), {"lr": 0.3}, {"lr": 0.2})
    assert not pair(Branching(SGD(0.1)), {"mu": 0.3}, {"mu": 0.1})
    assert not pair(Deaf(SGD(0.3)), {"mu": 0.3}, {"mu": 5.0})


def test_such_methods_are_searched_all_the_same(tmp_path: Path, widths: list[int]) -> None:
    found = searched([Branching(SGD(0.1))], tmp_path, search=["mu=0.1..1"], rounds=2)
    label = next(label for label in found if label != "local")
    assert all(one.curve for one in found[label])
    assert len({one.values["mu"] for one in found[label]}) == 4


def test_candidates_of_other_kinds_are_apart() -> None:
    assert kind_of({"lr": 0.1, "mu": "auto"}) != kind_of({"lr": 0.1, "mu": 0.5})
    assert kind_of({"lr": 0.1, "clusters": 2}) != kind_of({"lr": 0.1, "clusters": 3})
    assert kind_of({"lr": 0.1, "clusters": 2}) == kind_of({"lr": 0.3, "clusters": 2})
