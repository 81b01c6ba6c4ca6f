"""`coterie laws`: a table, and an exit code."""

import sys

import pytest
from typer.testing import CliRunner

from coterie.cli import app

OWN = """
from dataclasses import dataclass
from typing import ClassVar
from coterie.methods import FedAvg

class Forgets(FedAvg):
    def aggregate(self, server, ids, ups):
        return server

class Excused(Forgets):
    exempt: ClassVar = {9: "it forgets on purpose"}

class Careless(Forgets):
    exempt: ClassVar = {9: ""}

@dataclass(frozen=True)
class Needy(FedAvg):
    share: float = None
    def __post_init__(self):
        if self.share is None:
            raise TypeError("share is missing")
"""


def laws(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["laws", *words])


@pytest.fixture(autouse=True)
def _own_methods(tmp_path, monkeypatch):
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_methods", raising=False)


def rows(output):
    """The cells of the table, without its lines."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]


def test_a_method_that_keeps_its_laws():
    done = laws("fedavg", "--only", "3,9")
    assert done.exit_code == 0
    assert rows(done.output) == [
        ["3", "inputs are not modified", "held", ""],
        ["9", "one client, own solution", "held", ""],
    ]
    assert "fedavg breaks no law." in done.output
    assert "1 of 2: law 3, inputs are not modified" in done.stderr
    assert "2 of 2: law 9, one client, own solution" in done.stderr


def test_a_method_that_breaks_one():
    done = laws("own_methods:Forgets", "--only", "9,3")
    assert done.exit_code == 1
    assert [row[2] for row in rows(done.stdout)] == ["held", "broken"]
    assert "nothing was trained" in done.stdout or "does not deploy the model" in done.stdout
    assert "own_methods:Forgets breaks 1 of 2 laws." in done.stdout


def test_a_method_that_says_why_a_law_does_not_apply():
    done = laws("own_methods:Excused", "--only", "9")
    assert done.exit_code == 0
    assert rows(done.stdout) == [["9", "one client, own solution", "does not apply", "it forgets on purpose"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("fedavgg",), "there is no method 'fedavgg'"),
        (("own_methods:Careless",), "Careless.exempt does not say why law 9 does not apply"),
        (("own_methods:Needy",), "cannot be made without arguments; give its fields defaults: share is missing"),
        (("fedavg", "--only", "0,12"), "there is no law 0: laws are 1 to 12"),
        (("fedavg", "--only", "one"), "laws are numbers with commas between them"),
    ],
)
def test_what_is_wrong_is_told_in_words(words, told):
    done = laws(*words)
    assert done.exit_code == 2
    assert told in " ".join(done.stderr.split())
    assert not done.stdout
