"""Which methods need only sums, and that the message that stands for all gives what all give."""

import pytest
import torch

from coterie import METHODS
from coterie.core import tree
from coterie.core.method import CountedParams
from coterie.methods import FedAvg, FedMAP, PFedVMP, Scaffold
from coterie.parts import sums
from coterie.parts.robust import averaged_fields
from coterie.testing import kit

SUMMED = [name for name, cls in METHODS.items() if sums.why_not(cls()) is None]
BY_NAME = {"fedavg", "fedprox", "fedmap", "scaffold", "pfedme", "pfedbred", "ditto", "fedper", "fedrep", "fedbn"}
BY_NAME |= {
    "moon",
    "fedbabu",
    "lg-fedavg",
    "per-fedavg",
    "fedala",
    "apfl",
    "fedrod",
    "fedcp",
    "gpfl",
    "fedem",
    "pfedbayes",
}

QUICK = {"fedavg", "scaffold", "fedmap", "pfedbred", "fedcp"}


def test_methods_by_name():
    assert {*SUMMED} >= BY_NAME
    refused = {"local", "fedamp", "heurfedamp", "federico", "fedfomo", "clustered-fl", "ifca", "pfedvmp", "fedpac"}
    assert not {*SUMMED} & refused


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUMMED]
)
def test_one_message_for_all_gives_what_all_give(name):
    method = METHODS[name]()
    sim = kit.simulate(method, rounds=1)
    task, ids = sim.task, torch.arange(len(kit.SIZES))
    down = method.dispatch(sim.state.server, ids, torch.Generator())
    ups = []
    for i in range(len(ids)):
        client = method.init_client(task.init())
        ups.append(method.local_update(task, client, tree.rows(down, i), kit.batches(i))[1])
    fields = averaged_fields(method)
    vectors, weights = zip(*(sums.summed(up, fields) for up in ups), strict=True)
    assert all(0 < weight <= sums.largest_weight(method, ups[0], 100) for weight in weights)
    total = sum(weights)
    mean = sum(weight * vector for vector, weight in zip(vectors, weights, strict=True)) / total
    one = sums.alike(mean, total, len(ups), fields, ups[0])
    assert len(ups) * sums.weight_of(one) == pytest.approx(total), "together they weigh what all weigh"
    expected = method.aggregate(sim.state.server, ids, tree.stack(ups))
    found = method.aggregate(sim.state.server, ids, tree.stack([one] * len(ups)))
    if name == "fedmap":  # it tells who weighed what in the last round, which nobody knows of a sum
        expected, found = (each._replace(weight=torch.zeros(())) for each in (expected, found))
    kit.same(found, expected, f"{name}: the sum does not give what all give", 1e-5)


def test_only_fedmaps_sum_of_losses_is_too_small_for_sums():
    for likelihood in ("mean", "sum"):
        for weighting in ("samples", "omega", "uniform"):
            refused = sums.why_not(FedMAP(weighting=weighting, likelihood=likelihood)) is not None
            assert refused == (weighting == "omega" and likelihood == "sum")


def test_weights():
    assert sums.weight_of(CountedParams({}, torch.tensor(7.0))) == 7
    method = FedMAP(weighting="samples")
    up = next(kit_messages(method))
    assert sums.weight_of(up) == pytest.approx(float(up.log_weight.exp()))
    assert sums.largest_weight(method, up, 50) == pytest.approx(51)
    assert sums.largest_weight(FedMAP(weighting="omega"), up, 50) == pytest.approx(1.02)
    assert sums.weight_of(next(kit_messages(Scaffold()))) == 1
    assert sums.largest_weight(Scaffold(), next(kit_messages(Scaffold())), 50) == 1


def kit_messages(method):
    sim = kit.simulate(method, rounds=0)
    down = tree.rows(method.dispatch(sim.state.server, torch.arange(1), torch.Generator()), 0)
    yield method.local_update(sim.task, method.init_client(sim.task.init()), down, kit.batches(0))[1]


def test_reasons_are_sentences_about_the_method():
    assert sums.why_not(FedAvg()) is None
    assert sums.why_not(FedMAP(prior="laplace")) == "its server does not only average what it is sent"
    assert "too small for sums in fixed point" in sums.why_not(FedMAP(weighting="omega", likelihood="sum"))
    assert sums.why_not(FedMAP(weighting="omega")) is None
    assert "class_size, mean, spread" in sums.why_not(PFedVMP())
