"""What the interface promises of every method: the loss told, rounds counted, claims checked."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from coterie import METHODS, testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.routes import NOBODY
from coterie.methods import FedAMP, FedeRiCo, FedMAP
from coterie.methods.fields import hyper_parameters

# Steps that are no optimiser's: so short that a model stays where it is, to float32.
STILL = {"per-fedavg": {"alpha": 1e-12}, "pfedbred": {"eta_alpha": 1e-12}}
# Options with which a client trains the initial model, and no other.
ONE = {"fedem": {"components": 1}, "ifca": {"clusters": 1}, "pfedbayes": {"noise": False}}
# What they train on is not the initial model's own loss; their tests have it.
OTHER_LOSSES = {"gpfl", "pfedgp"}
ALSO = {"ditto": {"global_loss"}, "fedrep": {"head_loss"}}  # losses that are told beside "loss"


def first_round(method, batches):
    """(state, message, info) of client 1's first round, on a network without normalisation and dropout."""
    task = testing.task(norm=False)
    server = method.init_server(task.init(), Population(4, 4, task, torch.arange(4)))
    down = tree.rows(method.dispatch(server, torch.tensor([1]), torch.Generator().manual_seed(0)), 0)
    return method.local_update(task, method.init_client(task.init()), down, batches)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHER_LOSSES])
def test_the_loss_told_is_the_mean_over_examples(name):
    """If no step moves the model, it is the model's cross-entropy over the client's 23 examples.

    They come in minibatches of 4 and a last one of 3, which counts for less: a mean over minibatches would differ.
    """
    method = dataclasses.replace(METHODS[name](), optimizer=SGD(1e-12), **STILL.get(name, {}), **ONE.get(name, {}))
    data, batches = testing.federation(), testing.batches(1)
    own = torch.from_numpy(data.split(1).train)
    assert len(own) == 23
    expected = F.cross_entropy(testing.module(norm=False)(data.x[own]), data.y[own]).detach()
    info = first_round(method, batches)[2]
    assert {key for key in info if key.endswith("loss")} == {"loss", *ALSO.get(name, ())}
    for key in info:
        if key.endswith("loss"):
            torch.testing.assert_close(info[key], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_without_examples_the_loss_told_is_0(name):
    batches = testing.batches(1)
    nothing = batches._replace(mask=torch.zeros_like(batches.mask))
    assert float(first_round(METHODS[name](), nothing)[2]["loss"]) == 0


@pytest.mark.parametrize("name", ["ditto", "pfedme", "fedmap", "pfedbred"])
def test_clients_count_the_rounds_they_took_part_in(name):
    sim = testing.simulate(METHODS[name](), rounds=3, norm=False)
    torch.testing.assert_close(sim.state.clients.rounds, torch.full((len(testing.SIZES),), 3))


@pytest.mark.parametrize(
    ("weighting", "log_weight", "fits"),
    [
        ("omega", 0.0, True),  # omega = exp(-(L + R)) is at most 1
        ("omega", -3.0, True),
        ("omega", 0.5, False),
        ("uniform", 0.5, False),
        ("samples", math.log(10), True),  # of the 10 examples declared
        ("samples", math.log(11), False),
    ],
)
def test_a_weight_of_fedmap_that_cannot_be(weighting, log_weight, fits):
    method = FedMAP(weighting=weighting)
    up = first_round(method, testing.batches(1))[1]._replace(log_weight=torch.tensor(log_weight))
    few = up._replace(count=torch.tensor(10.0)) if weighting == "omega" else up
    assert (method.implausible(few, 10) is None) == fits
    if weighting == "omega":
        assert "counts 23 examples of 10" in str(method.implausible(up, 10))


def test_claims_of_federico_that_cannot_be():
    method = FedeRiCo(SGD(0.1))
    up = first_round(method, testing.batches(1))[1]
    number = len(up.parts.weight)
    assert number > 1
    equal = torch.full((number,), 1 / number)

    def fits(weight=equal, to=up.to):
        return method.implausible(up._replace(to=to, parts=up.parts._replace(weight=weight)), 23) is None

    assert fits()
    assert not fits(weight=2 * equal)
    assert not fits(weight=torch.tensor([-0.5, *[0.0] * (number - 1)]))
    assert fits(to=torch.full_like(up.to, NOBODY))
    assert not fits(to=torch.full_like(up.to, NOBODY - 1))
    assert fits(to=torch.full_like(up.to, NOBODY).index_fill(0, torch.tensor([0]), 3))
    assert not fits(to=torch.full_like(up.to, 3)), "several steps for one model"
    assert not fits(to=torch.full_like(up.to, 4))  # there are clients 0 to 3


@pytest.mark.parametrize("method", METHODS)
def test_the_option_that_is_told_to_change_is_one_of_the_methods(method):
    option = METHODS[method]().pull_option.removeprefix("1/")
    assert option in {"", *(hyper.name for hyper in hyper_parameters(METHODS[method]))}


@pytest.mark.parametrize(
    ("method", "option"),
    [
        (FedMAP(), "pull"),
        (FedMAP(sigma2=15.0), "1/sigma2"),
        (FedAMP(), "lam"),
        (FedAMP(alpha=0.1), "1/alpha"),
        (FedAMP(alpha="theorem"), "1/alpha"),
    ],
)
def test_the_option_that_is_told_to_change_is_the_one_that_acts(method, option):
    assert method.pull_option == option
