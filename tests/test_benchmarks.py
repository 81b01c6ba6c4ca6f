"""The benchmarks run, do the same work on both sides, and say what they must. How fast it is, they tell themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from coterie.engine import Engine

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "local_training.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("local_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "local_training", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "cores", lambda: 1)  # threads that wait for each other take long on a busy machine
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield module
    torch.set_num_threads(threads)


def test_quick(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--quick"]) == 0
    told = capsys.readouterr().out
    for case in benchmark.CASES:
        assert f"{case.name}: auto chose" in told
    assert told.count("6 gradient steps a round on both") == 3
    last = told.splitlines()[-3:]
    assert all(" ratio " in line and " target " in line and line.endswith("reached quick") for line in last)


def test_a_missed_target_is_an_error(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = benchmark.CASES[0].quick()
    told = benchmark.measure(case, 3)
    monkeypatch.setattr(benchmark, "measure", lambda *_: told)
    for target, code in ((0.0, 0), (1e9, 1)):
        object.__setattr__(case, "target", target)
        assert benchmark.main(["--case", "1"]) == code


def test_models_that_differ_are_an_error(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = benchmark.CASES[0].quick()
    _, ordinary, ours = benchmark.build(case)
    monkeypatch.setattr(benchmark, "LR", 0.02)  # of the ordinary side only
    with pytest.raises(SystemExit, match="the average models differ by"):
        benchmark.same_work(case, ordinary, ours, Engine())


@pytest.mark.parametrize(("case", "expected"), [(0, 1504), (1, 79_400), (2, 4_267_008)])
def test_counts_multiply_adds(benchmark: ModuleType, case: int, expected: int) -> None:
    case = benchmark.CASES[case]
    assert benchmark.multiply_adds(case.network(case.shape, case.classes), case.shape) == expected


@pytest.mark.slow
def test_all_engines(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--quick", "--all-engines", "--case", "1"]) == 0
    assert "<- auto" in capsys.readouterr().out


def test_the_data_path(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "data_path.py"
    spec = importlib.util.spec_from_file_location("data_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = {"import": 1.0, "seconds": 9.0, "cpu": 1.0, "before": 2e8, "after": 3e8, "peak": 3e8, "dtype": "torch.uint8"}
    monkeypatch.setattr(module, "loading", lambda: told)
    assert module.main(["--quick"]) == 0
    assert "times as fast as DataLoaders" in capsys.readouterr().out
    monkeypatch.setattr(module, "loading", lambda: {**told, "after": 5e8})
    assert module.main(["--quick"]) == 1


def test_the_server_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "server_steps.py"
    spec = importlib.util.spec_from_file_location("server_steps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "server_steps", module)
    spec.loader.exec_module(module)
    assert module.main(["--quick", "--json", str(tmp_path / "told.json")]) == 0
    assert "FedAMP" in capsys.readouterr().out
    told = json.loads((tmp_path / "told.json").read_text())
    assert [sorted(each) for each in told["targets"]] == [["name", "reached", "target", "value"]] * 6
    assert all(len(row) == len(told["columns"]) for row in told["rows"])
    # Without --quick, a target that is missed is an error; here with nothing to do but miss it.
    for name in ("attention", "gaussians", "means"):
        monkeypatch.setattr(module, name, lambda told, *_: told.target("speed", 1.0, 2.0, reached=False))
    monkeypatch.setattr(module, "matmul_rate", lambda *_: 1.0)
    assert module.main([]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seeds", "choice"])
def test_seeds_and_choice(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert module.main(["--quick", "--json", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert all(len(row) == len(told["columns"]) for row in told["rows"])
    assert [target["name"] for target in told["targets"]] == [case.name for case in module.CASES]


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "fashion-mnist").exists() and "COTERIE_DATA" not in os.environ,
    reason="Fashion-MNIST is not here: set COTERIE_DATA",
)
def test_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", os.environ.get("COTERIE_DATA", str(SHARED)))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = importlib.import_module("whole_run")
    told = tmp_path / "told.json"
    assert module.main(["--quick", "--model", "linear", "--json", str(told)]) == 0
    rows = json.loads(told.read_text())
    assert [row[1] for row in rows["rows"]] == ["fedavg", "fedamp", "fedmap", "pfedbred"]
    assert all(len(row) == len(rows["columns"]) for row in rows["rows"])
