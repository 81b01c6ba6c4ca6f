import csv
import json

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import ConfigError
from coterie.core.targets import Classes
from coterie.data.federation import Federation, Split
from coterie.evaluation import Predictions, score
from coterie.evaluation.adoption import FEDERATED, LOCAL, at_threshold, average
from coterie.experiment.take_home.predict import predict
from coterie.storage import files
from tests.cli.commands import table
from tests.experiment.conftest import QUICK

SETTINGS = {**QUICK, "model": "linear", "rounds": 15, "local_steps": 5, "lr": 0.3, "take_home_folds": 0}


def mixed(test_labels=None, validation=30):
    """Six small sites that share a rule, which is why they gain, and one that has the opposite rule."""
    draw = np.random.default_rng(3)
    w = draw.standard_normal(12)
    xs, ys, clients, start = [], [], {}, 0
    for i, (train, sign) in enumerate([*[(24, 1)] * 6, (40, -1)]):
        size = train + validation + 200
        x = draw.standard_normal((size, 12)).astype(np.float32)
        y = (draw.random(size) < 1 / (1 + np.exp(-2 * sign * x @ w))).astype(np.int64)
        place = start + np.arange(size)
        clients[f"site-{i + 1}"] = Split(*np.split(place, [train, train + validation]))
        if test_labels is not None:
            y[train + validation :] = test_labels(y[train + validation :])
        xs.append(x)
        ys.append(y)
        start += size
    return Federation("mixed", *(torch.from_numpy(np.concatenate(part)) for part in (xs, ys)), clients, 2)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    out = tmp_path_factory.mktemp("best") / "run"
    how = {"take_home": "best", "calibrate": True, "threshold": "balanced_accuracy", "report": True}
    return coterie.run("fedavg", mixed(), out=out, **how, **SETTINGS)


def kept(result):
    return [choice.kept for choice in result.take_home.choices]


def test_sites_choose_by_themselves(best):
    assert set(kept(best)) > {LOCAL}
    assert best.take_home.benefit.overall["loses"] == 0 < best.benefit().overall["loses"]
    for row, choice in zip(best.clients, best.take_home.choices, strict=True):
        assert row["kept"] == choice.kept
        assert choice.examples == 30
        if choice.kept == LOCAL:
            assert row["kept_gain"] == 0


def test_corrupted_test_labels_change_no_choice(best):
    how = {"take_home": "best", "calibrate": True, "threshold": "balanced_accuracy"}
    for corrupt in (lambda y: 1 - y, np.zeros_like):
        other = coterie.run("fedavg", mixed(corrupt), **how, **SETTINGS)
        assert other.take_home.choices == best.take_home.choices
        assert other.take_home.temperatures == best.take_home.temperatures
        assert other.take_home.thresholds == best.take_home.thresholds
        assert other.selected == best.selected


def test_what_is_kept_is_what_is_measured(best):
    """Module, loaded module, exported file and predictions all agree with what take_home.json says of the test data."""
    told = files.read_json(best.path / "take_home.json")
    federation = mixed()
    for i, row in enumerate(told["clients"]):
        split = federation.split(i)
        x, y = federation.x[split.test], federation.y[split.test]
        for module in (best.model(i), coterie.load(best.path, row["client"])):
            with torch.no_grad():
                found = score(best.task, module(x), y, torch.zeros(len(y), dtype=torch.int64), 1)
            for metric in ("loss", "auroc", "accuracy"):
                assert found[metric][0] == pytest.approx(row["test"][metric], abs=1e-5)
        with torch.no_grad():
            moved = at_threshold(coterie.load(best.path, i + 1)(x), row["threshold"])
        assert (moved.argmax(1) == y).double().mean() == pytest.approx(row["at_threshold"]["accuracy"], abs=1e-6)


def test_each_kind_of_model_is_loaded_and_exported(best, tmp_path):
    x = torch.randn(6, 12)
    for i, client in enumerate(best.names):
        about = best.path / "clients" / client / "model.json"
        before = json.loads(about.read_text())
        federated, local = best.view(i), best.reference.view(i)
        own, alone = (best.task.logits(each, x) for each in (federated, local))
        for which, outputs in ((FEDERATED, own), (LOCAL, alone), ("average", average(Classes(2), own, alone))):
            if which != FEDERATED and not (about.parent / "local.safetensors").exists():
                continue
            taken = {"kept": which, "temperature": 2.0, "threshold": None}
            about.write_text(json.dumps({**before, "take_home": taken}))
            torch.testing.assert_close(coterie.load(best.path, client)(x), outputs / 2)
            path = coterie.export(best.path, client, "torch", tmp_path / f"{client}-{which}.pt2")
            torch.testing.assert_close(torch.export.load(path).module()(x), outputs / 2)
            weights = files.read_tensors(coterie.export(best.path, client, "safetensors", tmp_path / "w.safetensors"))
            expected = {FEDERATED: federated, LOCAL: local}.get(which)
            names = expected or [f"{a}.{n}" for a, p in (("federated", federated), ("local", local)) for n in p]
            assert weights.keys() == set(names)
        about.write_text(json.dumps(before))


def test_predictions_use_the_clients_threshold(best, tmp_path):
    x = torch.randn(40, 12)
    rows = tmp_path / "rows.csv"
    table(rows, x, names=[f"x{i + 1}" for i in range(12)])
    for i, client in enumerate(best.names):
        cut = best.take_home.thresholds[i]
        found = list(csv.DictReader(predict(best.path, client, rows)[1].splitlines()))
        assert [row["predicted"] == "1" for row in found] == [float(row["1"]) > cut for row in found]


def test_the_card_and_the_report_say_it(best):
    cards = [best.path / "clients" / name / "card.md" for name in best.names]
    for card, choice in zip(cards, best.take_home.choices, strict=True):
        text = card.read_text()
        assert ("It takes home the model trained alone" in text) == (choice.kept == LOCAL)
        assert "its 30 validation examples" in text
        assert "a threshold chosen on its validation data" in text
    told = json.loads((cards[0].parent / "card.json").read_text())
    assert told["metrics"]["test"]["loss"] == pytest.approx(best.clients[0]["kept_test_loss"])
    assert told["benefit"]["gain"] == pytest.approx(best.clients[0]["kept_gain"])
    report = (best.path / "report.html").read_text()
    assert "What each client takes home" in report
    assert "Gain before and after the choice" in report


def test_a_finished_run_is_resumed_with_another_choice(best, tmp_path):
    out, how = tmp_path / "run", {"take_home": "best", "calibrate": True, "threshold": "balanced_accuracy"}
    plain = coterie.run("fedavg", mixed(), out=out, report=False, **SETTINGS)
    assert plain.take_home is None
    assert not (out / "take_home.json").exists()
    again = coterie.resume(out, data=mixed(), **how)
    assert again.take_home.choices == best.take_home.choices
    assert files.read_json(out / "take_home.json") == files.read_json(best.path / "take_home.json")
    back = coterie.resume(out, data=mixed(), take_home="federated", calibrate=False)
    assert set(kept(back)) == {FEDERATED}  # the threshold is still asked for
    x = torch.randn(3, 12)
    torch.testing.assert_close(coterie.load(out, 1)(x), plain.model(0)(x))
    with pytest.raises(ConfigError, match="a run is resumed as it began, but for take_home"):
        coterie.resume(out, data=mixed(), rounds=3)


def test_a_comparison_lets_the_sites_choose(best, tmp_path):
    how = {"out": tmp_path / "both", "take_home": "best", "report": False}
    found = coterie.compare(("fedavg", "local"), 1, mixed(), **how, **SETTINGS)
    assert [row["kept"] for row in found.rows if row["method"] == "fedavg"] == kept(best)
    assert found.taken["fedavg"].overall["loses"] == 0 < found.benefit("fedavg").overall["loses"]
    folder = tmp_path / "both" / "fedavg-seed0"
    local = kept(best).index(LOCAL)
    x = torch.randn(4, 12)
    alone = coterie.load(tmp_path / "both" / "local-seed0", local + 1)
    torch.testing.assert_close(coterie.load(folder, local + 1)(x), alone(x))
    assert "It takes home the model trained alone" in (folder / "clients" / f"site-{local + 1}" / "card.md").read_text()
    again = coterie.compare(("fedavg", "local"), 1, mixed(), **how, **SETTINGS)  # read from the folders
    assert again.taken["fedavg"].clients == found.taken["fedavg"].clients
    with pytest.raises(ConfigError, match="add local to the methods"):
        coterie.compare(("fedavg",), 1, mixed(), take_home="best", **SETTINGS)


def test_without_local_models_there_is_nothing_to_choose():
    with pytest.raises(ConfigError, match="needs the models trained alone"):
        coterie.run("fedavg", mixed(), take_home="best", reference=False, **SETTINGS)


def test_a_regression_chooses_too(tmp_path):
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(6, generator=draw)
    data = []
    for i in range(4):
        x = torch.randn(80, 6, generator=draw)
        data.append((x, x @ (w if i else -w) + 0.3 * torch.randn(80, generator=draw)))
    how = {**SETTINGS, "lr": 0.05, "validation": 0.3, "calibrate": True}
    result = coterie.run("fedavg", data, out=tmp_path / "run", take_home="best", **how)
    assert "What each client takes home" in (tmp_path / "run" / "report.html").read_text()
    assert kept(result)[0] == LOCAL
    assert result.take_home.temperatures == [None] * 4
    x = torch.randn(5, 6)
    for i in range(4):
        torch.testing.assert_close(coterie.load(tmp_path / "run", i + 1)(x), result.model(i)(x))


def test_a_run_of_local_training_keeps_its_models(tmp_path):
    result = coterie.run("local", mixed(), out=tmp_path / "run", take_home="best", calibrate=True, **SETTINGS)
    assert set(kept(result)) == {LOCAL}
    x = torch.randn(5, 12)
    own = result.task.logits(result.view(0), x) / result.take_home.temperatures[0]
    torch.testing.assert_close(coterie.load(tmp_path / "run", 1)(x), own)
    assert isinstance(result.take_home.predictions, Predictions)
