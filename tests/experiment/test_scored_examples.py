"""Evaluation on the spot against evaluation by an engine."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from coterie.core.decode import Decode
from coterie.core.task import Task
from coterie.data.federation import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.evaluation import score
from coterie.experiment.scored_examples import Examples
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS


def simulation(name, sizes=(40, 90, 25)):
    draw = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 6, generator=draw), torch.randint(0, 3, (n,), generator=draw)) for n in sizes]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    federation = from_clients(pairs, num_classes=3)
    task = Task(module, num_classes=3)
    sim = Simulation.start(METHODS[name](), task, federation, Plan(batch_size=8), len(sizes), seed=0)
    sim.train(1, Engine())
    return sim


class Refusing:
    compiled = True

    def map(self, *args, **kwargs):
        raise AssertionError("little work needs no engine")


@pytest.mark.parametrize("name", ["fedavg", "fedmap", "fedamp", "pfedbred", "federico", "fedproto", "scaffold"])
def test_on_the_spot_is_what_engines_find(name, monkeypatch):
    sim = simulation(name)
    here, said = sim.evaluate(1, Refusing()), sim.predictions(1, Refusing())
    monkeypatch.setattr("coterie.experiment.scored_examples.INLINE_FLOPS", 0.0)
    for engine in (Engine(), Engine("stacked", chunk=2)):
        other = sim.evaluate(1, engine)
        assert other.keys() == here.keys()
        for part, by in here.items():
            for metric, values in by.items():
                np.testing.assert_allclose(
                    values, other[part][metric], rtol=1e-4, atol=1e-6, err_msg=f"{part} {metric}"
                )
        torch.testing.assert_close(sim.predictions(1, engine), said)
    again = score(sim.task, *said, 3)
    for metric, values in here["test"].items():
        np.testing.assert_allclose(values, again[metric], rtol=1e-12)


@pytest.mark.parametrize("name", ["fedamp", "ditto", "federico"])
def test_threads_change_no_bit(name, monkeypatch):
    sim = simulation(name)
    said, scores = sim.predictions(1, Refusing()), sim.evaluate(1, Refusing())
    monkeypatch.setattr("coterie.experiment.scored_examples.SINGLE_THREAD_FLOPS", 0.0)
    monkeypatch.setattr("coterie.experiment.scored_examples.cores", lambda: 2)
    used = []
    monkeypatch.setattr(Examples, "_tasks", property(lambda _: used.append(1) or [sim.task, copy.deepcopy(sim.task)]))
    assert all(map(torch.equal, sim.predictions(1, Refusing()), said))
    np.testing.assert_equal(sim.evaluate(1, Refusing()), scores)
    assert used


def test_a_view_that_must_be_trained_is_made_by_the_engine():
    sim = simulation("fedavg-ft")
    with pytest.raises(AssertionError, match="needs no engine"):
        sim.evaluate(1, Refusing())


def test_work_is_counted_not_timed(monkeypatch):
    sim = simulation("fedavg")
    examples = Examples(sim.federation, sim.task)
    number = sum(len(split.validation) + len(split.test) for split in sim.federation.clients.values())
    exact = 2 * (6 * 5 + 5 * 3) * number
    monkeypatch.setattr("coterie.experiment.scored_examples.CALL_FLOPS", 0.0)

    def inline(limit):
        monkeypatch.setattr("coterie.experiment.scored_examples.INLINE_FLOPS", limit)
        return examples.is_inline(f"below {limit}", lambda x: sim.task.logits(sim.task.init(), x))

    assert inline(exact)
    assert not inline(exact - 1)
    assert examples.fits()
    monkeypatch.setattr("coterie.experiment.scored_examples.EVALUATION_BYTES", 6 * 4 * number - 1)
    assert not examples.fits()


def test_inputs_are_decoded_once_for_all_runs_on_a_federation():
    federation = simulation("fedavg").federation
    task = Task(nn.Linear(6, 3), num_classes=3)
    first = Examples(federation, task).x
    assert Examples(federation, task).x is first
    other = Task(nn.Linear(6, 3), num_classes=3, decode=Decode((0.5,), (2.0,)))
    assert Examples(federation, other).x is not first, "another decoding"
    assert copy.copy(federation).kept == {}, "a copy has other examples"
