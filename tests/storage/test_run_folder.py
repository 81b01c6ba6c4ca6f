"""What a run folder is given comes back, and what is damaged is named."""

import math

import pytest
import torch

from coterie.core.errors import CheckpointError
from coterie.storage.run_folder import KEPT_CHECKPOINTS, RunFolder, safe_name
from coterie.storage.state import State


def test_records_come_back_without_the_rounds_after_the_checkpoint_or_a_half_line(tmp_path):
    folder = RunFolder(tmp_path)
    records = [{"round": n, "test": {"accuracy": [0.5, math.nan]}, "server": {}} for n in (1, 2, 3)]
    for record in records:
        folder.append_round(record)
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 4, "te')
    found = folder.read_rounds(until=2)
    assert [record["round"] for record in found] == [1, 2]
    assert math.isnan(found[0]["test"]["accuracy"][1])
    assert len(folder.read_rounds(until=9)) == 3


def test_the_newest_checkpoints_and_the_best_are_kept_and_tensors_that_are_one_are_written_once(tmp_path):
    folder, large = RunFolder(tmp_path), torch.zeros(100_000)
    for number in range(1, 6):
        shared = large + number
        folder.save(number, State({"w": shared}, {"w": shared}), best=2)
    assert folder.checkpoints() == [2, *range(6 - KEPT_CHECKPOINTS, 6)]
    size = (tmp_path / "checkpoints" / "round-00005" / "state.safetensors").stat().st_size
    assert size < 1.5 * large.nbytes
    state, best = folder.load(5, State({"w": large}, {"w": large}))
    assert best == 2
    assert torch.equal(state.server["w"], large + 5)
    assert torch.equal(state.clients["w"], large + 5)


def test_clients_come_back_with_their_types(tmp_path):
    folder = RunFolder(tmp_path)
    row = {"client": "a,b", "train": 3, "validation": 1, "test": 2, "round": 7, "test_loss": 0.5, "verdict": "gain"}
    folder.write_clients([row, {**row, "client": "c", "test_loss": math.nan}])
    first, second = folder.read_clients()
    assert first == row
    assert math.isnan(second["test_loss"])
    folder.write_clients([{"client": "a"}])
    with pytest.raises(CheckpointError, match=r"clients.csv' is damaged"):
        folder.read_clients()


def test_a_folder_that_holds_a_run_is_not_begun_again(tmp_path):
    RunFolder(tmp_path).create("rounds = 1\n")
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunFolder(tmp_path).create("rounds = 1\n")


def test_no_clients_name_leaves_its_folder():
    names = ["a/b", "..", ".", "", "a..b", "%2F", "über", "a b", "x" * 10]
    folders = [safe_name(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all("/" not in name and ".." not in name and name not in ("", ".") for name in folders)
