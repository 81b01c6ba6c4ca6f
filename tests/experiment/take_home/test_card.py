import json
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie import METHODS
from coterie.core.task import Task
from coterie.evaluation import Predictions
from coterie.experiment.setup import prepare
from coterie.experiment.take_home import card as cards_of
from coterie.experiment.take_home import card_text
from coterie.experiment.take_home.card import intervals, write_cards
from coterie.storage import files
from tests.experiment.conftest import QUICK, two_kinds


def cards(result):
    return [json.loads((result.path / "clients" / name / "card.json").read_text()) for name in result.names]


def test_counts_classes_and_metrics_are_the_clients_own(joined):
    result = joined("fedmap")
    federation = prepare("fedmap", two_kinds(), holdout=0.2, **QUICK).federation
    for i, (card, row) in enumerate(zip(cards(result), result.clients, strict=True)):
        for part in ("train", "validation", "test"):
            labels = federation.y[federation.split(i)[part]]
            assert card["data"][part] == len(labels) == row[part]
            assert [count[part] for count in card["data"]["classes"].values()] == labels.bincount(minlength=2).tolist()
        assert card["metrics"]["test"]["accuracy"] == pytest.approx(row["test_accuracy"])
        for metric, (low, high) in card["metrics"]["test_intervals"].items():
            assert low is None or low <= card["metrics"]["test"][metric] <= high
        assert card["method"]["hyper"] == result.config.hyper
        assert card["versions"]["coterie"] == coterie.__version__


WEIGHED = (
    "fedamp",
    "heurfedamp",
    "federico",
    "fedpac",
    "ifca",
    "clustered-fl",
    "fedfomo",
)  # they tell who learned from whom


@pytest.mark.parametrize("method", METHODS)
def test_who_every_client_learned_from(joined, method):
    result = joined(method)
    for i, card in enumerate(cards(result)):
        learned = card["learned_from"]
        assert learned["words"]
        if method in WEIGHED:
            record = result.rounds[result.selected - 1]["server"]["collaboration"][i]
            assert sum(learned["weights"].values()) == pytest.approx(1, abs=1e-5)
            assert learned["weights"].get(result.names[0], 0.0) == pytest.approx(record[0])
        elif method == "fedmap":
            assert sum(learned["weights"].values()) == pytest.approx(1, abs=1e-5)
        else:
            assert "weights" not in learned
    text = (result.path / "clients" / result.names[0] / "card.md").read_text()
    assert learned["words"] in text
    assert ("(itself)" in text) == (method in (*WEIGHED, "fedmap"))


def test_a_newcomers_card_says_so(joined):
    result = joined("fedamp")
    (newcomer,) = result.onboarded
    folder = result.path / "clients" / newcomer.names[0]
    card = json.loads((folder / "card.json").read_text())
    assert not card["took_part"]
    assert card["benefit"]["gain"] == pytest.approx(newcomer.clients[0]["gain"])
    assert set(card["learned_from"]["weights"]) <= {*result.names, *newcomer.names}
    assert "which joined 4 clients that had trained together before" in (folder / "card.md").read_text()


def test_the_benefit_is_read_from_the_run(joined, tmp_path):
    result = joined("fedavg")
    row = {"client": result.names[1], "test": 3, "federated": 1, "local": 0, "gain": 1, "low": 1, "high": 1}
    (tmp_path / "benefit.json").write_text(json.dumps({"clients": [{**row, "verdict": "gains"}]}))
    setup = prepare("fedavg", two_kinds(), holdout=0.2, reference=False, **QUICK)
    write_cards(result, setup, tmp_path)
    first, second = (json.loads((tmp_path / "clients" / n / "card.json").read_text()) for n in result.names[:2])
    assert second["benefit"]["verdict"] == "gains"
    assert first["benefit"] is None


def test_intervals_hold_the_mean_as_often_as_they_say():
    """Accuracy over n examples with share p right: the standard error is sqrt(p (1 - p) / n)."""
    task = Task(torch.nn.Linear(1, 2), num_classes=2)
    y = torch.arange(400) % 2
    outputs = torch.nn.functional.one_hot(torch.where(torch.arange(400) % 4 == 0, 1 - y, y), 2).float()
    one = Predictions(outputs, y, torch.zeros(400, dtype=torch.long))
    low, high = intervals(task, one, ["accuracy"], 0, "client")["accuracy"]
    error = (0.75 * 0.25 / 400) ** 0.5
    assert low == pytest.approx(0.75 - 1.96 * error, abs=0.006)
    assert high == pytest.approx(0.75 + 1.96 * error, abs=0.006)


def test_regression_cards(tmp_path):
    draw = torch.Generator().manual_seed(0)
    data = [(x, x.sum(1)) for x in torch.randn(2, 30, 3, generator=draw)]
    result = coterie.run("fedavg", data, out=tmp_path / "run", **{**QUICK, "model": "linear"})
    (card, _), text = cards(result), (result.path / "clients" / "client-1" / "card.md").read_text()
    assert "classes" not in card["data"]
    assert np.isfinite(card["metrics"]["test_intervals"]["rmse"]).all()
    assert "gives values." in text


def test_the_cards_of_many_clients_are_the_same(joined, tmp_path, monkeypatch):
    """By several processes, without a wait for each file, and naming few of those they learned from."""
    result = joined("fedmap")
    setup = prepare("fedmap", two_kinds(), holdout=0.2, **QUICK)
    waits = []
    monkeypatch.setattr(files.os, "sync", lambda: waits.append(1))
    monkeypatch.setattr(files, "SYNC_ONCE_FILES", 1000)
    write_cards(result, setup, tmp_path / "one")
    assert not waits
    monkeypatch.setattr(cards_of, "CARDS_PER_JOB", 2)
    monkeypatch.setattr(files, "SYNC_ONCE_FILES", 2)
    write_cards(result, setup, tmp_path / "several")
    assert waits == [1]

    def found(run):
        paths = sorted((tmp_path / run / "clients").glob("*/card.*"))
        return {path.relative_to(tmp_path / run): path.read_text().replace(f"{tmp_path / run}", "") for path in paths}

    assert found("one") == found("several")
    assert len(found("one")) == 2 * len(result.names)
    monkeypatch.setattr(cards_of, "MAX_COLLABORATORS", 2)
    monkeypatch.setattr(card_text, "SHOWN_COLLABORATORS", 1)
    write_cards(result, setup, tmp_path / "few")
    name = result.names[0]
    whole = json.loads(found("one")[Path("clients") / name / "card.json"])["learned_from"]["weights"]
    few = json.loads(found("few")[Path("clients") / name / "card.json"])["learned_from"]
    assert list(few["weights"].items()) == list(whole.items())[:2]
    assert few["more"] == len(whole) - 2
    told = f"{len(whole) - 1} more have smaller weights; `card.json` has the first 2."
    assert told in found("few")[Path("clients") / name / "card.md"]


@pytest.mark.parametrize(("method", "holds"), [("fedavg", False), ("pfedgp", True)])
def test_a_model_that_holds_training_data_says_so(joined, method, holds):
    result = joined(method)
    assert all(bool(card["holds"]) == holds for card in cards(result))
    text = (result.path / "clients" / result.names[0] / "card.md").read_text()
    assert ("features of examples that it was trained on" in text) == holds
    assert ("with the data" in text) == holds
