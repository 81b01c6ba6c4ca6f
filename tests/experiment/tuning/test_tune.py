"""A search: equal budgets, blind to test examples, the same after a stop, and better than what it began with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import coterie
from coterie.core.errors import CheckpointError, ConfigError, CoterieError
from coterie.core.toml import read_toml
from coterie.experiment.progress import Silent
from coterie.experiment.tuning import propose, search
from coterie.experiment.tuning.halving import Rung
from coterie.experiment.tuning.journal import Point
from coterie.experiment.tuning.search import Candidate, MethodSearch
from coterie.experiment.tuning.tune import Tuning, compare_tuned, tune
from tests.experiment.tuning.kit import SMALL, federation, with_wrong_test_labels

SEARCH: dict[str, Any] = {**SMALL, "rounds": 6, "trials": 4}


def tried(found: Tuning) -> dict[str, Any]:
    """Everything that a search computed."""
    return {
        label: [(each.values, each.curve, each.rungs) for each in one.candidates]
        for label, one in found.searches.methods.items()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuning, Path]:
    out = tmp_path_factory.mktemp("tune") / "search"
    return tune(["fedavg", "ditto"], federation("same"), out=out, **SEARCH), out


def test_every_method_and_local_has_the_same_budget(whole: tuple[Tuning, Path]) -> None:
    found, out = whole
    assert list(found.searches.methods) == ["local", "fedavg", "ditto"]
    lines = [json.loads(line) for line in (out / "search.jsonl").read_text().splitlines()]
    for label, one in found.searches.methods.items():
        assert len(one.candidates) == 4
        assert one.rounds == found.searches.budget == 4 * 2 + 2 * 4
        trained = sum(len(line["curve"]) for line in lines if line["method"] == label)
        assert trained == found.searches.budget  # each round is scored, so each was trained once
    assert found.comparison is not None
    assert found.comparison.methods == ("local", found.best)


def test_the_first_candidate_is_what_is_set_and_the_chosen_one_is_the_best(whole: tuple[Tuning, Path]) -> None:
    found, out = whole
    for label, one in found.searches.methods.items():
        assert one.candidates[0].values["lr"] == 0.01, label
        last = [each for each in one.candidates if each.rungs == len(one.rungs)]
        scores = [point.value for each in last for point in each.curve]
        assert one.score == max(scores)
        assert read_toml(out / f"{label}.toml")["optimizer"]["lr"] == one.chosen.values["lr"]
    assert found.method("ditto").lam == found.values("ditto")["lam"]  # type: ignore[attr-defined]
    assert found.validation() == max(one.score for one in found.searches.methods.values())


def test_the_settings_that_were_chosen_are_what_was_tested(whole: tuple[Tuning, Path]) -> None:
    found, out = whole
    for label in ("local", found.best):
        config = read_toml(out / "chosen" / label / "config.toml")
        assert config["optimizer"]["lr"] == found.values(label)["lr"]
        assert config["rounds"] == 6
    summary = json.loads((out / "tuning.json").read_text())
    assert summary["best"] == found.best
    assert not (out / "candidates").exists()


def test_wrong_test_labels_change_no_choice(whole: tuple[Tuning, Path]) -> None:
    found, _ = whole
    blind = tune(["fedavg", "ditto"], with_wrong_test_labels(federation("same")), **SEARCH)
    assert tried(blind) == tried(found)
    assert blind.best == found.best
    assert blind.comparison is not None
    assert found.comparison is not None
    assert blind.comparison.mean(blind.best) < 0.5 < found.comparison.mean(found.best)


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(
    whole: tuple[Tuning, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = whole
    calls, real = [], search.train_until

    def stopping(*given: Any, **options: Any) -> Any:
        calls.append(given)
        if len(calls) in (2, 4, 6):
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(search, "train_until", stopping)
    out = tmp_path / "search"
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(["fedavg", "ditto"], federation("same"), out=out, **SEARCH)
    with (out / "search.jsonl").open("a") as file:
        file.write('{"method": "ditto", "cand')  # what a kill may leave
    again = tune(["fedavg", "ditto"], federation("same"), out=out, **SEARCH)
    assert tried(again) == tried(found)
    assert len(calls) == 6 + 3  # every rung of every method once, and those that were stopped


def test_a_state_that_was_lost_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SEARCH, "trials": 3}
    expected = tune([], federation("same"), **settings)
    real = search.SearchFolder.states
    monkeypatch.setattr(search.SearchFolder, "states", lambda self, *who: _emptied(real(self, *who)))
    assert tried(tune([], federation("same"), **settings)) == tried(expected)


def _emptied(states: Any) -> Any:
    import shutil

    shutil.rmtree(states.path, ignore_errors=True)
    return states


def test_a_folder_with_another_search_is_refused(whole: tuple[Tuning, Path]) -> None:
    _, out = whole
    with pytest.raises(CheckpointError, match=r"another search \(settings: rounds 6, not 12; rungs"):
        tune(["fedavg", "ditto"], federation("same"), out=out, **{**SEARCH, "rounds": 12})


def test_what_is_given_is_not_searched() -> None:
    found = tune(["fedprox"], federation("same"), **{**SEARCH, "trials": 2, "mu": 0.5, "lr": 0.1, "optimizer": None})
    one = found.searches.methods["fedprox"]
    assert one.space == {}
    assert found.method("fedprox").mu == 0.5  # type: ignore[attr-defined]


def test_models_are_searched_if_asked_for() -> None:
    found = tune([], federation("same"), **{**SEARCH, "search": ["model=linear|mlp"], "trials": 6})
    one = found.searches.methods["local"]
    assert {each.values["model"] for each in one.candidates} == {"linear", "mlp"}
    assert found.searches.chosen("local").config.model == found.values("local")["model"]


def test_candidates_that_diverge_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "SPREAD", 100)
    found = tune([], federation("same"), **{**SEARCH, "model": "mlp", "search": ["lr=0.05..1e30"], "trials": 5})
    lost = [each for each in found.searches.methods["local"].candidates if each.diverged]
    assert lost
    assert "training diverged: client" in lost[0].diverged
    assert found.values("local")["lr"] < 1e3
    with pytest.raises(CoterieError, match="none of 1 candidates could be trained"):
        tune([], federation("same"), **{**SEARCH, "model": "mlp", "optimizer": {"lr": 1e30}, "trials": 1})


def test_if_the_last_candidate_diverges_the_best_of_those_before_is_chosen() -> None:
    """Of three candidates one went on, and diverged in round 3: of the others, the one that was better in round 2."""
    setup: Any = SimpleNamespace(metric="accuracy")
    candidates = [
        Candidate(0, {"lr": 1.0}, (Point(2, 0.9, 0.1),), rungs=2, diverged="in round 3"),
        Candidate(1, {"lr": 0.1}, (Point(2, 0.5, 0.7),), rungs=1),
        Candidate(2, {"lr": 0.2}, (Point(2, 0.6, 0.6),), rungs=1),
    ]
    one = MethodSearch("local", setup, {}, (Rung(3, 2), Rung(1, 6)), candidates)
    assert one.chosen.number == 2
    assert one.score == 0.6
    candidates[0].diverged = ""
    assert one.chosen.number == 0
    for each in candidates:
        each.diverged = "in round 1"
    with pytest.raises(CoterieError, match=r"local: none of 3 candidates could be trained \(in round 1\)"):
        _ = one.chosen


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        tune(["fedavgg"], federation("same"), **{**SEARCH, "search": ["lr=1..0"], "roundz": 3})
    problems = "\n".join(raised.value.problems)
    for words in ("the range is empty", "there is no method 'fedavgg'", "'roundz'"):
        assert words in problems
    with pytest.raises(ConfigError, match="trials = 0"):
        tune([], federation("same"), **{**SEARCH, "trials": 0})


def test_without_optuna_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[tune\]'"):
        tune([], federation("same"), **SEARCH)


def test_a_comparison_is_tuned_on_one_split_which_all_seeds_share(tmp_path: Path) -> None:
    out = tmp_path / "all"
    compared = compare_tuned(["fedavg"], 2, federation("same"), out=out, **{**SEARCH, "trials": 3})
    assert compared.methods == ("local", "fedavg")
    assert compared.seeds == (0, 1)
    chosen = json.loads((out / "tuning" / "tuning.json").read_text())["methods"]["fedavg"]["chosen"]["values"]
    for seed in (0, 1):
        config = read_toml(out / f"fedavg-seed{seed}" / "config.toml")
        assert config["optimizer"]["lr"] == chosen["lr"]
        assert config["split_seed"] == 0
    assert not (out / "tuning" / "chosen").exists()  # the search saw no test example, and neither did anything after it


def test_news_count_the_rounds_of_the_budget() -> None:
    seen: list[Any] = []

    class Listening(Silent):
        def start(self, label: str, done: int, rounds: int) -> None:
            seen.append((label, done, rounds))

        def round(self, record: dict[str, Any], metric: str) -> None:
            seen.append(record["round"])

    tune([], federation("same"), **{**SEARCH, "trials": 2, "halving": False}, progress=Listening())
    assert seen[:3] == [("local", 0, 12), 6, 12]


def test_it_is_public() -> None:
    assert coterie.tune is tune
    assert coterie.compare_tuned is compare_tuned
