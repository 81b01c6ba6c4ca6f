import json
from pathlib import Path

from tests.cli.commands import TINY, cli

SHORT = ("--data", "digits", "--rounds", "3")


def test_a_plan_says_what_a_run_would_do_and_writes_nothing():
    told = cli("plan", *SHORT, "--method", "fedamp")
    assert told.exit_code == 0
    lines = {line.split()[0]: line for line in told.output.splitlines()}
    assert told.output.startswith("fedamp on digits: 10 clients, model mlp, 3 rounds of 1 epoch")
    assert "10, with 25 to 201 training examples each, 1,079 in all" in lines["clients"]
    assert "all 10 clients take part in every round, through one server" in lines["hearing"]
    assert "of the data's gradient over a round (by lam)" in lines["pull"]
    assert "for itself" in lines["weights"]
    assert "111 kB up and 111 kB down a round, 667 kB in all rounds" in lines["traffic"]
    assert "roughly" in lines["time"]
    assert "a model 11.1 kB, clients 111 kB" in lines["memory"]
    assert "10 clients, 2 rounds of at most 21 steps" in lines["measured"]
    assert told.output.splitlines()[-1] == "No warnings."
    assert not list(Path().iterdir())


def test_warnings_are_notes():
    told = cli("plan", *SHORT, "--method", "fedbn").output
    assert "Note: the model has no normalisation layers, so FedBN is FedAvg: choose a --model that has" in told
    assert "No warnings" not in told


def test_json_is_one_object():
    told = cli("plan", *SHORT, "--method", "fedprox", "--mu", "1e-6", "--json")
    found = json.loads(told.stdout)
    assert found["method"] == "fedprox"
    assert found["pull"]["strength"] < 1e-3
    assert "choose a larger mu than 1e-06" in found["warnings"][0]


def test_errors_are_those_of_a_run():
    words = ("--method", "fedprox", "--mu", "-1", "--roundz", "3", "--data", "digitz")
    planned, run = cli("plan", *words), cli("run", *words)
    assert planned.exit_code == run.exit_code == 2
    assert planned.stderr == run.stderr
    assert planned.stdout == ""


def test_a_setting_that_trains_nothing_is_told_by_its_file_too():
    Path("my.toml").write_text('method = "fedbn"\ndata = "digits"\n')
    assert "Note: " in cli("plan", "my.toml").output


def test_a_run_begins_with_bytes_and_warnings():
    told = cli("run", *TINY, "--method", "fedprox", "--no-reference", "--out", "one")
    assert told.stdout.splitlines()[1] == "111 kB up and 111 kB down a round, 222 kB in all rounds"
    assert "Note: the pull of fedprox is 0 but for rounding, since one step a round" in told.stderr
    sound = cli("run", *TINY, "--method", "fedavg", "--no-reference", "--out", "two")
    assert "Note" not in sound.stderr


def test_a_quiet_run_begins_with_nothing():
    told = cli("run", *TINY, "--method", "fedprox", "--no-reference", "--quiet", "--out", "three")
    assert "Note" not in told.stderr
    assert "a round" not in told.stdout
