import json
from pathlib import Path

import numpy as np
import pytest

from coterie.core.toml import read_toml
from tests.cli.commands import HOW, TINY, cli


def test_compare_prints_methods_and_clients_and_skips_what_is_done():
    words = ("compare", *TINY, "--methods", "local,fedavg,fedprox", "--seeds", "2", "--mu", "0.3", "--out", "all")
    result = cli(*words)
    assert result.exit_code == 0, result.output
    told = json.loads(Path("all/comparison.json").read_text())
    for name, means in told["methods"].items():
        assert f"{100 * means['mean']:.1f} ± {100 * means['std']:.1f}" in result.output, name
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if line[:1] == "│"]
    clients = [line for line in lines if line[0].startswith("client-")]
    assert len(clients) == 10
    rows = [row for row in told["rows"] if row["client"] == "client-3" and row["method"] == "fedprox"]
    mean = 100 * np.mean([row["test_balanced_accuracy"] for row in rows])
    assert float(clients[2][4]) == pytest.approx(mean, abs=0.051)
    assert "gain over local" in result.output
    for name in ("fedavg", "fedprox"):
        counts = told["methods"][name]["benefit"]["overall"]
        assert f"{name}: Of 10 clients, {counts['gains']} gain" in result.output
        assert f"{counts['undecided']} undecided (95 % intervals)." in result.output
    assert "local, fedavg, fedprox on digits: 10 clients" in result.output
    assert " is best on average, " in result.output or " are equally good on average" in result.output
    assert read_toml(Path("all/fedprox-seed1/config.toml"))["hyper"] == {"mu": 0.3}
    again = cli(*words)
    assert "fedprox seed 1: already complete" in again.output
    assert "round 1/1" not in again.output
    assert again.output.endswith(result.output[result.output.index("Test balanced accuracy") :])


def test_compare_takes_a_file_for_run():
    Path("my.toml").write_text('method = "fedprox"\ndata = "digits"\nseeds = 1\n[hyper]\nmu = 0.5\n')
    result = cli("compare", "my.toml", *TINY[2:], "--quiet")
    assert result.exit_code == 0, result.output
    assert read_toml(Path("runs/compare-digits-seed0/fedprox-seed0/config.toml"))["hyper"] == {"mu": 0.5}
    assert Path("runs/compare-digits-seed0/local-seed0").exists()
    assert result.output.startswith("Test balanced accuracy (%), seed 0")
    assert result.output.rstrip().endswith("┘")


def test_compare_tells_everything_wrong_at_once():
    words = ("--methods", "local,fedavgg,fedmap", "--seeds", "x", "--sigma2", "-3", "--method", "q", "--foo", "3")
    result = cli("compare", *words)
    assert result.exit_code == 2
    for problem in (
        "seeds = 'x': give a number of seeds, such as 3, or a list, such as 0,1,2",
        "there is no flag --method (did you mean '--methods'?)",
        "there is no flag --foo",
        "there is no method 'fedavgg' (did you mean 'fedavg'?)",
        "sigma2 = '-3': method fedmap needs auto | a number > 0",
    ):
        assert f"- {problem}" in result.stderr, problem
    result = cli("compare", "--methods", "local,fedavg", "--sigma2", "3")
    assert result.stderr.strip() == "--sigma2 is a flag of fedmap, not of local, fedavg"


def test_ctrl_c_in_compare_names_the_folder(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.cli.compare.run_trials", interrupted)
    result = cli("compare", *TINY, "--out", "all")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Stopped. To continue, run the same command with --out all"


def test_finished_runs_are_compared_from_their_folders(finished):
    assert cli("run", *TINY, "--method", "fedavg", "--no-reference", "--out", "avg").exit_code == 0
    result = cli("compare", finished[0], "avg")
    assert result.exit_code == 0, result.stderr
    assert "fedmap: Of 10 clients" in result.output
    assert "fedavg: Of 10 clients" in result.output
    assert "round 1/1" not in result.output
    alone = cli("compare", "avg")
    assert alone.exit_code == 1
    assert "'avg': no local reference" in alone.stderr
    assert "without --no-reference" in alone.stderr
    result = cli("compare", "avg", "--rounds", "3")
    assert result.exit_code == 2
    assert "give only their folders" in result.stderr


def test_compare_takes_a_setting():
    result = cli(
        "compare",
        "--setting",
        "fedmap/label-skew",
        "--seeds",
        "1",
        "--local-steps",
        "1",
        "--rounds",
        "1",
        *HOW,
        "--out",
        "c",
    )
    assert result.exit_code == 0, result.output
    assert {path.name for path in Path("c").iterdir() if path.is_dir()} == {"local-seed0", "fedmap-seed0"}
