import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import coterie
from coterie import Benefit
from coterie.cli import app
from coterie.cli.asked import _over
from coterie.cli.progress import Bars, Lines
from coterie.cli.tables import amount, print_comparison, shown, verdict, who
from coterie.data import SOURCES, Source, from_clients
from coterie.experiment.comparison import Comparison
from coterie.experiment.config import TABLES, Config, read_toml
from coterie.local import OPTIMIZERS
from coterie.methods import METHODS, FedAvg
from coterie.models import MODELS

HOW = ("--engine", "loop", "--workers", "1", "--no-compile")
TINY = ("--data", "digits", "--rounds", "1", "--local-steps", "1", "--no-report", *HOW)


def cli(*words):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_RUNS", raising=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, cli("run", *TINY, "--out", out)


def test_profile_tells_where_the_time_went():
    told = cli("run", *TINY, "--out", "there", "--profile", "--no-reference", "--quiet").output
    assert "Where the time went" in told
    assert all(f"│ {name} " in told for name in ("gather", "train", "evaluate", "aggregate", "write", "all"))
    assert "of the rounds' time" in told.lower()
    assert json.loads(Path("there/trace.json").read_text())["traceEvents"]


# What there is


def test_help_lists_every_setting():
    told = cli("run", "--help").output
    plain = " ".join(told.split())
    for name, field in Config.model_fields.items():
        if name not in TABLES:
            assert f"--{name.replace('_', '-')} " in told
            assert " ".join(field.description.split()) in plain
    assert "--no-reference" in told
    assert "--compile / --no-compile" in told
    assert "--lr NUMBER" in told
    assert "--optimizer sgd|adam|adamw" in told
    assert "coterie methods fedmap" in plain
    assert "default: 20" in plain


def test_version():
    assert cli("--version").output.strip() == f"coterie {coterie.__version__}"


def test_every_method_is_listed_and_shown():
    listed = cli("methods").output
    for name, cls in METHODS.items():
        first = sys.modules[cls.__module__].__doc__.strip().splitlines()[0]
        assert f"{name} " in listed
        assert first in listed
        told = cli("methods", name).output
        assert first in told
        assert "--weight-decay" in told


def test_a_method_shows_its_equations_and_flags():
    told = cli("methods", "fedmap").output
    assert "log omega_k = -L(theta_k; Z_k)" in told
    for words in ("--sigma2", "15", "a number > 0", "variance of the prior", "omega | samples | uniform", "0.0001"):
        assert words in told
    assert "no flags of its own" in cli("methods", "fedavg").output


def test_an_unknown_method_is_suggested():
    result = cli("methods", "fedmpa")
    assert result.exit_code == 2
    assert "there is no method 'fedmpa' (did you mean 'fedmap'?)" in result.stderr


def test_data_sets_and_models_are_listed():
    told = cli("data").output
    assert all(name in told for name in [*SOURCES, *MODELS])
    assert "optimizer adam, lr 0.0001" in told


# Run


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
    assert verdict(found) in result.output
    assert who(found.benefit()) in result.output
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


def test_resume_of_a_complete_run_shows_the_same_result(finished):
    out, first = finished
    again = cli("resume", out)
    assert again.exit_code == 0
    assert "fedmap: all 1 rounds are there already" in again.output
    assert again.output.endswith(first.output[first.output.index("Test balanced accuracy") :])


def test_flags_beat_the_file_which_beats_the_data_set():
    Path("my.toml").write_text(
        'data = "digits"\nrounds = 9\nseed = 4\nlocal_epochs = 7\n[hyper]\nsigma2 = 5\nweighting = "samples"\n'
        "[optimizer]\nlr = 0.2\n"
    )
    result = cli("run", "--sigma2=7", "my.toml", *TINY[2:], "--no-reference", "--out", "run")
    assert result.exit_code == 0, result.output
    config = read_toml(Path("run/config.toml"))
    assert (config["rounds"], config["seed"]) == (1, 4)
    assert config["hyper"].items() >= {"sigma2": 7.0, "weighting": "samples", "likelihood": "mean"}.items()
    assert (config["optimizer"]["name"], config["optimizer"]["lr"]) == ("sgd", 0.2)  # the data set's, and the file's
    assert config["batch_size"] == 10  # the data set's
    assert config["evaluate_every"] == 1  # the default
    assert config["local_steps"] == 1
    assert "local_epochs" not in config
    assert config["reference"] is False
    assert not Path("run/reference").exists()
    assert "this run cannot say whether federation helps" in result.output


def test_what_carries_over_from_a_file():
    file = {"method": "fedmap", "hyper": {"sigma2": 5}, "optimizer": {"name": "adam", "lr": 1}, "fraction": 0.5}
    assert "hyper" not in _over(file, {"method": "fedavg"})
    assert _over(file, {"method": "fedmap"})["hyper"] == {"sigma2": 5}
    assert _over(file, {"optimizer": "sgd"})["optimizer"] == {"name": "sgd"}
    assert _over(file, {"optimizer": "adam"})["optimizer"] == {"name": "adam", "lr": 1}
    assert _over({"optimizer": {"lr": 1}}, {"optimizer": "sgd"})["optimizer"] == {"name": "sgd", "lr": 1}
    assert "fraction" not in _over(file, {"clients_per_round": "3"})


def test_the_default_folder_is_new_each_time(monkeypatch):
    for expected in ("runs/local-digits-seed0", "runs/local-digits-seed0-2"):
        result = cli("run", *TINY, "--method", "local")
        assert f"Written to {expected}" in result.output
        assert (Path(expected) / "summary.json").exists()
    assert "This is training alone" in result.output


@dataclass(frozen=True)
class Switched(FedAvg):
    loud: bool = False


def test_a_method_of_ones_own_has_flags_too():
    own = f"{__name__}:Switched"
    assert cli("run", *TINY, "--no-reference", "--method", own, "--loud", "--out", "on").exit_code == 0
    assert read_toml(Path("on/config.toml"))["hyper"] == {"loud": True}
    assert cli("run", *TINY, "--no-reference", "--method", own, "--no-loud", "--out", "off").exit_code == 0
    assert read_toml(Path("off/config.toml"))["hyper"] == {"loud": False}


# What is wrong


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
        "--mu is a flag of fedprox, not of fedmap",
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
    assert result.stderr.startswith("11 things to correct:")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["missing.toml"], "there is no file 'missing.toml'"),
        (["--method", "fedmpa", "--sigma2", "3"], "there is no method 'fedmpa' (did you mean 'fedmap'?)"),
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
        (["--momentum", "0.9"], "optimizer adam has no 'momentum'"),
        (["--sigma2", "-1"], "sigma2 = '-1': method fedmap needs a number > 0"),
    ],
)
def test_one_problem_is_one_line(words, problem):
    result = cli("run", *words)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_a_file_that_is_not_toml_is_named():
    Path("my.toml").write_text("rounds = = 3")
    result = cli("run", "my.toml", "--rounds", "x")
    assert result.exit_code == 2
    assert "'my.toml' cannot be read as TOML" in result.stderr
    assert "rounds = 'x': input should be a valid integer" in result.stderr


def test_folders_that_cannot_be_used(finished):
    Path("file").touch()
    for out, problem in (
        ("file", "cannot be written"),
        ("file/below", "cannot be written"),
        (finished[0], "holds a run already: 'coterie resume"),
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
    assert "--bmta is an accuracy, but line is a regression" in result.stderr
    assert not Path("run").exists()
    result = cli(*words)
    assert result.output.count("Test rmse") == 1
    assert "points" not in result.output
    assert "(rmse)" in result.output or "makes no difference" in result.output


# Stop and go on


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
    assert told.strip() == "Stopped. Go on with: coterie resume 'a run'"
    done = [json.loads(line)["round"] for line in Path("a run/rounds.jsonl").read_text().splitlines()]
    assert done == list(range(1, len(done) + 1))
    assert 2 <= len(done) < 40
    result = cli("resume", "a run")
    assert result.exit_code == 0
    assert f"fedmap: going on after round {len(done)} of 40" in result.output
    rounds = [json.loads(line)["round"] for line in Path("a run/rounds.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, 41))


def test_ctrl_c_before_the_run_says_that_nothing_was_written(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.cli.run.prepare", interrupted)
    result = cli("run", *TINY)
    assert result.exit_code == 130
    assert result.stderr.strip() == "Stopped. Nothing was written."


# Compare


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
        assert f"{counts['cannot_tell']} cannot tell (95 % intervals)." in result.output
    assert "local, fedavg, fedprox on digits: 10 clients" in result.output
    assert " is best on average, " in result.output or " are equally good on average" in result.output
    assert read_toml(Path("all/fedprox-seed1/config.toml"))["hyper"] == {"mu": 0.3}
    again = cli(*words)
    assert "fedprox seed 1: complete already" in again.output
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
        "sigma2 = '-3': method fedmap needs a number > 0",
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
    assert result.stderr.strip() == "Stopped. Go on with the same command and --out all"


# Words


def outcome(gains, metric="accuracy", method="fedavg", reference=True):
    config = SimpleNamespace(method=method)
    return SimpleNamespace(
        config=config, metric=metric, method=FedAvg(), reference=reference, gains=lambda: np.array(gains)
    )


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([0.02, -0.01, 0.0], "FedAvg is better than training alone for 1 of 3 clients and worse for 1, and 0.3 points"),
        (
            [-0.02, 0.01, 0.0],
            "FedAvg does not help on average: it is 0.3 points worse. It is better than training alone",
        ),
        ([0.01, -0.01], "FedAvg does not help on average: it makes no difference. It is better than"),
        ([0.0001, 0.0], "and less than 0.1 points better on average"),
        ([float("nan")], "FedAvg cannot be compared: no client's test examples define accuracy."),
    ],
)
def test_the_verdict_is_honest(gains, words):
    assert words in verdict(outcome(gains))


def test_amounts():
    assert amount("rmse", -0.03123) == "0.0312 (rmse)"
    assert shown("accuracy", 0.1234, "+") == "+12.3"
    assert shown("accuracy", -0.0001, "+") == "0.0"
    assert shown("rmse", 1.23456) == "1.235"
    assert shown("auroc", float("nan"), "+") == "-"


def benefit_of(verdicts):
    rows = [{"client": f"c{i}", "verdict": verdict} for i, verdict in enumerate(verdicts)]
    return Benefit("accuracy", rows, {}, {})


def test_who_gains_in_words():
    told = who(benefit_of(["gains", "loses", "cannot tell", "gains"]))
    assert told == "Of 4 clients, 2 gain (c0, c3), 1 loses (c1), 1 cannot tell (95 % intervals)."
    assert "10 gain (c0, c1, c2, c3, c4, c5, c6, c7 and 2 more), 0 lose, 0 cannot" in who(benefit_of(["gains"] * 10))


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
    assert "was selected by mean validation auroc" in result.output
    assert "NaN" not in Path("run/rounds.jsonl").read_text()  # null, where a client has one class only


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
    assert "give their folders and no settings" in result.stderr


def record(number, validation=True):
    scores = {"validation": {"accuracy": [0.5, 0.7]}} if validation else {}
    return {"round": number, "info": {"loss": [0.5, 0.75]}, "seconds": 1.23, **scores}


def test_plain_lines():
    text = io.StringIO()
    with Lines(Console(file=text), measures=True) as lines:
        lines.start("fedmap", 2, 4)
        lines.round(record(3), "accuracy")
        lines.round(record(4, validation=False), "accuracy")
        lines.stop()
    told = text.getvalue().splitlines()
    assert "compiling" in told[0]  # so that half a minute of silence is explained
    assert told[1:] == [
        "fedmap: going on after round 2 of 4",
        "fedmap round 3/4 loss 0.625 validation accuracy 0.600 1.2 s",
        "fedmap round 4/4 loss 0.625 1.2 s",
    ]


def test_a_bar_on_a_terminal():
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=True, width=100, color_system=None), measures=True) as bars:
        bars.say("fedmap: stacked")
        bars.start("fedmap", 0, 4)
        bars.round(record(1), "accuracy")
        bars.stop()
        with pytest.raises(KeyboardInterrupt):
            _interrupted(bars)
    told = text.getvalue()
    assert "choosing the fastest engine" in told
    assert "fedmap: stacked\n" in told
    assert "fedmap round 1/4" in told
    assert "loss 0.625 validation 0.600" in told
    assert "left" in told
    assert "fedmap round 1: loss 0.625 validation accuracy 0.600, 1.2 s" in told
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h")  # the cursor is back


def _interrupted(bars):
    bars.start("local", 0, 4)
    raise KeyboardInterrupt


def test_optimizers_are_complete():
    told = cli("methods", "local").output
    assert all(name in told for name in OPTIMIZERS)


def test_a_table_in_a_file_is_as_wide_as_it_needs_to_be():
    names = tuple(f"a-method-{i:02d}" for i in range(12))
    rows = [{"method": name, "seed": 0, "client": "[bold]", "train": 9, "test": 4, "test_rmse": 0.5} for name in names]
    text = io.StringIO()
    print_comparison(Console(file=text, width=80, markup=False), Comparison("rmse", names, (0,), rows), quiet=True)
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("Test rmse, seed 0")
    assert all(name in lines[2] for name in names)
    assert "[bold]" in lines[4]
