import shutil

import pytest
import torch
from torch import nn

import coterie
from coterie import compare_runs
from coterie.core.errors import CheckpointError, ConfigError, CoterieError, DataError

QUICK = {"engine": "loop", "compile": False, "workers": 1, "rounds": 2, "lr": 0.3, "batch_size": 8}


def clients(shift=0.0):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(30 + 7 * i, 5, generator=draw) for i in range(3)]
    return {f"site {i}": (x, (x[:, 0] > 0.3 * i + shift).long()) for i, x in enumerate(xs)}


def factory(shape, outputs):
    return nn.Linear(shape[0], outputs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """FedAvg with its reference, FedProx and local without, and a run of other data under the same name."""
    at = tmp_path_factory.mktemp("runs")
    coterie.run("fedavg", clients(), model=factory, out=at / "avg", **QUICK)
    coterie.run("fedprox", clients(), model=factory, out=at / "prox", reference=False, **QUICK)
    coterie.run("fedprox", clients(), model=factory, out=at / "prox1", reference=False, seed=1, **QUICK)
    coterie.run("local", clients(), model=factory, out=at / "local", **QUICK)
    coterie.run("ditto", clients(0.5), model=factory, out=at / "other", reference=False, **QUICK)
    coterie.run("fedprox", clients(), model=factory, out=at / "loss", reference=False, select="loss", **QUICK)
    return at


def test_equals_the_comparison_that_trains(runs):
    found = compare_runs([runs / "avg", runs / "prox"])
    trained = coterie.compare(("local", "fedavg", "fedprox"), [0], clients(), model=factory, **QUICK)
    assert found.methods == trained.methods
    for method in ("fedavg", "fedprox"):
        assert found.scores(method).tolist() == trained.scores(method).tolist()
        assert found.benefit(method).clients == trained.benefit(method).clients
    assert found.verdict() == trained.verdict()


def test_a_run_of_local_serves_as_well_as_a_reference(runs):
    alone = compare_runs([runs / "prox", runs / "local"])
    assert alone.benefit("fedprox").clients == compare_runs([runs / "avg", runs / "prox"]).benefit("fedprox").clients


def test_what_cannot_be_compared_is_told_in_words(runs, tmp_path):
    with pytest.raises(DataError, match=r"prox' and '.*other' do not use the same data|local' and '.*other'"):
        compare_runs([runs / "local", runs / "prox", runs / "other"])
    with pytest.raises(CoterieError, match=r"prox': no local reference.*without --no-reference.*--method local"):
        compare_runs([runs / "prox"])
    with pytest.raises(CoterieError, match=r"prox1': no local reference.*seed 1"):
        compare_runs([runs / "avg", runs / "prox1"])
    with pytest.raises(ConfigError, match="different metrics"):
        compare_runs([runs / "avg", runs / "loss"])
    with pytest.raises(ConfigError, match="both of fedprox with seed 0"):
        compare_runs([runs / "prox", runs / "loss", runs / "local"])
    with pytest.raises(ConfigError, match="name at least one"):
        compare_runs([])
    with pytest.raises(CheckpointError, match="not a run folder"):
        compare_runs([runs])
    shutil.copytree(runs / "prox", tmp_path / "old")
    (tmp_path / "old" / "predictions.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no predictions.safetensors: 'coterie resume"):
        compare_runs([tmp_path / "old"])


def test_runs_of_other_data_sets_are_named(runs, tmp_path):
    shutil.copytree(runs / "prox", tmp_path / "digits")
    config = tmp_path / "digits" / "config.toml"
    config.write_text(config.read_text().replace('data = "own-data"', 'data = "digits"'))
    with pytest.raises(ConfigError, match=r"different data \('.*avg' of own-data, '.*digits' of digits\)"):
        compare_runs([runs / "avg", tmp_path / "digits"])


def test_every_method_needs_every_seed(runs, tmp_path):
    coterie.run("local", clients(), model=factory, out=tmp_path / "local1", seed=1, **QUICK)
    with pytest.raises(ConfigError, match="there is no run of fedavg with seed 1: run it first"):
        compare_runs([runs / "avg", runs / "prox", runs / "prox1", tmp_path / "local1"])


def test_verdicts_of_an_older_version_are_translated(runs, tmp_path):
    shutil.copytree(runs / "avg", tmp_path / "old")
    path = tmp_path / "old" / "clients.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *(line.rpartition(",")[0] + ",cannot tell" for line in lines[1:])]) + "\n")
    assert lines[0].endswith(",verdict")
    rows = [row for row in compare_runs([tmp_path / "old"]).rows if row["method"] == "fedavg"]
    assert [row["verdict"] for row in rows] == ["undecided"] * 3


@coterie.metric(better=min, low=0.0)
def brier(p, y):
    return ((p[:, 1] - y) ** 2).mean()


def test_runs_that_were_selected_by_a_metric_of_ones_own(tmp_path):
    own = {"metric": brier, "select": "brier", "model": factory, "report": False, **QUICK}
    coterie.run("fedavg", clients(), out=tmp_path / "avg", **own)
    found = compare_runs([tmp_path / "avg"])
    assert found.metric == "brier"
    assert found.benefit("fedavg").clients == coterie.run("fedavg", clients(), **own).benefit().clients


def test_runs_with_targets_that_nobody_recorded(tmp_path):
    how = {"model": "linear", "rounds": 1, "local_steps": 1, "report": False, "compile": False, "reference": False}
    for method in ("local", "fedavg"):
        coterie.run(method, "wards", out=tmp_path / method, **how)
    assert compare_runs([tmp_path / "local", tmp_path / "fedavg"]).metric == "loss"
