"""The benchmarks run, do the same work on both sides, and say what they must. How fast it is, they tell themselves."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie import testing
from coterie.core.batches import Batch
from coterie.engine import Engine
from coterie.evaluation import Predictions
from coterie.experiment.simulation import Simulation
from tests.places import SHARED

HERE = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    return importlib.import_module(name)  # pyproject.toml puts benchmarks/ on the path


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = load("local_training")
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
    assert all(" ratio" in line and " target " in line and line.endswith("reached quick") for line in last)


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
    module = load("data_path")
    told = {"import": 1.0, "seconds": 1.0, "cpu": 1.0, "before": 2e8, "after": 3e8, "peak": 3e8, "dtype": "torch.uint8"}
    monkeypatch.setattr(module, "by_index", lambda *_: 0.1)
    monkeypatch.setattr(module, "loading", lambda: told)
    assert module.main(["--quick"]) == 0
    monkeypatch.setattr(module, "by_loader", lambda *_: 0.8)
    assert module.main([]) == 0
    assert "DataLoaders over index operations: 8 target >= 1 reached yes" in capsys.readouterr().out
    monkeypatch.setattr(module, "loading", lambda: {**told, "after": 5e8})
    assert module.main([]) == 1


def test_the_server_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load("server_steps")
    assert module.main(["--quick", "--json", str(tmp_path / "told.json")]) == 0
    assert "FedAMP" in capsys.readouterr().out
    told = json.loads((tmp_path / "told.json").read_text())
    assert [each["name"].split(":")[0] for each in told["targets"]].count("FedAMP") == 2
    assert len(told["targets"]) == 6
    # Without --quick, a target that is missed is an error; here with nothing to do but miss it.
    missed = module.target("speed", 1.0, 2.0)
    for name in ("attention", "gaussians", "means"):
        monkeypatch.setattr(module, name, lambda found, *_: found.add("", "", "", missed))
    monkeypatch.setattr(module, "matmul_rate", lambda *_: 1.0)
    assert module.main([]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seeds", "choice"])
def test_seeds_and_choice(name: str, tmp_path: Path) -> None:
    module = load(name)
    assert module.main(["--quick", "--json", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    assert all(len(row) == len(told["columns"]) for row in told["rows"])
    assert [target["name"].split(":")[0] for target in told["targets"]] == [case.name for case in module.CASES]


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "fashion-mnist").exists() and "COTERIE_DATA" not in os.environ,
    reason="Fashion-MNIST was not found: set COTERIE_DATA",
)
def test_whole_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", os.environ.get("COTERIE_DATA", str(SHARED)))
    module = load("whole_run")
    told = tmp_path / "told.json"
    assert module.main(["--quick", "--model", "linear", "--json", str(told)]) == 0
    rows = json.loads(told.read_text())
    assert [row[1] for row in rows["rows"]] == ["fedavg", "fedamp", "fedmap", "pfedbred"]
    assert all(len(row) == len(rows["columns"]) for row in rows["rows"])
    assert rows["tables"][0]["columns"][2:] == list(module.PARTS)


METHODS = ["fedavg", "fedamp", "fedmap", "pfedbred", "local", "fedprox", "fedper", "ditto", "scaffold"]


@pytest.fixture
def small() -> Any:
    """A method on three clients of 12 training examples, minibatches of 10: one whole minibatch and one of two."""

    def made(method: str) -> coterie.Setup:
        x = torch.randn(3, 14, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        data = [(own, torch.arange(14) % 10) for own in x]
        sgd = {"name": "sgd", "lr": 0.01}
        return coterie.prepare(method, data, model="linear", batch_size=10, validation=1, test=1, optimizer=sgd)

    return made


@pytest.mark.parametrize("method", METHODS)
def test_both_sides_do_the_same_work(method: str, small: Any) -> None:
    """What is counted is what is done: here, of our side, by every call of the network in a round of the loop."""
    module, setup = load("whole_run"), small(method)
    ordinary = module.other_side(setup, method)
    first = setup.task.init()
    assert all(torch.equal(value, first[name]) for name, value in ordinary.modules[0].named_parameters())
    ordinary.round()
    work = module.same_work(method, ordinary.work, module.work_of(setup))
    assert work.examples == work.gradients // 2 * 12
    calls = {"train": 0, "eval": 0}
    for mode in calls:

        def count(*_: Any, mode: str = mode) -> None:
            calls[mode] += 1

        getattr(setup.task, f"_{mode}").register_forward_hook(count)
    names = setup.federation.names
    sim = Simulation.start(setup.method, setup.task, setup.federation, setup.config.plan(), len(names), 0)
    sim.train(1, Engine())
    assert calls == {"train": work.gradients, "eval": work.scored // 12}  # all of a client's examples at once


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "fedper", "ditto", "scaffold"])
def test_both_sides_reach_the_same_models(method: str, small: Any) -> None:
    """With all of a client's examples in one minibatch, no draw tells them apart."""
    module, setup = load("whole_run"), small(method)
    whole = setup.config.model_copy(update={"batch_size": 12})
    federation = setup.federation
    sim = Simulation.start(setup.method, setup.task, federation, whole.plan(), len(federation.names), 0)
    ordinary = module.other_side(setup, method)
    for number in (1, 2):
        for loader in ordinary.loaders:
            loader.batch_sampler.batch_size = 12
        ordinary.round()
        sim.train(number, Engine())
    views = sim.views(2, Engine())
    for i, model in enumerate(ordinary.modules):
        for name, value in model.named_parameters():
            assert torch.allclose(value, views[name][i], atol=1e-5), (method, name)


def test_unequal_work_is_not_compared(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, setup = load("whole_run"), small("pfedbred")
    monkeypatch.setattr(module.METHODS["pfedbred"], "K", 4)
    monkeypatch.setattr(module, "setup_of", lambda *_: setup)
    with pytest.raises(SystemExit, match=r"not the same work: ordinary Work\(gradients=36.*ours Work\(gradients=42"):
        module.measure(module.CASES[0], "pfedbred")


def test_a_command_is_timed_by_what_it_says(tmp_path: Path) -> None:
    module = load("study")
    words = ["run", "--rounds=1", "--local-epochs=1", "--no-reference", "--no-report", "--no-compile", "--workers=1"]
    found = module.command(words, tmp_path / "run", tmp_path / "cache")
    assert 0 < found.start < found.spent.wall
    assert 0 < found.end < found.spent.wall - found.start
    assert not (tmp_path / "run" / "report.html").exists()
    with pytest.raises(SystemExit, match="--rounds=0 failed"):
        module.command(["run", "--rounds=0"], tmp_path / "other", tmp_path / "cache")


def told(value: float, name: str = "speed") -> dict[str, Any]:
    telling = load("telling")
    judged = telling.target(name, value, 2.0)
    drawn = telling.plot("speed <x>", [telling.bar("ours", value, 2.0), telling.bar("theirs", 1.0)], log=True)
    section = {"title": f"Of {name}", "columns": ["a", "b"], "rows": [["x|y", 1234.5]], "targets": [judged]}
    about = {"cpu": "a processor", "cores": 2, "memory": 8.0, "system": "Linux", "python": "3", "torch": "2"}
    section |= {"quick": False, "date": "2020-01-01", "seconds": 9.0, "others": 0.2, "tables": [], "notes": ["Note."]}
    return {**section, "plot": drawn, "machine": {**about, "commit": "abc"}}


def test_the_page_tells_of_what_was_missed(tmp_path: Path) -> None:
    module = load("all")
    failed = {key: value for key, value in told(1.0).items() if key not in ("columns", "rows", "targets", "plot")}
    sections = {"seeds": told(1.5), "choice": told(2.5), "data_path": {**failed, "title": "data_path", "failed": 3}}
    module.render(sections, tmp_path)
    page = (tmp_path / "performance.md").read_text()
    assert "| speed | 1.5 | >= 2 | **no** |" in page
    assert "| speed | 2.5 | >= 2 | yes |" in page
    assert "0 of 1 reached" in page
    assert "**failed** (exit code 3)" in page
    assert "too much for its ratios to be trusted" in page
    assert "| x\\|y | 1,234 |" in page
    assert "Not measured yet: `benchmarks/whole_run.py`" in page
    assert [module.good(section) for section in sections.values()] == [False, True, False]
    for name, verdict in (("seeds", "missed"), ("choice", "reached")):
        assert f"](performance/{name}.svg)" in page
        picture = ET.fromstring((tmp_path / "performance" / f"{name}.svg").read_text())
        assert verdict in "".join(picture.itertext())
    assert json.loads((tmp_path / "performance.json").read_text()) == sections


def test_only_some_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, missed = load("all"), {"seeds": True}
    monkeypatch.setattr(module, "run", lambda name, quick: told(1.0 if missed.get(name) else 3.0, name))
    assert module.main(["--out", str(tmp_path)]) == 1
    before = json.loads((tmp_path / "performance.json").read_text())
    assert list(before) == list(module.SCRIPTS)
    missed.clear()
    assert module.main(["--out", str(tmp_path), "--only", "seeds"]) == 0
    after = json.loads((tmp_path / "performance.json").read_text())
    assert list(after) == list(module.SCRIPTS)
    assert after["seeds"]["targets"][0]["reached"]
    assert {name for name in after if after[name] != before[name]} == {"seeds"}


def test_the_runner_runs_every_script_there_is() -> None:
    scripts = {path.stem for path in HERE.glob("*.py") if "sys.exit(main" in path.read_text()} - {
        "all",
        "common",
        "defaults",
        "defaults_why",
        "mutation",
        "robustness",
    }  # which measure no time
    assert {*load("all").SCRIPTS, *load("all").LONG} == scripts | {"flower_round"}


def test_a_smoke_test_of_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One script that runs, and one that fails: it is told, and does not stop the other."""
    module = load("all")
    real = subprocess.run

    def some(command: list[str], **options: Any) -> Any:
        return real([command[0], "-c", "raise SystemExit(3)"] if "data_path.py" in str(command) else command, **options)

    monkeypatch.setattr(module.subprocess, "run", some)
    assert module.main(["--quick", "--out", str(tmp_path), "--only", "data_path", "class_moments"]) == 1
    sections = json.loads((tmp_path / "performance.json").read_text())
    assert sections["data_path"]["failed"] == 3
    assert sections["class_moments"]["machine"]["cores"] >= 1
    assert "smoke test, not judged" in (tmp_path / "performance.md").read_text()
    with pytest.raises(SystemExit):
        module.main(["--quick"])


def test_defaults_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smoke test of docs/defaults.md: on the second call everything is in the cache."""
    asked = ["--quick", "--only", "digits, iid", "--methods", "fedamp", "--cache", str(tmp_path)]
    asked += ["--out", str(tmp_path / "page.md")]
    defaults = load("defaults")
    assert defaults.main(asked) == 0
    first = capsys.readouterr()
    assert first.err.count(" s\n") == 2
    assert "| `fedamp` | +" in first.out or "| `fedamp` | -" in first.out
    assert defaults.main(asked) == 0
    assert capsys.readouterr() == (first.out, "")
    assert not (tmp_path / "page.md").exists()


def test_the_common_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A smoke test of docs/benchmark.md on digits: run once, then read; other code of a method is another result."""
    common = load("common")
    case = common.Case("digits", "ten clients", "accuracy", {"data": "digits", "local_epochs": 1})
    monkeypatch.setattr(common, "cases", lambda: (case,))
    results = tmp_path / "benchmark.json"
    asked = ["--quick", "--methods", "fedbn", "--results", str(results)]
    assert common.main(asked) == 0
    first = capsys.readouterr()
    assert [line.split(": ")[1] for line in first.err.splitlines()] == ["local", "fedavg", "fedbn"]
    rows = {line.split("`")[1]: line.split(" | ") for line in first.out.splitlines() if line.startswith("| `")}
    assert rows.keys() == {"local", "fedavg", "fedbn"}
    assert "; equal to `fedavg` to the digit on digits | Neither network has normalisation layers" in first.out
    assert len(results.read_text().splitlines()) == 2 + 2 + 3, "a line each"
    found = common.read(results)["digits"]["fedavg"]
    assert found["values"].keys() == {"lr"}
    assert 0 < found["validation"] <= 1
    assert found["seconds"] > 0
    assert 0 < found["among_own"] <= 1
    assert np.array(found["scores"]).shape == (1, 10)
    assert common.main([*asked, "--page"]) == 0
    assert capsys.readouterr() == (first.out, "")
    monkeypatch.setattr(common, "code", lambda method: "changed")
    assert common.main([*asked, "--page"]) == 1
    assert "digits: left out, there is no result of local and fedavg: run it first" in capsys.readouterr().err


def test_the_common_benchmark_tries_step_sizes_where_it_does_not_search(monkeypatch: pytest.MonkeyPatch) -> None:
    common = load("common")
    case = common.Case("digits", "", "accuracy", {"data": "digits", "model": "linear", "local_epochs": 1})
    assert common.tuning(case.settings) == "9 candidates as in `coterie tune`"
    tried = tuple(coterie.SGD(size, momentum=0.9) for size in (1e-6, 0.5, 1e38))
    monkeypatch.setattr(common, "TRIED", {"linear": tried})
    assert common.tuning(case.settings) == "SGD with step sizes 1e-06 and 0.5 and 1e+38, momentum 0.9"
    found = common.tune_and_run(case, "fedavg", (0,), True)
    assert found["values"] == {"lr": 0.5}, "the one that diverges is passed over"
    assert np.array(found["scores"]).shape == (1, 10)
    monkeypatch.setattr(common, "TRIED", {"linear": tried[2:]})
    assert "diverged" in common.tune_and_run(case, "fedavg", (0,), True)["failed"]


def test_a_result_far_below_local_is_told_with_what_it_is_among_own_classes() -> None:
    common = load("common")
    # Of three classes, the first client has two and the other one: masked, one and two of theirs are right.
    outputs = torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    found = Predictions(outputs, torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]))
    assert common.among_own(found, 2) == pytest.approx((0.5 + 1.0) / 2)
    cost = {"values": {}, "worst_tenth": 0.5, "bytes": 1.0, "seconds": 1.0}
    local, same = {"scores": [[0.9, 0.8]], **cost}, {"scores": [[0.9, 0.8]], **cost}
    far = {"scores": [[0.7, 0.6]], "among_own": 0.75, **cost}
    printed = dict(zip(common.Row._fields, ("lr 0.1", 70.0, 0.5, 60.0, -15.04, 5.0, 1.0, 2.0), strict=True))
    old = {"printed": printed, "among_own": 0.8, "equal": ["far"]}
    by_method = {"local": local, "fedavg": far, "same": same, "not": {"failed": "it diverged"}, "old": old, "no": None}
    assert common.remarks({"digits": by_method}) == {
        "fedavg": ["20.0 points below `local` on digits (75.0 among its own classes)"],
        "same": ["equal to `local` to the digit on digits"],
        "not": ["failed on digits"],
        "old": [
            "15.0 points below `local` on digits (80.0 among its own classes)",
            "equal to `far` to the digit on digits",
        ],
    }
    lines = {name: common.line(name, by_method[name], row) for name, row in common.rows(by_method).items()}
    assert lines["old"] == "| `old` | lr 0.1 | 70.0 ± 0.5 | 60.0 | -15.0 | 5 % | 1.00 | 2.0 |"
    assert lines["local"] == "| `local` | as it is | 85.0 ± nan | 50.0 |  |  | 1.00 | 1.0 |"


def test_the_code_of_a_method_is_that_of_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common = load("common")
    before = {name: common.code(name) for name in ("fedper", "scaffold")}
    assert len(set(before.values())) == 2
    shutil.copytree(HERE.parent / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    path = tmp_path / "src" / "coterie" / "methods" / "fedper.py"
    text = path.read_text()
    path.write_text(text.replace("A model consists of", "A network consists of") + "# a comment\n")
    assert {name: common.code(name) for name in before} == before
    path.write_text(text + "MORE = 1\n")
    assert common.code("fedper") != before["fedper"]
    assert common.code("scaffold") == before["scaffold"]


def test_renewed_rows_leave_the_others_of_the_page_as_they_are(tmp_path: Path) -> None:
    defaults = load("defaults")
    case = defaults.cases()[0]
    local = {"scores": [[0.5, 0.7], [0.5, 0.7]]}

    def page(kept: dict[str, str], **scores: list[list[float]]) -> str:
        results = {case.name: {"local": local, **{name: {"scores": found} for name, found in scores.items()}}}
        return str(defaults.page(results, [case], (0, 1), kept))

    old, out = page({}, fedprox=[[0.6, 0.7], [0.6, 0.7]], moon=[[0.5, 0.5], [0.5, 0.5]]), tmp_path / "page.md"
    out.write_text(old)
    kept = defaults.old_rows(out)
    assert kept["local"] == "| `local` scores | 60.0 |"
    new = page(kept, moon=[[0.9, 0.9], [0.9, 0.9]])
    assert kept["fedprox"] in new.splitlines()
    assert kept["moon"] not in new.splitlines()
    assert "| `moon` | +30.0 ± 0.0, 100 % |" in new.splitlines()
    failed = {case.name: {"local": local, "moon": {"failed": "it diverged"}}}
    assert "| `moon` | failed: it diverged |" in defaults.page(failed, [case], (0, 1))
    assert defaults.measure(case, "moon", (0, 1), tmp_path, quick=True, run=False) == {}
    assert "| `moon` | not measured |" in defaults.page({case.name: {"local": local, "moon": {}}}, [case], (0, 1))
    assert defaults._alike("81.1", "81.0 |")
    assert not defaults._alike("81.1", "80.9")
    assert defaults._alike("81.1 |", "not measured")
    # A cell that was not measured anew stays as it was, and the others of its row do not.
    other = defaults.cases()[1]
    results = {
        case.name: {"local": local, "moon": {}},
        other.name: {"local": local, "moon": {"scores": [[0.6, 0.8]] * 2}},
    }
    both = defaults.page(results, [case, other], (0, 1), {"moon": "| `moon` | +1.0 ± 0.0, 50 % | +2.0 ± 0.0, 50 % |"})
    assert "| `moon` | +1.0 ± 0.0, 50 % | +10.0 ± 0.0, 100 % |" in both.splitlines()


def test_what_is_said_about_methods_in_the_page_of_defaults_names_methods() -> None:
    said = load("defaults").notes()
    assert said
    assert all(line.startswith("- `") and line.endswith(".") for line in said)


def test_a_centroid_that_follows_cannot_lag() -> None:
    """Centroids half, or three times, as long as a class's mean feature pull to that mean; an unknown class to none."""
    near = load("defaults_why").near
    features = torch.tensor([[1.0, 0.0], [3.0, 2.0], [4.0, 4.0], [9.0, 9.0], [0.0, 7.0]])
    batch = Batch(features, torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor(0))
    centroid = torch.tensor([[1.0, 0.5], [12.0, 12.0], [5.0, 5.0]])  # means are [2, 1] and, of one example, [4, 4]
    found = near(features, batch, (centroid, torch.tensor([1.0, 1.0, 0.0]), torch.tensor(3.0)))
    assert float(found) == pytest.approx(3.0 * (1.0 + 1.0) / 4)  # each of the first two is 1 away, a mean over features


def test_the_share_of_a_gradient_that_is_chance() -> None:
    """s^2 / ||g||^2 with the gradients of half minibatches, each by hand; padding counts for nothing."""
    share_of_chance = load("defaults_why").share_of_chance
    task, batches = testing.task(norm=False), testing.batches(2).once()
    params = task.init()
    trained, rest = task.split(params)
    groups, counts = [], []
    for index, mask in zip(batches.index[0], batches.mask[0], strict=True):
        for first in (0, 1):
            some = index[first::2][mask[first::2] > 0]
            if len(some):
                losses = torch.func.grad(
                    lambda w, some=some: torch.nn.functional.cross_entropy(
                        torch.func.functional_call(testing.module(norm=False), {**w, **rest}, (batches.x[some],)),
                        batches.y[some],
                    )
                )(trained)
                groups.append(torch.cat([value.flatten() for value in losses.values()]))
                counts.append(len(some))
    g, n = torch.stack(groups), torch.tensor(counts, dtype=torch.float32)
    mean = n @ g / n.sum()
    error = (n @ (g - mean).square().sum(1)) / n.sum() / (len(n) - 1)
    assert len(n) > 3
    assert 0 < float(error / mean.square().sum()) < 0.99
    assert float(share_of_chance(task, params, batches)) == pytest.approx(float(error / mean.square().sum()), rel=1e-4)


def test_the_small_silos_are_all_of_their_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    why = load("defaults_why")
    monkeypatch.setattr(why.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    sizes = {
        name: [len(Path(path).read_text().splitlines()) - 1 for path in case.settings["silos"]]
        for name, case in why.small_silos.__wrapped__().items()
    }
    assert [sum(each) for each in sizes.values()] == [442, 442, 442, 240]
    assert all(max(each) - min(each) <= 1 for each in sizes.values())


def test_the_laws_that_a_mutant_has_to_keep_are_those_of_methods_that_need_its_file() -> None:
    methods_with = load("mutation").methods_with
    assert methods_with("methods/fedmap.py") == ["fedmap"]
    assert methods_with("parts/attention.py") == ["heurfedamp", "fedamp"], "through parts/neighbours.py"
    assert methods_with("parts/class_tree.py") == ["pfedgp"], "through parts/gaussian_process.py"
    assert len(methods_with("parts/averaging.py")) == 3
    assert methods_with("parts/server_optimizers.py") == []  # it stands around any method


def test_no_fork_begins_after_the_time_that_was_given(tmp_path: Path) -> None:
    mutation = load("mutation")

    def work(out: Path) -> None:
        out.write_text("{}")

    assert list(mutation.in_forks([work], 1, [5.0], until=0.0)) == []
    assert list(mutation.in_forks([work], 1, [5.0])) == [(0, {})]


def test_mutants_are_single_changes_with_names_that_do_not_depend_on_layout() -> None:
    from mutants import mutants

    source = b'LIMIT = 3\n\n\ndef f(a, b: int = 1):\n    """1 + 1."""\n    return max(a, b) + a  # as it is\n'
    found = {mutant.change: mutant for mutant in mutants("parts/f.py", source)}
    assert found["max(a, b) + a -> max(a, b) - a"].apply(source).endswith(b"return (max(a, b) - a)  # as it is\n")
    assert found["max(a, b) -> min(a, b)"].function == "f"
    assert found["3 -> 6"].apply(source).startswith(b"LIMIT = 6\n")
    assert "1 -> 0" in found
    assert not any("1 + 1" in change for change in found)  # words are not mutated
    again = mutants("parts/f.py", source.replace(b"max(a, b)", b"max(a,\n        b)"))
    assert {mutant.name for mutant in again} == {mutant.name for mutant in found.values()}


def test_every_reason_names_a_mutant_and_says_why() -> None:
    mutation = load("mutation")
    reasons = mutation.read_reasons()
    files = {entry["file"] for entry in reasons.values()}
    found = {each.name for file in files for each in mutation.mutants(file, (mutation.PACKAGE / file).read_bytes())}
    for name, entry in reasons.items():
        assert name in found, f"{name} is no longer there: drop it"
        assert entry["verdict"] in ("equivalent", "survivor")
        assert entry["reason"].endswith(".")


def test_the_page_of_mutants_tells_what_was_killed_before_tests_were_written_for_the_sample() -> None:
    mutation = load("mutation")
    chosen = mutation.mutants("parts/f.py", b"def f(a, b):\n    return a + b, a * b, a < b\n")[:4]
    lines = {mutant.name: {"outcome": "killed", "killer": "a test", "first": "killed"} for mutant in chosen}
    lines[chosen[0].name]["first"] = "survived"
    told = mutation.page(lines, chosen, {"parts/f.py": 4}, seed=5)
    assert "**100.0 % are killed**" in told
    assert "seed 5" in told
    assert "75.0 % were killed** (1 survived)" in told
    del lines[chosen[1].name]["first"]
    told = mutation.page(lines, chosen, {"parts/f.py": 4}, seed=5)
    assert "was not kept" in told
    assert "75.0 % were killed" not in told
