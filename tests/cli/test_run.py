import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coterie
from coterie.cli.tables import counts_sentence, verdict_sentence
from coterie.data import SOURCES, Source, from_clients
from coterie.experiment.setup import prepare
from tests.cli.commands import HOW, TINY, cli


def test_a_run_prints_every_client_the_averages_and_a_verdict(finished):
    out, result = finished
    assert result.exit_code == 0
    rows = [line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│")]
    found = coterie.resume(out)
    assert [row[0].strip() for row in rows] == [*found.names, "mean of 10"]
    for row, client in zip(rows, found.clients, strict=False):
        local, ours, gain = (float(value) for value in row[2:5])
        assert row[6].strip() == client["verdict"]
        assert int(row[1]) == client["train"]
        assert ours == pytest.approx(100 * client["test_balanced_accuracy"], abs=0.051)
        assert local == pytest.approx(100 * client["local_test_balanced_accuracy"], abs=0.051)
        assert gain == pytest.approx(100 * client["gain"], abs=0.051)
    assert "Round 1 of 1 was selected by mean validation balanced accuracy (training alone: round 1)." in result.output
    assert verdict_sentence(found) in result.output
    assert counts_sentence(found.benefit()) in result.output
    assert "selected round 1: " in result.output
    assert "last round 1: " in result.output
    assert "coefficient of variation" in result.output
    assert "Wilcoxon" in result.output or "nothing to test" in result.output
    assert f"Written to {out}" in result.output
    assert "fedmap round 1/1 loss " in result.output
    assert "BMTA" not in result.output


def test_bmta_only_when_asked(finished):
    told = cli("resume", finished[0], "--bmta").output
    assert f"BMTA {100 * coterie.resume(finished[0]).bmta():.1f} %" in told
    assert "optimistic" in told


def test_quiet_prints_the_table_only(finished):
    told = cli("resume", finished[0], "--quiet").output
    assert told.startswith("Test balanced accuracy (%)")
    assert told.rstrip().endswith("┘")


def test_profile_tells_where_the_time_went():
    told = cli("run", *TINY, "--out", "there", "--profile", "--no-reference", "--quiet").output
    assert "Where the time was spent" in told
    assert all(f"│ {name} " in told for name in ("gather", "train", "evaluate", "aggregate", "write", "all"))
    assert "of the time of the rounds" in told.lower()
    assert json.loads(Path("there/trace.json").read_text())["traceEvents"]


def test_the_default_folder_is_new_each_time(monkeypatch):
    for expected in ("runs/local-digits-seed0", "runs/local-digits-seed0-2"):
        result = cli("run", *TINY, "--method", "local")
        assert f"Written to {expected}" in result.output
        assert (Path(expected) / "summary.json").exists()
    assert "This is training alone" in result.output


def test_everything_wrong_is_told_at_once_before_anything_trains():
    Path("bad.toml").write_text(
        'method = "fedmap"\nrounds = 0\nbatchsize = 3\ndata = 5\n'
        '[hyper]\nsigma = 3\n[optimizer]\nname = "adam"\nlr = -1\n'
    )
    words = ("--engine", "fast", "--roundz", "3", "--mu", "2", "--validation", "0.9", "--memory=lots", "--likelihood")
    result = cli("run", "bad.toml", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    for problem in (
        "data = 5: give its name, as text",
        "there is no flag --roundz (did you mean '--rounds'?)",
        "--mu is a flag of fedprox, fedprox-ft, moon, gpfl, not of fedmap",
        "--likelihood needs a value",
        "rounds = 0: input should be greater than or equal to 1",
        "engine = 'fast': input should be 'auto', 'loop' or 'stacked'",
        "there is no setting 'batchsize' (did you mean 'batch_size'?)",
        "validation (0.9) and test (0.3) leave nothing to train on",
        "memory = 'lots': give a size such as 500MB or 2GB",
        "lr = -1: optimizer adam needs a number > 0",
        "method fedmap has no 'sigma' (did you mean 'sigma2'?)",
    ):
        assert f"- {problem}" in result.stderr, problem
    assert result.stderr.startswith("11 problems:")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["missing.toml"], "there is no file 'missing.toml'"),
        (["--method", "fedmapp", "--sigma2", "3"], "there is no method 'fedmapp' (did you mean 'fedmap'?)"),
        (["--method", "nowhere:Method"], "method 'nowhere:Method' cannot be imported"),
        (["--model", "nope"], "there is no model 'nope'"),
        (["--data", "digit"], "there is no data set 'digit' (did you mean 'digits'?)"),
        (["--local-steps", "3", "--local-epochs", "2"], "give local_epochs or local_steps, not both"),
        (["--data", "digits", "--clients-per-round", "99"], "there are 10 clients"),
        (
            ["--data", "digits", "--select", "rmse"],
            "a classification has balanced_accuracy, accuracy, macro_f1, auroc, ece, loss",
        ),
        (["--optimizer", "sdg"], "there is no optimizer 'sdg' (did you mean 'sgd'?)"),
        (["--data", "synthetic-label-skew", "--momentum", "0.9"], "optimizer adam has no 'momentum'"),
        (["--sigma2", "-1"], "sigma2 = '-1': method fedmap needs auto | a number > 0"),
    ],
)
def test_one_problem_is_one_line(words, problem):
    result = cli("run", *words)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_folders_that_cannot_be_used(finished):
    Path("file").touch()
    for out, problem in (
        ("file", "cannot be written"),
        ("file/below", "cannot be written"),
        (finished[0], "already holds a run: 'coterie resume"),
    ):
        result = cli("run", *TINY, "--out", out)
        assert result.exit_code == 1
        assert problem in result.stderr
        assert "round 1/1" not in result.stdout
    for path in ("file", "nowhere"):
        result = cli("resume", path)
        assert result.exit_code == 1
        assert result.stderr.strip() == f"'{path}' is not a run folder: it has no config.toml"


def regression(name, seed, validation, test):
    xs = [torch.linspace(-1, 1, 20 + i)[:, None] for i in range(2)]
    return from_clients([(x, 3 * x) for x in xs], name=name, validation=validation, test=test, seed=seed)


def test_a_regression_has_other_metrics_and_no_bmta(monkeypatch):
    monkeypatch.setitem(SOURCES, "line", Source(regression, "a line", {"optimizer": {"name": "sgd", "lr": 0.1}}))
    words = ("run", "--data", "line", "--model", "linear", "--rounds", "1", "--out", "run", *HOW)
    result = cli(*words, "--bmta")
    assert result.exit_code == 2
    assert "--bmta needs classes, but line is a regression" in result.stderr
    assert not Path("run").exists()
    result = cli(*words)
    assert result.output.count("Test rmse") == 1
    assert "points" not in result.output
    assert "(rmse)" in result.output or "makes no difference" in result.output


def test_ctrl_c_leaves_a_run_to_go_on_with():
    Path("my.toml").write_text('data = "digits"\nrounds = 40\nlocal_steps = 1\n')
    words = [sys.executable, "-m", "coterie", "run", "my.toml", "--no-reference", "--out", "a run", *HOW]
    source = str(Path(coterie.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source + os.pathsep + os.environ.get("PYTHONPATH", "")}
    process = subprocess.Popen(
        words,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests themselves run in the background, a child would inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if " round 2/40 " in line:
            process.send_signal(signal.SIGINT)
            break
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.strip() == "Stopped. To continue: coterie resume 'a run'"
    done = [json.loads(line)["round"] for line in Path("a run/rounds.jsonl").read_text().splitlines()]
    assert done == list(range(1, len(done) + 1))
    assert 2 <= len(done) < 40
    result = cli("resume", "a run")
    assert result.exit_code == 0
    assert f"fedmap: continuing after round {len(done)} of 40" in result.output
    rounds = [json.loads(line)["round"] for line in Path("a run/rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 41))


def test_ctrl_c_before_the_run_says_that_nothing_was_written(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.cli.run.prepare", interrupted)
    result = cli("run", *TINY)
    assert result.exit_code == 130
    assert result.stderr.strip() == "Stopped. Nothing was written."


def test_global_and_personal_models_are_both_shown():
    result = cli("run", *TINY, "--method", "pfedme", "--out", "run")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    summary = json.loads(Path("run/summary.json").read_text())["g_and_p"]
    for which, name in (("G", "G (the global model)"), ("P", "P (the clients' own)")):
        for when in ("selected", "last"):
            found = summary[when][which]
            both = [f"{100 * found[test]['balanced_accuracy']:.1f}" for test in ("global", "local")]
            assert [name, f"{when}, 1", *both] in rows


def test_the_round_can_be_selected_by_any_metric():
    result = cli("run", *TINY, "--select", "auroc", "--method", "fedavg", "--out", "run")
    assert result.exit_code == 0, result.output
    assert "was selected by mean validation AUROC" in result.output
    assert "NaN" not in Path("run/rounds.jsonl").read_text()  # null, where a client has one class only


def test_run_with_a_holdout_prints_the_newcomers_apart():
    words = ("--data", "digits", "--rounds", "1", "--local-steps", "1", *HOW, "--no-reference", "--holdout", "0.2")
    told = cli("run", *words, "--out", "r")
    assert told.exit_code == 0, told.output
    before, after = told.stdout.split("Onboarded after training")
    held_out = prepare("fedmap", "digits", holdout=0.2).held_out.names
    assert len(held_out) == 2
    for name in held_out:
        assert f"│ {name} " in after
        assert f"│ {name} " not in before
    assert "mean of 8" in before
    assert "mean of 2" in after
