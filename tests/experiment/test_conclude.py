import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core.errors import CheckpointError, CoterieError
from coterie.evaluation import score
from coterie.experiment.setup import prepare
from coterie.storage import files
from coterie.storage.run_folder import RunFolder

QUICK = {"engine": "loop", "compile": False, "workers": 1, "rounds": 3, "lr": 0.3, "batch_size": 8}
QUICK["select"] = "balanced_accuracy"


def clients():
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(30 + 7 * i, 5, generator=draw) for i in range(3)]
    data = {f"site {i}": (x, (x[:, 0] > 0.3 * i).long()) for i, x in enumerate(xs)}
    data["one class"] = (xs[0] + 1, torch.ones(30, dtype=torch.long))
    return data


def factory(shape, outputs):
    return nn.Linear(shape[0], outputs)


def run(method="fedavg", out=None, **settings):
    return coterie.run(method, clients(), model=factory, out=out, **{**QUICK, **settings})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finish") / "run"
    return out, run(out=out)


def test_predictions_are_what_was_evaluated(finished):
    out, result = finished
    setup = prepare("fedavg", clients(), model=factory, **QUICK)
    for folder, each in ((out, result), (out / "reference", result.reference)):
        found = RunFolder(folder).read_predictions()
        assert found.owner.dtype == torch.int64
        assert found.owner.tolist() == sorted(found.owner.tolist())
        scores = score(setup.task, *found, 4)
        for name, values in scores.items():
            np.testing.assert_allclose(values, [row[f"test_{name}"] for row in each.clients], err_msg=name)
        for i, row in enumerate(each.clients):
            own = torch.from_numpy(setup.federation.split(i).test)
            assert torch.equal(found.of(i).y, setup.federation.y[own])
            outputs = each.model(row["client"])(setup.federation.x[own])
            torch.testing.assert_close(found.of(i).outputs, outputs.detach())


def test_benefit_json_and_clients_csv(finished):
    out, result = finished
    told = json.loads((out / "benefit.json").read_text())
    assert {key: told[key] for key in ("format", "metric", "level", "resamples")} == {
        **{"format": 1, "metric": "balanced_accuracy", "level": 0.95, "resamples": 2000},
    }
    assert told == json.loads(files.to_json(result.benefit().to_json()))
    assert told["overall"].keys() == {"mean_gain", "low", "high", "wilcoxon", "gains", "loses", "undecided"}
    assert told["overall"]["wilcoxon"].keys() == {"statistic", "p", "effect", "n"}
    assert told["fairness"].keys() == {"federated", "local", "share_worse_than_alone"}
    assert told["fairness"]["local"].keys() == {"mean", "weighted_mean", "std", "cv", "worst_decile"}
    rows = RunFolder(out).read_clients()
    assert rows == result.clients
    for row, mine, gain in zip(rows, told["clients"], result.gains(), strict=True):
        assert [row[key] for key in ("client", "test", "gain", "low", "high", "verdict")] == [
            mine[key] for key in ("client", "test", "gain", "low", "high", "verdict")
        ]
        assert mine["gain"] == gain == row["test_balanced_accuracy"] - row["local_test_balanced_accuracy"]


def test_both_rounds_and_both_averages_are_in_the_summary(finished):
    out, result = finished
    told = json.loads((out / "summary.json").read_text())
    sizes = [row["test"] for row in result.clients]
    assert len(set(sizes)) > 1
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "ece", "loss"):
        values = [row[f"test_{name}"] for row in result.clients]
        assert told["test"][name] == pytest.approx(np.mean(values))
        assert told["test_weighted"][name] == pytest.approx(np.average(values, weights=sizes))
        last = result.rounds[-1]["test"][name]
        assert told["last_round"]["test"][name] == pytest.approx(np.mean(last))
        assert told["last_round"]["test_weighted"][name] == pytest.approx(np.average(last, weights=sizes))
    assert (told["selected_round"], told["last_round"]["round"]) == (result.selected, 3)
    assert told["fairness"]["std"] == pytest.approx(np.std([row["test_balanced_accuracy"] for row in result.clients]))
    assert "g_and_p" not in told  # FedAvg deploys the global model itself


def test_undefined_metrics_are_null_in_files_and_nan_in_memory(finished):
    out, result = finished
    assert math.isnan(result.clients[3]["test_auroc"])  # one class
    for path in (out / "rounds.jsonl", out / "summary.json", out / "benefit.json"):
        assert "NaN" not in path.read_text()
    line = json.loads((out / "rounds.jsonl").read_text().splitlines()[0])
    assert line["test"]["auroc"][3] is None
    read = RunFolder(out).read_rounds(3)
    assert math.isnan(read[0]["test"]["auroc"][3])
    assert [row["test"] for row in read] == [row["test"] for row in result.rounds]
    assert result.mean("auroc") == pytest.approx(np.nanmean([row["test_auroc"] for row in result.clients]))
    again = coterie.resume(out, data=clients(), model=factory)
    assert again.clients == result.clients
    assert math.isnan(result.benefit("auroc").clients[3]["gain"])


def test_a_run_that_an_earlier_version_began_is_gone_on_with(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        for part in ("validation", "test"):
            record[part] = {name: record[part][name] for name in ("balanced_accuracy", "accuracy", "loss")}
    (out / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (out / "predictions.safetensors").unlink()
    again = coterie.resume(out, data=clients(), model=factory)
    assert math.isnan(again.clients[0]["test_auroc"])
    assert again.benefit().clients == finished[1].benefit().clients


def test_any_metric_has_a_benefit_and_others_are_told(finished):
    _, result = finished
    assert result.benefit("loss").metric == "loss"
    np.testing.assert_allclose([row["gain"] for row in result.benefit("loss").clients], result.gains("loss"))
    with pytest.raises(CoterieError, match="no metric 'rmse'; there are balanced_accuracy"):
        result.benefit("rmse")


def test_a_run_without_reference_is_told_what_to_do(tmp_path):
    result = run(out=tmp_path / "run", reference=False)
    assert not (tmp_path / "run" / "benefit.json").exists()
    for ask in (result.benefit, result.gains):
        with pytest.raises(CoterieError, match=r"no local reference.*reference=True.*without --no-reference"):
            ask()


def test_a_regression_has_a_benefit(tmp_path):
    data = {name: (x, x @ torch.arange(5.0)) for name, (x, _) in clients().items()}
    result = coterie.run("fedavg", data, model="linear", out=tmp_path / "run", **{**QUICK, "lr": 0.01, "select": None})
    told = json.loads((tmp_path / "run" / "benefit.json").read_text())
    assert told["metric"] == "rmse"
    np.testing.assert_allclose([row["gain"] for row in told["clients"]], result.gains())
    assert result.gains()[0] == pytest.approx(result.clients[0]["local_test_rmse"] - result.clients[0]["test_rmse"])


def test_damaged_predictions_are_told(tmp_path):
    folder = RunFolder(tmp_path)
    files.write_tensors(tmp_path / "predictions.safetensors", {"outputs": torch.zeros(3, 2), "y": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="has no owner: 'coterie resume"):
        folder.read_predictions()
    short = {"outputs": torch.zeros(3, 2), "y": torch.zeros(3), "owner": torch.zeros(2, dtype=torch.long)}
    files.write_tensors(tmp_path / "predictions.safetensors", short)
    with pytest.raises(CheckpointError, match="is damaged"):
        folder.read_predictions()


def test_tables_are_written_once_and_last(tmp_path, monkeypatch):
    written = []
    usual = files.write
    monkeypatch.setattr(
        files, "write", lambda path, save: written.append(path.relative_to(tmp_path)) or usual(path, save)
    )
    run(out=tmp_path / "run", report=False)
    own = [str(path) for path in written if path.name in ("clients.csv", "summary.json")]
    assert own == [f"run/{place}{name}" for place in ("reference/", "") for name in ("clients.csv", "summary.json")]
    assert str(written[-1]) == "run/summary.json"


def test_two_classes_are_judged_by_auroc_and_the_config_says_so(tmp_path):
    data = {name: each for name, each in clients().items() if name != "one class"}
    result = coterie.run("fedavg", data, model=factory, out=tmp_path / "run", **{**QUICK, "select": None})
    assert result.metric == "auroc"
    assert 'select = "auroc"' in (tmp_path / "run" / "config.toml").read_text()
    three = {name: (x, y + (x[:, 1] > 0).long()) for name, (x, y) in data.items()}
    assert prepare("fedavg", three, model=factory, **{**QUICK, "select": None}).metric == "balanced_accuracy"
