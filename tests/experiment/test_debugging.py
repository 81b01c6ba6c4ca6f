"""`debug`: one process, one thread, nothing lifted or compiled, so that breakpoints stop where they are written."""

import os
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import coterie
from coterie.compute.cpu import cores
from coterie.core.errors import ConfigError, CoterieWarning
from coterie.core.toml import read_toml
from coterie.experiment.resolve import resolve
from coterie.methods import FedAvg
from coterie.storage import files
from tests.experiment.conftest import two_kinds

SEEN = []
TINY = {"rounds": 1, "local_steps": 2, "reference": False}


def note(tensor):
    """Note where this runs; a number can be looked at only where no client is lifted over others."""
    SEEN.append((os.getpid(), threading.current_thread() is threading.main_thread(), cores()))
    float(tensor.detach().sum())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        note(x)
        return self.head(x)


@dataclass(frozen=True)
class Watched(FedAvg):
    def local_update(self, task, client, down, batches):
        breakpoint()
        note(batches.count)
        return super().local_update(task, client, down, batches)


def test_everything_of_the_users_runs_here_and_breakpoints_stop(tmp_path, monkeypatch):
    stops = []

    def stop():
        if not stops:
            SEEN.clear()  # of what looked at the model before the run
        stops.append(sys._getframe(1).f_code.co_name)

    monkeypatch.setattr(sys, "breakpointhook", stop)
    with pytest.warns(CoterieWarning, match=r"debug: clients run one at a time, uncompiled, .* breakpoint\(\) stops"):
        result = coterie.run(Watched(), two_kinds(3), model=Net(), debug=True, out=tmp_path / "run", **TINY)
    assert stops == ["local_update"] * 3  # once for each client: nothing is rehearsed or measured
    assert set(SEEN) == {(os.getpid(), True, 1)}
    engine = files.read_json(tmp_path / "run" / "engine.json")["engine"]
    assert (engine["kind"], engine["compiled"], engine["workers"], engine["threads"]) == ("loop", False, 1, False)
    kept = read_toml(tmp_path / "run" / "config.toml")
    assert (kept["debug"], kept["engine"], kept["compile"], kept["workers"]) == (True, "loop", False, 1)
    assert len(result.clients) == 3


def test_results_are_those_of_other_engines():
    data = two_kinds(3)
    usual = coterie.run("fedavg", data, engine="stacked", compile=False, workers=1, **TINY)
    with pytest.warns(CoterieWarning, match="debug"):
        slow = coterie.run("fedavg", data, debug=True, **TINY)
    torch.testing.assert_close(slow.views, usual.views)


def test_a_comparison_runs_its_seeds_in_this_thread():
    SEEN.clear()
    with pytest.warns(CoterieWarning, match="debug"):
        coterie.compare(("local", "fedavg"), 2, two_kinds(2), model=Net(), debug=True, rounds=1, local_steps=1)
    assert {where[:2] for where in SEEN} == {(os.getpid(), True)}


def test_what_contradicts_it_is_refused():
    with pytest.raises(ConfigError, match="leave out engine = 'stacked', compile = True, workers = 2"):
        resolve({"debug": True, "engine": "stacked", "compile": True, "workers": 2})
    config, _ = resolve({"debug": True, "engine": "loop", "workers": 1, "compile": False})
    assert config.debug
    assert not resolve({})[0].debug


def test_the_users_line_is_named_below_the_traceback():
    @dataclass(frozen=True)
    class Broken(FedAvg):
        def local_update(self, task, client, down, batches):
            return task.logits(down["no such layer"], batches.x)

    with pytest.raises(KeyError) as told:
        coterie.run(Broken(), two_kinds(2), engine="loop", compile=False, workers=1, **TINY)
    assert 'in local_update: return task.logits(down["no such layer"], batches.x)' in told.value.__notes__[0]
