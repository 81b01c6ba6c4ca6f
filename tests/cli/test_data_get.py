import json

import numpy as np
import pytest

from coterie.cli import data_get
from coterie.core.errors import DataError
from tests.cli.commands import cli

pytestmark = pytest.mark.usefixtures("no_data")


def test_what_needs_no_fetching_or_cannot_be_fetched(tmp_path):
    assert "digits needs no files" in cli("data", "get", "digits").output
    told = cli("data", "get", "sent140")
    assert told.exit_code == 1
    assert "preprocess.sh" in told.output
    told = cli("data", "get", "cifar1")
    assert told.exit_code == 2
    assert "there is no data set 'cifar1' (did you mean 'cifar10'?)" in told.output
    (tmp_path / "COTERIE_DATA" / "mnist").mkdir(parents=True)
    (tmp_path / "COTERIE_DATA" / "mnist" / "train-images-idx3-ubyte").touch()
    assert "mnist is already in" in cli("data", "get", "pfedbred-mnist").output


def test_fetching(tmp_path, monkeypatch):
    def fake(folder, ways, progress):
        progress(5, 10)
        folder.mkdir(parents=True)
        (folder / "data_batch_1.png").touch()
        return [folder / "data_batch_1.png"]

    monkeypatch.setattr(data_get, "get", fake)
    told = cli("data", "get", "cifar10", "--data-dir", tmp_path / "there")
    assert told.exit_code == 0
    assert f"cifar10: 1 file in {tmp_path / 'there' / 'cifar10'}, checksums verified." in told.output
    assert f"--data-dir {tmp_path / 'there'}" in told.output

    def broken(folder, ways, progress):
        raise DataError("the line is dead")

    monkeypatch.setattr(data_get, "get", broken)
    told = cli("data", "get", "cifar100")
    assert (told.exit_code, told.output.strip()) == (1, "the line is dead")


def test_running_with_what_is_not_here_says_what_to_do():
    told = cli("run", "--data", "cifar100")
    assert told.exit_code == 1
    assert "the data set cifar100 was not found: 'coterie data get cifar100' downloads it" in told.output
    assert "Traceback" not in told.output


def test_a_partition_by_flags(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=draw.integers(256, size=(80, 6, 6)).astype(np.uint8), y=np.arange(80) % 4)
    how = ("--rounds", 1, "--local-steps", 1, "--engine", "loop", "--no-compile", "--workers", 1, "--no-reference")
    told = cli(
        "run", "--data", "./own.npz", "--partition", "iid", "--clients", 5, "--model", "linear", "--out", "r", *how
    )
    assert told.exit_code == 0, told.output
    assert len(list((tmp_path / "r" / "clients").iterdir())) == 5
    about = json.loads((tmp_path / "r" / "clients" / "client-1" / "model.json").read_text())
    assert about["decode"] == {"mean": [0.0], "std": [1.0]}
    told = cli("run", "--data", "digits", "--partition", "iid", "--scaling", "loud", *how)
    assert told.exit_code == 2
    assert "scaling" in told.output
