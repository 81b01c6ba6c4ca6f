"""Early stopping: when it is due, that it is honest, and that nothing goes on after it."""

import json
import math

import pytest
import torch

import coterie
from coterie.core.errors import CheckpointError, ConfigError, CoterieWarning
from coterie.core.toml import read_toml
from coterie.experiment import stopping
from coterie.experiment.config import Config
from coterie.experiment.progress import Silent
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.several.lockstep import MergedProgress
from coterie.experiment.stopping import Stop, early_stop
from coterie.methods import FedAvg
from coterie.storage.run_folder import RunFolder
from tests.experiment.conftest import two_kinds

QUICK = {"engine": "loop", "compile": False, "workers": 1, "model": "linear", "report": False, "local_steps": 2}
HOW = {**QUICK, "rounds": 30, "lr": 0.3, "select": "balanced_accuracy"}  # which a linear model soon has


def records(*scores, every=1):
    """Records in which only every so many rounds are evaluated."""
    made = []
    for number, score in enumerate(scores, 1):
        made.append({"round": number})
        if number % every == 0:
            made[-1]["validation"] = {"accuracy": [score, score], "loss": [-score, -score]}
    return made


@pytest.mark.parametrize(
    ("scores", "every", "patience", "due"),
    [
        ([0.5, 0.6, 0.6, 0.6], 1, 2, True),  # equal is not better
        ([0.5, 0.6, 0.6], 1, 2, False),
        ([0.5, 0.6, 0.6, 0.61], 1, 2, False),
        ([0.9, 0.8], 1, 1, True),
        ([0.9], 1, 1, False),
        ([0, 0.9, 0, 0.8, 0, 0.8], 2, 2, True),  # patience counts evaluated rounds
        ([0, 0.9, 0, 0.8, 0], 2, 2, False),
        ([0, 0.9, 0, 0.8, 0, 0.8, 0], 2, 2, False),  # after a round that was not evaluated, nothing new is known
        ([math.nan, 0.1, 0.1], 1, 2, False),  # a number is better than none
    ],
)
def test_it_is_due_after_so_many_evaluated_rounds_without_a_better_score(scores, every, patience, due):
    config = Config(early_stop=patience, rounds=50)
    found = early_stop(config, "accuracy", records(*scores, every=every))
    assert (found is not None) == due
    if found:
        assert (found.round, found.planned, found.by) == (len(scores), 50, "early_stop")


def test_it_is_never_due_after_the_last_round():
    assert early_stop(Config(early_stop=1, rounds=2), "accuracy", records(0.9, 0.8)) is None
    assert early_stop(Config(rounds=20), "accuracy", records(0.9, 0.8)) is None


def test_for_an_error_lower_is_better():
    config = Config(early_stop=1, rounds=9)
    assert early_stop(config, "loss", records(0.1, 0.2)) is None  # losses -0.1, -0.2
    assert "round 1" in early_stop(config, "loss", records(0.2, 0.1)).why


def test_a_run_stops_and_its_reference_takes_as_many_steps(tmp_path):
    out = tmp_path / "run"
    result = coterie.run("fedavg", two_kinds(), out=out, early_stop=3, **HOW)
    rounds = len(result.rounds)
    assert 4 <= rounds < 30
    assert result.selected == rounds - 3
    assert len(result.reference.rounds) == rounds, "so many as the run"
    assert result.reference.config.early_stop is None
    assert result.config.rounds == 30
    whole = coterie.run("fedavg", two_kinds(), reference=False, **{**HOW, "rounds": rounds})
    assert [row["validation"] for row in whole.rounds] == [row["validation"] for row in result.rounds]
    assert [row["test_balanced_accuracy"] for row in whole.clients] == [
        row["test_balanced_accuracy"] for row in result.clients
    ]
    stop = {"round": rounds, "planned": 30, "by": "early_stop", "why": result.stopped.why}
    assert json.loads((out / "summary.json").read_text())["stopped"] == stop
    assert json.loads((out / "stopped.json").read_text()) == {"format": 1, **stop}
    assert (out / "config.toml").read_text().startswith(f"# Stopped after round {rounds} of 30 by early_stop:")
    assert read_toml(out / "config.toml")["rounds"] == 30
    assert read_toml(out / "config.toml")["early_stop"] == 3
    assert (
        (out / "reference" / "config.toml").read_text().startswith(f"# Stopped after round {rounds} of 30 by fedavg:")
    )
    card = json.loads((out / "clients" / "site-1" / "card.json").read_text())
    assert card["schedule"]["stopped_after"] == rounds
    assert f"of {rounds}" in repr(result)
    again = coterie.resume(out, data=two_kinds(), calibrate=True)
    assert len(again.rounds) == len(again.reference.rounds) == rounds
    assert again.stopped == result.stopped
    assert (out / "config.toml").read_text().startswith("# Stopped after round")


class Kill(Silent):
    def __init__(self, after):
        self.after = after

    def round(self, record, metric):
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "after", [1, -1, 0], ids=["before it stops", "a round before", "in the round in which it stops"]
)
def test_a_run_that_is_killed_stops_where_it_would_have_stopped(tmp_path, after):
    whole = coterie.run("fedavg", two_kinds(), early_stop=3, reference=False, **HOW)
    at = after if after == 1 else len(whole.rounds) + after
    setup = prepare("fedavg", two_kinds(), early_stop=3, reference=False, **HOW)
    with pytest.raises(KeyboardInterrupt):
        run_setup(setup, tmp_path / "run", progress=Kill(at))
    result = coterie.resume(tmp_path / "run", data=two_kinds())
    assert [row["test"] for row in result.rounds] == [row["test"] for row in whole.rounds]
    assert result.stopped == whole.stopped
    assert result.clients == whole.clients
    assert torch.equal(result.predictions.outputs, whole.predictions.outputs)


def test_seeds_in_lockstep_stop_each_at_its_own_round(tmp_path):
    settings = {**HOW, "engine": "stacked"}
    found = coterie.compare(["local", "fedavg"], 3, two_kinds(), out=tmp_path / "all", early_stop=2, **settings)
    alone = {}
    for seed in range(3):
        run = coterie.run("fedavg", two_kinds(), seed=seed, reference=False, early_stop=2, **settings)
        alone[seed] = len(run.rounds)
        kept = RunFolder(tmp_path / "all" / f"fedavg-seed{seed}")
        assert len(kept.read_rounds(99)) == alone[seed]
        assert stopping.read(kept.path) == run.stopped
    assert len(set(alone.values())) > 1, "they do stop at different rounds"
    again = coterie.compare(["local", "fedavg"], 3, two_kinds(), out=tmp_path / "all", early_stop=2, **settings)
    assert again.rows == found.rows


def ends(out, *labels, seed=0):
    """The number of rounds that each method of a comparison had."""
    return {label: RunFolder(out / f"{label}-seed{seed}").read_rounds(99)[-1]["round"] for label in labels}


def test_beside_other_methods_training_alone_has_as_many_rounds_as_the_longest(tmp_path):
    settings = {**HOW, "early_stop": 2, "out": tmp_path / "all"}
    all_three = {"local": "local", "fedavg": "fedavg", "slow": FedAvg(coterie.SGD(lr=0.03))}
    two = {key: all_three[key] for key in ("local", "fedavg")}
    coterie.compare(two, 1, two_kinds(), **settings)
    short = ends(tmp_path / "all", *two)
    assert short["local"] == short["fedavg"] < 30
    found = coterie.compare(all_three, 1, two_kinds(), **settings)
    rounds = ends(tmp_path / "all", *all_three)
    assert rounds["fedavg"] == short["fedavg"] < rounds["slow"] == rounds["local"]
    config = read_toml(tmp_path / "all" / "local-seed0" / "config.toml")
    assert "early_stop" not in config
    once = coterie.compare(all_three, 1, two_kinds(), **{**settings, "out": tmp_path / "once"})
    assert once.rows == found.rows, "what went on is what would have been trained at once"


def test_training_alone_with_nothing_beside_it_stops_by_itself_and_stays_so(tmp_path):
    settings = {**HOW, "early_stop": 1, "out": tmp_path}
    found = coterie.compare(["local"], 1, two_kinds(), **settings)
    before = ends(tmp_path, "local")
    assert before["local"] < 30
    again = coterie.compare(["local"], 1, two_kinds(), **settings)
    assert again.rows == found.rows
    assert ends(tmp_path, "local") == before


def test_runs_of_unequal_length_are_compared_with_the_longest_reference_or_a_warning(tmp_path):
    for method, rounds in (("fedavg", 2), ("ditto", 3)):
        coterie.run(method, two_kinds(), out=tmp_path / method, **{**HOW, "rounds": rounds})
    found = coterie.compare_runs([tmp_path / "fedavg", tmp_path / "ditto"])
    longest = RunFolder(tmp_path / "ditto" / "reference").read_clients()
    assert found.scores("local")[0].tolist() == [row["test_balanced_accuracy"] for row in longest]
    coterie.run("local", two_kinds(), out=tmp_path / "local", **{**HOW, "rounds": 1})
    with pytest.warns(CoterieWarning, match="trained alone for 1 rounds, .*ditto' for 3: what seems a gain"):
        coterie.compare_runs([tmp_path / "fedavg", tmp_path / "ditto", tmp_path / "local"])


def test_news_of_runs_that_end_at_different_rounds_are_merged():
    class Heard(Silent):
        def __init__(self):
            self.told = []

        def round(self, record, metric):
            self.told.append((record["round"], record["info"]["loss"]))

        def stop(self):
            self.told.append("stop")

    def record(number, loss):
        return {"round": number, "info": {"loss": [loss]}, "seconds": 1.0}

    heard = Heard()
    merged = MergedProgress(heard, "seeds", 2)
    one, two = merged.of(0), merged.of(1)
    one.start("a", 0, 9)
    two.start("b", 1, 9)  # resumed
    one.round(record(1, 0.1), "accuracy")
    one.round(record(2, 0.2), "accuracy")
    two.round(record(2, 0.3), "accuracy")
    two.round(record(3, 0.4), "accuracy")
    assert heard.told == [(1, [0.1]), (2, [0.2, 0.3])]
    one.stop()
    two.round(record(4, 0.5), "accuracy")
    two.stop()
    assert heard.told[2:] == [(3, [0.4]), (4, [0.5]), "stop"]


def test_newcomers_have_as_many_rounds(tmp_path):
    out = tmp_path / "run"
    result = coterie.run("fedavg", two_kinds(), out=out, early_stop=2, holdout=0.2, **HOW)
    newcomer = coterie.onboard(out, *[two_kinds()["site-1"]], name="late")
    for joined in (*result.onboarded, newcomer):
        assert len(joined.rounds) == len(joined.reference.rounds) == len(result.rounds) < 30


def test_what_cannot_be_combined_is_said():
    with pytest.raises(ConfigError, match="early_stop: with privacy, stopping by validation data would tell of these"):
        prepare("fedavg", two_kinds(), epsilon=4, early_stop=3, **HOW)
    with pytest.raises(ConfigError, match="early_stop = 0"):
        prepare("fedavg", two_kinds(), early_stop=0, **HOW)
    with pytest.raises(ConfigError, match="an attack is judged after the last planned round"):
        coterie.attack("sign-flip", 1, "fedavg", two_kinds(), early_stop=3, **HOW)


def test_a_search_trains_on_and_the_runs_that_follow_stop(tmp_path):
    settings = {**HOW, "rounds": 20}
    del settings["lr"]
    found = coterie.tune(["fedavg"], two_kinds(), trials=1, out=tmp_path / "search", early_stop=2, **settings)
    assert found.searches.budget == 20
    assert read_toml(tmp_path / "search" / "fedavg.toml")["early_stop"] == 2
    assert (tmp_path / "search" / "chosen" / "local" / "stopped.json").exists()


@pytest.mark.parametrize("content", ["{", "{}", '{"format": 2, "round": 1, "planned": 2, "by": "", "why": ""}',
                                     '{"format": 1, "round": 3, "planned": 2, "by": "", "why": ""}'])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "stopped.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"stopped\.json"):
        stopping.read(tmp_path)


def test_a_stop_in_words():
    assert Stop(3, 9, "budget", "it is spent").sentence() == "Stopped after round 3 of 9 by budget: it is spent."
