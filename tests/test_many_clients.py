"""The benchmark of many clients runs, and a missed target is an error."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "many_clients.py"


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("many_clients", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(slower=1.0, resident=900.0, start=5.0):
    return [["fedavg", 100, 1.0, 100.0, 1.0, 3.0, 400.0, 0.0], ["fedavg", 9, start, 100.0, slower, 3.0, resident, 0.0]]


@pytest.mark.parametrize(("figures", "missed"), [({}, 0), ({"resident": 2001.0}, 1)])
def test_targets(benchmark, monkeypatch, tmp_path, figures, missed):
    monkeypatch.setattr(benchmark, "METHODS", {"fedavg": {}})
    monkeypatch.setattr(benchmark, "measure", lambda *_: rows(**figures))
    assert benchmark.main(["--json", str(tmp_path / "told.json")]) == missed
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["rows"] == rows(**figures)
    assert all(len(row) == len(told["columns"]) for row in told["rows"])
    assert [target["reached"] for target in told["targets"]].count(False) == missed


def test_each_target_can_be_missed(benchmark):
    large = [[*row[:1], 100 * (i + 1), *row[2:]] for i, row in enumerate(rows(1.31, 2001.0, 21.0))]
    assert [target["reached"] for target in benchmark.judge(large)] == [False] * 3


@pytest.mark.slow
def test_quick(benchmark, capsys):
    assert benchmark.main(["--quick"]) == 0
    assert capsys.readouterr().out.count("reached quick") == len(benchmark.METHODS) + 2
