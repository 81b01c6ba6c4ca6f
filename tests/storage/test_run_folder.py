"""What a run folder is given comes back, and what is damaged is named."""

import csv
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import CheckpointError
from coterie.storage.run_folder import KEPT_CHECKPOINTS, RunFolder, read_rows, safe_name
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


HOSTILE_NAMES = [
    *(
        "a/b",
        "../x",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a..b",
        "%2F",
        "über",
        "a b",
        "x" * 10,
        "CON",
        "con",
        "NUL.txt",
        "COM1",
    ),
    *(
        "x" * 300,
        "x" * 299 + "y",
        ".hidden",
        "hidden.",
        "trailing ",
        " leading",
        "\u2541",
        "%41",
        "\u4e2d" * 100,
        "\ud800",
    ),
    *("a\\b", "a:b", "a\0b", "a\nb", "<b>", "A", "aux.tar.gz", "%h", "\U0001f600"),
]


def test_no_clients_name_leaves_its_folder(tmp_path):
    folders = [safe_name(name) for name in HOSTILE_NAMES]
    assert len(set(folders)) == len(HOSTILE_NAMES)
    for folder in folders:
        assert re.fullmatch(r"[A-Za-z0-9_.%-]{1,150}", folder)
        assert ".." not in folder
        assert folder[0] != "."
        assert folder[-1] != "."
        assert folder.partition(".")[0].upper() not in {"CON", "PRN", "AUX", "NUL", "COM1", "LPT1"}
        (tmp_path / folder).mkdir()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=30), unique=True, max_size=5))
def test_other_names_have_other_folders(names):
    assert len({safe_name(name) for name in names}) == len(names)


def test_names_that_are_formulas_are_written_as_text_and_read_as_they_are(tmp_path):
    names = ["=1+1", "+a", "-b", "@sum", "\tx", "\rx", "'=already", "''=twice", "plain", "it's", "a=b"]
    row = {"train": 3, "validation": 1, "test": 1, "round": 1, "gain": -0.5}
    folder = RunFolder(tmp_path)
    folder.write_clients([{"client": name, **row} for name in names])
    with (tmp_path / "clients.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert all(each["client"][0] not in "=+-@\t\r" for each in written)
    assert written[0]["gain"] == "-0.5", "numbers stay numbers"
    assert [each["client"] for each in folder.read_clients()] == names
    assert [each["client"] for each in read_rows(tmp_path / "clients.csv")] == names
