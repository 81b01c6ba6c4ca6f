"""Clients with few validation examples choose by a cross-validation, in which no model has seen what it predicts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.data.federation import Federation, Split
from coterie.evaluation import Predictions
from coterie.evaluation.adoption import FEDERATED, LOCAL, choose
from coterie.experiment.setup import prepare
from coterie.experiment.take_home import held_out
from coterie.experiment.take_home.held_out import TINY, predict_held_out, tiny_clients
from coterie.storage import files

HOW: dict[str, Any] = {
    **{"model": "linear", "rounds": 4, "local_steps": 3, "lr": 0.3, "take_home": "best", "take_home_folds": 3},
    **{"engine": "stacked", "compile": False, "workers": 1},
}


def few(validation: tuple[int, ...] = (4, 2, 60), test_labels: Any = None) -> Federation:
    """Sites that share a rule, with so many validation examples each."""
    draw = np.random.default_rng(1)
    w = draw.standard_normal(6)
    xs, ys, clients, start = [], [], {}, 0
    for i, number in enumerate(validation):
        size = 20 + number + 50
        x = draw.standard_normal((size, 6)).astype(np.float32)
        y = (draw.random(size) < 1 / (1 + np.exp(-2 * x @ w))).astype(np.int64)
        if test_labels is not None:
            y[20 + number :] = test_labels(y[20 + number :])
        clients[f"site-{i + 1}"] = Split(*np.split(start + np.arange(size), [20, 20 + number]))
        xs.append(x)
        ys.append(y)
        start += size
    return Federation("few", *(torch.from_numpy(np.concatenate(part)) for part in (xs, ys)), clients, 2)


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return coterie.run("fedavg", few(), out=tmp_path_factory.mktemp("few") / "run", report=False, **HOW)


def test_all_known_examples_of_those_with_few_are_predicted_once(best: Any) -> None:
    federation = few()
    for result in (best, best.reference):
        assert torch.bincount(result.held_out.owner, minlength=3).tolist() == [24, 22, 0]
        for i in range(2):
            own = federation.split(i)
            known = federation.y[np.sort(np.concatenate([own.train, own.validation]))]
            assert sorted(result.held_out.of(i).y.tolist()) == sorted(known.tolist())


def test_the_choice_is_by_them(best: Any) -> None:
    for i, choice in enumerate(best.take_home.choices):
        held = i < 2
        assert (choice.held_out, choice.examples) == (held, [24, 22, 60][i])
        of = "held_out" if held else "validation"
        pair = [getattr(each, of).of(i) for each in (best, best.reference)]
        assert choice == choose(best.task, *pair, errors=1.0, held_out=held)
    told = files.read_json(best.path / "take_home.json")["clients"]
    assert [row["cross_validated"] for row in told] == [True, True, False]
    assert "cross-validated" in (best.path / "clients" / "site-1" / "card.md").read_text()


def test_a_fold_trains_on_nothing_that_it_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare("fedavg", few(), **HOW)
    seen: list[Federation] = []

    def trained(made: Any, rounds: int, engine: Any) -> Predictions:
        seen.append(made.federation)
        at = [torch.from_numpy(made.federation.split(i).test) for i in range(3)]
        owner = torch.arange(3).repeat_interleave(torch.tensor([len(each) for each in at]))
        y = made.federation.y[torch.cat(at)]
        return Predictions(torch.cat(at)[:, None], y, owner)

    monkeypatch.setattr(held_out, "_trained", trained)
    found = predict_held_out(setup, 2, None)  # type: ignore[arg-type]
    assert found is not None
    assert len(seen) == 3
    for i in range(2):
        own = setup.federation.split(i)
        known = np.sort(np.concatenate([own.train, own.validation]))
        assert sorted(found.of(i).outputs.flatten().tolist()) == known.tolist()
        for made in seen:
            split = made.split(i)
            assert not {*split.train} & {*split.test}
            assert {*split.train} | {*split.test} == {*known}
    for made in seen:  # the one with enough validation examples trains on what it always trains on
        assert np.array_equal(made.split(2).train, setup.federation.split(2).train)


def test_who_is_cross_validated() -> None:
    several = few((TINY - 1, TINY, 1))
    assert tiny_clients(prepare("fedavg", several, **HOW)) == [0, 2]
    assert tiny_clients(prepare("fedavg", several, **{**HOW, "take_home_folds": 0})) == []
    assert tiny_clients(prepare("fedavg", several, **{**HOW, "take_home": "federated"})) == []


def test_wrong_test_labels_change_no_choice(best: Any) -> None:
    other = coterie.run("fedavg", few(test_labels=lambda y: 1 - y), **HOW)
    assert other.take_home.choices == best.take_home.choices


def test_a_comparison_chooses_by_the_same_and_reads_it_again(tmp_path: Any) -> None:
    about: dict[str, Any] = {**HOW, "report": False}
    first = coterie.compare(["local", "fedavg"], [3, 4], few(), out=tmp_path, **about)
    assert (tmp_path / "fedavg-seed3" / "held-out.safetensors").exists()
    again = coterie.compare(["local", "fedavg"], [3, 4], few(), out=tmp_path, **about)
    one = coterie.run("fedavg", few(), seed=3, **HOW)
    told = files.read_json(tmp_path / "fedavg-seed3" / "take_home.json")["clients"]
    assert [row["kept"] for row in told] == [choice.kept for choice in one.take_home.choices]
    assert [row["cross_validated"] for row in told] == [True, True, False]
    assert again.rows == first.rows


def test_half_an_error_is_less_strict_than_one() -> None:
    """A regression whose squared errors differ by 0.75 standard errors."""
    task = prepare("fedavg", {"a": (torch.randn(20, 1), torch.randn(20))}, model="linear").task
    n, y, owner = 16, torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.int64)
    noise = torch.tensor([0.1, -0.1] * 8, dtype=torch.float64)
    d = noise + 0.75 * 1.03 * float(noise.std()) / 4
    alone = Predictions(torch.ones(n, 1, dtype=torch.float64), y, owner)
    ours = Predictions((1 - d).sqrt()[:, None], y, owner)
    assert choose(task, ours, alone, errors=0.5).kept != LOCAL
    assert choose(task, ours, alone, errors=2.0).kept == LOCAL
    assert choose(task, ours, alone, errors=0.0).kept in (FEDERATED, "average")


def test_a_patients_rows_are_held_out_together() -> None:
    given = few((4, 2, 60))
    groups = np.arange(len(given.y)) // 2 // 5 * 5  # five patients of every ten rows, some across the first splits
    federation = dataclasses.replace(given, groups=groups + np.arange(len(given.y)) % 5)
    for fold, holding in held_out._folds(federation, [0, 1], 3, 0):
        for i in holding:
            own = fold.split(i)
            assert not {*federation.groups[own.train]} & {*federation.groups[own.test]}  # type: ignore[index]


def test_nothing_is_cross_validated_where_nobody_chooses(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(held_out, "_folds", lambda *given: asked.append(given[1]) or [])
    coterie.run("local", few(), report=False, **{**HOW, "rounds": 1})
    coterie.compare(["local"], 1, few(), report=False, **{**HOW, "rounds": 1})
    coterie.tune(["fedavg"], few(), trials=1, out=tmp_path / "tune", report=False, **{**HOW, "rounds": 1})
    assert not asked
    coterie.compare(["local", "fedavg"], 1, few(), report=False, **{**HOW, "rounds": 1})
    assert asked == [[0, 1]] * 2  # by both, of which one is chosen
