"""`coterie tune` and `coterie compare --tune` as a user types them."""

import json
from pathlib import Path

import pytest

from coterie.core.toml import read_toml
from tests.cli.commands import TINY, cli

SHORT = (*TINY, "--rounds", "2", "--trials", "3")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune") / "search"
    return out, cli("tune", *SHORT, "--methods", "fedprox", "--search", "mu=0.1..1", "--out", out)


def test_it_says_what_it_searches_what_it_costs_and_what_it_chose(found):
    out, result = found
    assert result.exit_code == 0, result.output
    told = json.loads((out / "tuning.json").read_text())
    assert "tune local, fedprox on digits: 10 clients" in result.output
    assert "fedprox: lr 0.001..1 (log), mu 0.1..1 (log)" in result.output
    assert "Each method, local included, has 3 candidates (3 until round 2): 6 rounds." in result.output
    assert "fedprox round 6/6 validation balanced_accuracy" in result.output
    score = told["methods"]["fedprox"]["chosen"]["validation_balanced_accuracy"]
    row = next(line for line in result.output.splitlines() if line.startswith("│ fedprox") and " lr " in line)
    assert f"{100 * score:.1f}" in row
    assert f"coterie run {out}/{told['best']}.toml" in result.output
    assert "Test examples were looked at once, for local" in result.output


def test_what_it_chose_can_be_run(found):
    out, _ = found
    result = cli("run", out / "fedprox.toml", "--no-reference", "--out", "again")
    assert result.exit_code == 0, result.output
    chosen = json.loads((out / "tuning.json").read_text())["methods"]["fedprox"]["chosen"]["values"]
    config = read_toml(Path("again/config.toml"))
    assert (config["hyper"]["mu"], config["optimizer"]["lr"]) == (chosen["mu"], chosen["lr"])


def test_again_nothing_is_trained(found):
    out, result = found
    again = cli("tune", *SHORT, "--methods", "fedprox", "--search", "mu=0.1..1", "--out", out)
    assert "round 6/6" not in again.output
    assert again.output.endswith(result.output[result.output.index("Chosen on validation data") :])
    assert cli("report", out).exit_code == 0
    assert (out / "report.html").exists()


def test_mistakes_are_told_in_words_and_at_once():
    result = cli("tune", *SHORT, "--methods", "ditto", "--search", "lamm", "--search", "lr=1..0.1", "--foo", "3")
    assert result.exit_code == 2
    assert "there is no flag --foo" in result.stderr
    assert "--search lr=1..0.1: the range is empty: give the smaller number first" in result.stderr
    result = cli("tune", *SHORT, "--methods", "ditto", "--search", "lamm")
    assert "has a 'lamm' (did you mean 'lam'?)" in result.stderr


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.cli.tune.run_tuning", interrupted)
    result = cli("tune", *SHORT, "--out", "all")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Stopped. To continue, run the same command with --out all"


def test_compare_can_tune_first():
    words = ("compare", *TINY, "--rounds", "2", "--methods", "fedavg", "--seeds", "2", "--tune", "2", "--out", "all")
    result = cli(*words)
    assert result.exit_code == 0, result.output
    chosen = json.loads(Path("all/tuning/tuning.json").read_text())["methods"]
    for label in ("local", "fedavg"):
        for seed in (0, 1):
            config = read_toml(Path(f"all/{label}-seed{seed}/config.toml"))
            assert config["optimizer"]["lr"] == chosen[label]["chosen"]["values"]["lr"]
            assert config["split_seed"] == 0
    assert "Chosen on validation data" in result.output
    assert "gain over local" in result.output
    again = cli(*words)
    assert "fedavg seed 1: already complete" in again.output
