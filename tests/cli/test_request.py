from dataclasses import dataclass
from pathlib import Path

from coterie.cli.request import _merged
from coterie.core.toml import read_toml
from coterie.methods import FedAvg
from tests.cli.commands import TINY, cli


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
    assert "this run cannot show whether federation helps" in result.output


def test_what_carries_over_from_a_file():
    file = {"method": "fedmap", "hyper": {"sigma2": 5}, "optimizer": {"name": "adam", "lr": 1}, "fraction": 0.5}
    assert "hyper" not in _merged(file, {"method": "fedavg"})
    assert _merged(file, {"method": "fedmap"})["hyper"] == {"sigma2": 5}
    assert _merged(file, {"optimizer": "sgd"})["optimizer"] == {"name": "sgd"}
    assert _merged(file, {"optimizer": "adam"})["optimizer"] == {"name": "adam", "lr": 1}
    assert _merged({"optimizer": {"lr": 1}}, {"optimizer": "sgd"})["optimizer"] == {"name": "sgd", "lr": 1}
    assert "fraction" not in _merged(file, {"clients_per_round": "3"})


@dataclass(frozen=True)
class Switched(FedAvg):
    loud: bool = False


def test_a_method_of_ones_own_has_flags_too():
    own = f"{__name__}:Switched"
    assert cli("run", *TINY, "--no-reference", "--method", own, "--loud", "--out", "on").exit_code == 0
    assert read_toml(Path("on/config.toml"))["hyper"] == {"loud": True}
    assert cli("run", *TINY, "--no-reference", "--method", own, "--no-loud", "--out", "off").exit_code == 0
    assert read_toml(Path("off/config.toml"))["hyper"] == {"loud": False}


def test_a_file_that_is_not_toml_is_named():
    Path("my.toml").write_text("rounds = = 3")
    result = cli("run", "my.toml", "--rounds", "x")
    assert result.exit_code == 2
    assert "'my.toml' cannot be read as TOML" in result.stderr
    assert "rounds = 'x': input should be a valid integer" in result.stderr
