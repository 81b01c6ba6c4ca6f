import json

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import CheckpointError, ConfigError
from coterie.core.toml import read_toml
from coterie.data.tables.silos import apply_preprocessing, read_like
from coterie.experiment.setup import prepare
from coterie.experiment.silos import find_files, misuses
from tests.data.tables.test_silos import sites

HOW = {"engine": "loop", "compile": False, "workers": 1, "rounds": 2, "local_epochs": 1}


def test_paths_globs_and_folders(tmp_path, monkeypatch):
    files = list(sites(tmp_path))
    (tmp_path / "notes.md").write_text("no data")
    monkeypatch.chdir(tmp_path)
    assert find_files(["."]) == find_files(["*.csv"]) == files
    assert find_files(["b.csv", "*.csv"]) == [files[1], files[0], files[2]]
    with pytest.raises(ValueError, match=r"there is no file 'x\.csv'"):
        find_files(["x.csv"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="folder 'empty' has no file"):
        find_files(["empty"])


def test_a_run_keeps_what_prediction_needs(tmp_path):
    files = sites(tmp_path)
    out = tmp_path / "run"
    result = coterie.run(silos=list(files), target="sick", drop=["id"], class_weights="balanced", out=out, **HOW)
    assert list(result.names) == ["a", "b", "c"]
    config = read_toml(out / "config.toml")
    assert (config["data"], config["silos"], config["model"]) == ("silos", list(files), "tabular")
    record = json.loads((out / "clients" / "b" / "preprocessing.json").read_text())
    about = json.loads((out / "clients" / "b" / "model.json").read_text())
    assert about["classes"] == ["0", "1"]
    x = apply_preprocessing(read_like(files[1], record), record)
    model = coterie.load(out, "b")
    assert torch.equal(model(x), result.model("b")(x))
    # The test metric again, from the files in the run folder and the site's own file alone.
    federation = prepare(silos=list(files), target="sick", drop=["id"]).federation
    test = federation.split(1).test
    predicted = model(x).argmax(1)[test - 40]
    truth = federation.y[test]
    recall = np.mean([float((predicted[truth == c] == c).float().mean()) for c in (0, 1)])
    assert recall == pytest.approx(result.clients[1]["test_balanced_accuracy"])


def test_resuming_finds_the_same_files_or_refuses(tmp_path, monkeypatch):
    files = sites(tmp_path)
    out = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    first = coterie.run(silos=["*.csv"], target="sick", drop="id", out=out, **HOW)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = coterie.resume(out)
    assert again.clients == first.clients
    with open(files[1], "a") as file:
        file.write("99,40,m,22,1\n")
    with pytest.raises(CheckpointError, match=r"b\.csv' has changed since this run began"):
        coterie.resume(out)
    (tmp_path / "b.csv").unlink()
    with pytest.raises(CheckpointError, match=r"b\.csv', which this run reads, is gone"):
        coterie.resume(out)


def test_comparing_goes_on_with_the_same_files_only(tmp_path):
    files = list(sites(tmp_path))
    how = {"silos": files, "target": "sick", "drop": ["id"], "seeds": 1, "out": tmp_path / "out", **HOW}
    coterie.compare(["local", "fedavg"], **how)
    with open(files[0], "a") as file:
        file.write("99,40,m,22,1\n")
    with pytest.raises(CheckpointError, match=r"a\.csv' has changed"):
        coterie.compare(["local", "fedavg"], **how)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "y"}, ["target is for data files: name them with silos"]),
        ({"group": "id", "drop": "a"}, ["group is for data files", "drop is for data files"]),
        ({"silos": ["a.csv"]}, ["silos needs a target"]),
        ({"silos": ["a.csv"], "target": "y", "data": "digits"}, ["give data or silos, not both"]),
        ({"silos": ["a.csv"], "target": "y", "schema": "s.toml"}, ["give target or schema, not both"]),
        ({"silos": ["a.csv", "b.csv"], "target": "y", "site_column": "s"}, ["site_column is for one file"]),
        ({"silos": ["a.csv"], "target": "y", "group": "y"}, ["'y' is given twice"]),
        ({"silos": ["none.csv"], "rounds": 0}, ["there is no file 'none.csv'", "silos needs a target", "rounds = 0"]),
        ({"silos": 3, "target": "y"}, ["silos = 3"]),
        ({"class_weights": "some"}, ["class_weights = 'some'"]),
    ],
)
def test_wrong_combinations_are_told_at_once(tmp_path, monkeypatch, settings, words):
    sites(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as told:
        coterie.run(**settings)
    for each in words:
        assert each in str(told.value)
    assert len(told.value.problems) == len(words)


def test_own_data_and_silos_exclude_each_other(tmp_path):
    with pytest.raises(ConfigError, match="give data or silos, not both"):
        coterie.run("fedavg", [(torch.zeros(9, 2), torch.zeros(9).long())], silos=list(sites(tmp_path)), target="sick")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schema": "s.toml", "task": "survival"}, "give task or schema, not both"),
        ({"target": "a", "regression": True, "task": "ordinal"}, "regression is short for task = 'regression'"),
        ({"target": "a", "levels": ["x", "y"]}, "levels are for task = 'ordinal'"),
        ({"target": "a,b", "task": "cox", "horizons": [1.0]}, "horizons are for task = 'survival'"),
    ],
)
def test_settings_of_a_task_that_exclude_each_other(given, words):
    assert any(words in problem for problem in misuses({"silos": ["a.csv"], **given}))
