import csv
import io
import json

import numpy as np
import pytest
import torch

import coterie
from tests.cli.commands import cli, table
from tests.experiment.conftest import QUICK, two_kinds


def test_predict_writes_the_probabilities_of_each_class(run):
    x = two_kinds(4)["site-3"][0][:5]
    table("rows.csv", x)
    told = cli("predict", run, "rows.csv", "--client", "3")
    rows = list(csv.DictReader(io.StringIO(told.stdout)))
    expected = coterie.load(run, "site-3")(x).softmax(1)
    found = torch.tensor([[float(row["0"]), float(row["1"])] for row in rows])
    assert torch.allclose(found, expected, atol=1e-5)
    assert [row["predicted"] for row in rows] == [str(int(label)) for label in expected.argmax(1)]
    told = cli("predict", run, "rows.csv", "--client", "site-3", "-o", "deep/out.csv")
    assert told.stdout == ""
    assert "5 rows predicted by the model of site-3, written to deep/out.csv" in told.stderr
    with open("deep/out.csv") as file:
        assert list(csv.DictReader(file)) == rows
    np.savez("rows.npz", x=x.numpy())
    assert list(csv.DictReader(io.StringIO(cli("predict", run, "rows.npz", "--client", "3").stdout))) == rows


def test_predict_names_classes_as_the_data_does(run, tmp_path):
    about = run / "clients" / "site-1" / "model.json"
    before = about.read_text()
    about.write_text(json.dumps({**json.loads(before), "classes": ["well", "ill"]}))
    table("rows.csv", torch.zeros(2, 4))
    assert cli("predict", run, "rows.csv", "--client", "1").stdout.splitlines()[0] == "predicted,well,ill"
    about.write_text(before)


def test_predict_a_regression(tmp_path):
    data = [(x, x @ torch.ones(4, 2)) for x, _ in two_kinds(2).values()]
    coterie.run("fedavg", data, out="r", reference=False, **{**QUICK, "model": "linear"})
    table("rows.csv", torch.zeros(2, 4))
    lines = cli("predict", "r", "rows.csv", "--client", "2").stdout.splitlines()
    assert lines[0] == "predicted1,predicted2"
    expected = coterie.load("r", 2)(torch.zeros(1, 4))[0].tolist()
    assert [float(cell) for cell in lines[1].split(",")] == pytest.approx(expected, rel=1e-4)


def test_what_is_wrong_is_told_without_a_trace(run):
    table("short.csv", torch.zeros(2, 3), names=("x1", "x2", "x3"))
    for words, told in {
        ("predict", run, "short.csv", "--client", "3"): "'short.csv' lacks the columns x4 of x1 to x4",
        ("predict", run, "short.csv", "--client", "9"): "there is no client '9'",
        ("predict", run, "short.csv", "--client", "sit-3"): "did you mean 'site-",
        ("predict", run, "none.csv", "--client", "3"): "there is no file 'none.csv'",
        ("predict", "nowhere", "short.csv", "--client", "3"): "'nowhere' is not a run folder",
        ("export", run, "--client", "9"): "there is no client '9'",
        ("onboard", run, "--data", "short.csv"): "'short.csv' has inputs only",
        ("onboard", run, "--data", "none.csv"): "there is no file 'none.csv'",
    }.items():
        result = cli(*words)
        assert result.exit_code == 1, words
        assert told in result.stderr
        assert "Traceback" not in result.stderr
    assert cli("export", run, "--client", "1", "--format", "keras").exit_code == 2


def test_a_newer_run_folder_is_told(run, tmp_path):
    about = run / "clients" / "site-2" / "model.json"
    before = about.read_text()
    about.write_text(json.dumps({**json.loads(before), "format": 99}))
    table("rows.csv", torch.zeros(2, 4))
    for words in (("predict", run, "rows.csv", "--client", "2"), ("export", run, "--client", "2")):
        result = cli(*words)
        assert result.exit_code == 1
        assert "was written by a newer version of Coterie: update Coterie" in result.stderr
    about.write_text(before)
