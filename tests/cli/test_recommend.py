"""`coterie recommend` as a user types it."""

import json
from pathlib import Path

import pytest

from coterie.cli.recommend_words import sentences
from coterie.core.toml import read_toml
from coterie.experiment.tuning.choice import Choice
from coterie.experiment.tuning.evidence import Difference
from coterie.experiment.tuning.recommendation import Cost, Look, Recommendation
from tests.cli.commands import TINY, cli

SHORT = (*TINY, "--rounds", "2", "--trials", "2", "--folds", "2", "--methods", "fedavg")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("recommend") / "found"
    return out, cli("recommend", *SHORT, "--out", out)


def test_it_describes_the_sites_and_says_what_to_use(found):
    out, result = found
    assert result.exit_code == 0, result.output
    told = json.loads((out / "recommendation.json").read_text())
    assert "10 sites with " in result.output
    assert "Labels " in result.output
    assert "Panel, from cheap to dear: local, fedavg." in result.output
    assert "Each method, local included, has 2 candidates and 4 rounds to be tuned in each of 2 folds" in result.output
    assert f"Recommended: {told['method']}." in result.output
    assert "The run's test examples were not looked at." in result.output
    assert f"{100 * told['choice']['scores']['fedavg']:.1f}" in result.output
    assert not (out / "report.html").exists(), "--no-report"


def test_run_and_flower_take_what_it_wrote(found):
    out, _ = found
    file = out / "federation.toml"
    result = cli("run", file, "--out", "run", "--no-reference", "--no-report")
    assert result.exit_code == 0, result.output
    assert read_toml(Path("run/config.toml"))["optimizer"] == read_toml(file)["optimizer"]
    pytest.importorskip("flwr")
    pytest.importorskip("cryptography")
    result = cli("flower", "init", "app", file)
    assert result.exit_code == 0, result.output
    written = read_toml(Path("app/pyproject.toml"))["tool"]["flwr"]["app"]["config"]
    assert written["optimizer"]["lr"] == read_toml(file)["optimizer"]["lr"]


def test_again_nothing_is_trained(found):
    out, result = found
    again = cli("recommend", *SHORT, "--out", out)
    assert again.exit_code == 0, again.output
    assert "validation balanced_accuracy" not in again.output
    assert again.output.endswith(result.output[result.output.index("On held-out examples") :])


def test_sites_own_files_can_be_recommended_for(files):
    words = ("--silos", *files, "--target", "sick", "--drop", "id", "--model", "linear", *TINY[2:], *SHORT[len(TINY) :])
    result = cli("recommend", *words, "--out", "found")
    assert result.exit_code == 0, result.output
    result = cli("run", "found/federation.toml", "--rounds", "1", "--no-report", "--out", "run")
    assert result.exit_code == 0, result.output


def test_mistakes_are_told_in_words():
    result = cli("recommend", *TINY, "--methods", "fedavgg", "--foo", "3")
    assert result.exit_code == 2
    assert "there is no method 'fedavgg' (did you mean 'fedavg'?)" in result.stderr
    assert "there is no flag --foo" in result.stderr


def recommendation(method, candidate, best, leads, second="", over_second=None):
    scores = {"local": 0.7, **{label: 0.7 + lead.mean for label, lead in leads.items()}}
    choice = Choice(scores, best, method, candidate, second, leads, over_second, None)
    costs = {label: Cost(2000.0 if label != "local" else 0.0, 0.5) for label in scores}
    look = Look(3, 10, 20, 30, (0.2, 0.1), (0.2, 0.1))
    return Recommendation(method, {"rounds": 9}, look, choice, costs, {}, 12, 3, "accuracy", None)


def test_the_words_say_how_sure_it_is():
    sure, unsure = Difference(0.1, 0.05, 0.15, 0.02), Difference(0.04, -0.01, 0.09, 0.02)
    text = " ".join(
        sentences(recommendation("fedavg", "fedavg", "fedavg", {"fedavg": sure, "ditto": unsure}, "ditto", unsure))
    )
    assert "Recommended: fedavg. It is 10.0 points better than training alone" in text
    assert (
        "Over the next best, ditto, it leads by 4.0 points, which may be chance (95 % interval [-1.0, +9.0])." in text
    )
    assert "A run of 9 rounds sends 2 kB by and to each site, and trains for 30.0 seconds" in text
    text = " ".join(sentences(recommendation("local", "fedavg", "fedavg", {"fedavg": unsure})))
    assert "Recommended: local. Let every site train alone. Nothing is known to beat it: FedAvg comes closest" in text
    assert "chance may explain that (interval [-1.0, +9.0])" in text
    text = " ".join(sentences(recommendation("local", "local", "local", {"fedavg": Difference(-0.1, -0.2, 0.0, 0.05)})))
    assert "No method of the panel does better on held-out examples." in text
    near = Difference(0.01, -0.05, 0.07, 0.03)
    text = " ".join(sentences(recommendation("local", "local", "fedavg", {"fedavg": near})))
    assert "FedAvg is 1.0 points better on held-out examples, within a standard error" in text
