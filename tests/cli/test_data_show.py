from pathlib import Path

import pytest

from coterie.core.toml import read_toml
from coterie.data.partition import PARTITIONS
from coterie.experiment.settings import settings
from tests.cli.commands import cli

HOW = ("--rounds", "1", "--engine", "loop", "--workers", "1", "--no-compile", "--no-reference")


def test_a_setting_is_drawn_and_told():
    told = cli("data", "show", "fedmap/label-skew").output
    assert "10 clients" in told
    # 25 of 45 pairs are of both kinds, (.5, .5) and (.85, .15): 25/45 x .35 = .194.
    assert "label distance between two clients: mean 0.194, minimum 0.000, maximum 0.350" in told
    assert "Who has which classes" in Path("fedmap-label-skew.html").read_text(encoding="utf-8")


def test_a_data_set_with_a_partition_is_drawn():
    told = cli(
        "data", "show", "digits", "--partition", "classes:2", "--clients", "6", "--seed", "3", "-o", "a.html"
    ).output
    assert "6 clients" in told
    assert "classes: 10, 2 per client" in told
    assert Path("a.html").exists()
    other = cli("data", "show", "digits", "--partition", "classes:2", "--clients", "6", "--seed", "4").output
    assert told.splitlines()[1:4] != other.splitlines()[1:4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fedmap/label-skw",), "did you mean 'fedmap/label-skew'"),
        (("digits", "--partition", "dirichlet"), "needs alpha"),
        (("digits", "--partition", "iid", "--clients", "many"), "clients = 'many'"),
        (("digits", "--partition", "natural"), "does not name the owner of each example"),
        (("synthetic-label-skew", "--clients", "3"), "is already divided among clients"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_written(words, expected):
    result = cli("data", "show", *words)
    assert result.exit_code in (1, 2)
    assert expected in result.output
    assert list(Path().iterdir()) == []


def test_settings_and_partitions_are_listed():
    told = cli("data", "settings").output
    assert all(name in told for name in settings())
    assert all(name in told for name in PARTITIONS)


def test_flags_beat_the_file_which_beats_the_setting():
    Path("my.toml").write_text("batch_size = 500\nseed = 3\n")
    result = cli("run", "my.toml", "--setting", "fedmap/quantity-skew", "--seed", "4", "--local-steps", "1", "--sigma2",
                 "2", *HOW, "--out", "run")  # fmt: skip
    assert result.exit_code == 0, result.output
    config = read_toml(Path("run/config.toml"))
    assert (config["setting"], config["data"]) == ("fedmap/quantity-skew", "synthetic-quantity-skew")
    assert (config["seed"], config["batch_size"], config["local_steps"], config["test"]) == (4, 500, 1, 0.3)
    assert "local_epochs" not in config
    assert (config["hyper"]["sigma2"], config["optimizer"]["lr"]) == (2.0, 0.0001)


def test_a_settings_method_has_its_flags_and_can_be_another():
    result = cli("run", "--setting", "federico/sine", "--sigma2", "2")
    assert "--sigma2 is a flag of fedmap" in result.output
    assert "not of federico" in result.output
    result = cli(
        "run", "--setting", "fedmap/label-skew", "--method", "fedavg", "--local-steps", "1", *HOW, "--out", "b"
    )
    assert result.exit_code == 0, result.output
    assert "sigma2" not in read_toml(Path("b/config.toml")).get("hyper", {})
