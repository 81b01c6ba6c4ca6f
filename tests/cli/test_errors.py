"""What a user reads when their own method, model or loss raises an exception."""

import os
import subprocess
import sys

import pytest

from tests.cli.commands import TINY, cli

OWN = """
from dataclasses import dataclass
import torch
from torch import nn
from coterie.methods import FedAvg

@dataclass(frozen=True)
class Own(FedAvg):
    def local_update(self, task, client, down, batches):
        {line}
        return super().local_update(task, client, down, batches)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x @ torch.zeros(3, 3))

def net(shape, outputs):
    return Net()

def unbuilt(shape, outputs):
    return nn.Linear(shape["x"], outputs)
"""
WHERE = "  own_{}.py, line 10, in local_update\n    down = down['no such layer']\n"


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """own(line): the name of a module whose method has this line."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, line="pass"):
        (tmp_path / f"own_{name}.py").write_text(OWN.format(line=line))
        return f"own_{name}"

    return make


def test_the_users_line_comes_first(own):
    module = own("first", "down = down['no such layer']")
    told = cli("run", "--method", f"{module}:Own", *TINY, "--quiet")
    assert told.exit_code == 1
    assert told.output.startswith("KeyError in your code: 'no such layer'\n" + WHERE.format("first"))
    assert "Traceback" not in told.output
    assert "With --debug" in told.output


@pytest.mark.filterwarnings("default::coterie.CoterieWarning")
def test_with_debug_the_whole_traceback_follows(own):
    module = own("debug", "down = down['no such layer']")
    told = cli("run", "--method", f"{module}:Own", "--data", "digits", "--rounds", 1, "--no-report", "--debug")
    assert told.exit_code == 1
    said, words, whole = told.output.partition("KeyError in your code: 'no such layer'\n" + WHERE.format("debug"))
    assert words
    assert "Note: debug: clients run one at a time" in said
    assert "Traceback (most recent call last):" in whole
    assert "engine.py" in whole


def test_a_model_that_does_not_fit_names_its_line(own):
    module = own("model")
    told = cli("run", "--model", f"{module}:net", *TINY)
    assert told.exit_code == 2
    assert f"({module}.py, line 19, in forward: `return self.head(x @ torch.zeros(3, 3))`)" in told.output
    told = cli("run", "--model", f"{module}:unbuilt", *TINY)
    assert f'({module}.py, line 25, in unbuilt: `return nn.Linear(shape["x"], outputs)`)' in told.output


def test_an_engine_that_was_asked_for_does_not_hide_the_line(own):
    module = own("stacked", "down = down['no such layer']")
    told = cli("run", "--method", f"{module}:Own", "--data", "digits", "--rounds", 1, "--engine", "stacked", "--quiet")
    assert told.exit_code == 1
    assert f"{module}.py, line 10, in local_update" in told.output


@pytest.mark.slow
def test_a_debugger_stops_at_a_breakpoint(own, tmp_path):
    module = own("stops", "breakpoint()")
    words = [sys.executable, "-m", "coterie", "run", "--method", f"{module}:Own", "--data", "digits", "--rounds", "1"]
    more = ["--local-steps", "1", "--no-report", "--no-reference", "--debug", "--clients", "2"]
    text = "p 'steps', tuple(batches.index.shape)\n" + "c\n" * 4
    ran = subprocess.run(
        [*words, *more], input=text, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=dict(os.environ)
    )
    assert ran.returncode == 0, ran.stderr
    assert "('steps', (1, 1, 10))" in ran.stdout
    assert ran.stdout.count("(Pdb) ") == 3  # one word at the first client, and one to go on at each
    assert "\x1b" not in ran.stdout
