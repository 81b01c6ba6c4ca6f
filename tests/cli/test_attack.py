from tests.cli.commands import TINY, cli


def test_the_table_has_a_row_for_each_attack_and_a_column_for_each_defence():
    told = cli("attack", *TINY, "--method", "fedavg", "--attacks", "scaled", "--robust", "median")
    assert told.exit_code == 0, told.output
    assert told.output.startswith("fedavg on digits: 10 clients, model mlp, 1 round of 1 step")
    assert "hostile: client-" in told.output.splitlines()[0]
    assert [line.split()[1] for line in told.output.splitlines() if "scaled" in line] == ["scaled"]
    assert "none" in told.output
    assert "median" in told.output
    assert "no attack" in told.output
    assert "without them" in told.output


def test_errors_are_not_in_percent():
    quick = ("--rounds", "1", "--local-steps", "1", "--no-compile", "--attacks", "copy", "--robust", "")
    told = cli("attack", "--data", "severity", "--method", "fedavg", *quick)
    assert "Test mae, honest clients" in told.output
    row = next(line for line in told.output.splitlines() if "no attack" in line)
    assert 0 < float(row.split("│")[2]) < 4


def test_what_cannot_be_is_refused_in_words():
    assert "there is no attack 'flood'" in cli("attack", *TINY, "--method", "fedavg", "--attacks", "flood").output
    told = cli("attack", *TINY, "--method", "fedamp", "--attacks", "little", "--robust", "median")
    assert told.exit_code == 2
    assert "FedAMP does not average the models that it is sent" in told.output
    assert "choose median, trimmed:0.2" in cli("attack", *TINY, "--method", "fedavg", "--robust", "mean").output


def test_an_attack_that_makes_training_diverge_is_told(monkeypatch):
    monkeypatch.setattr("coterie.experiment.attack.NORM_BOUND", 1e38)
    more = (
        "--data",
        "digits",
        "--rounds",
        "12",
        "--no-compile",
        "--lr",
        "0.5",
        "--attacks",
        "scaled",
        "--robust",
        "median",
    )
    told = cli("attack", *more, "--method", "fedavg", "--hostile", "4", "--local-steps", "4")
    assert told.exit_code == 0, told.output
    assert "diverged" in told.output
