"""Images stay bytes until a minibatch is used, in every engine."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from coterie.core import tree
from coterie.core.decode import IMAGENET, UNIT, Decode
from coterie.core.errors import DataError
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data import Pool, federate
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg, FedeRiCo, FedMAP, PFedBreD, PFedVMP

OWN = Decode((0.2, 0.4, 0.6), (0.5, 0.25, 2.0))


def images(scaling="unit", channels=3):
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.integers(256, size=(60, channels, 4, 4)).astype(np.uint8))
    pool = Pool("images", x, torch.from_numpy(draw.integers(3, size=60)), 3)
    return federate(pool, [np.arange(30), np.arange(30, 45), np.arange(45, 60)], seed=0, scaling=scaling)


def as_floats(federation):
    return dataclasses.replace(federation, x=federation.decode(federation.x), decode=None)


def simulation(federation, method=None, seed=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 3))
    task = Task(model, num_classes=3, decode=federation.decode)
    return Simulation.start(method or FedMAP(SGD(0.1)), task, federation, Plan(4, 2), 3, seed)


def trained(federation, engine, method=None):
    sim = simulation(federation, method)
    for number in (1, 2):
        sim.train(number, engine)
    return tree.leaves(sim.state), sim.evaluate(2, engine)


def test_the_formula():
    x = torch.arange(0, 48, dtype=torch.uint8).reshape(1, 3, 4, 4)
    expected = (x.double() / 255 - torch.tensor(OWN.mean)[:, None, None]) / torch.tensor(OWN.std)[:, None, None]
    torch.testing.assert_close(OWN(x), expected.float(), rtol=1e-5, atol=1e-6)
    assert OWN(x).dtype == torch.float32
    assert torch.equal(UNIT(x), x.float() / 255)
    assert torch.equal(Decode((0.5,), (0.5,))(x), (x.float() / 255 - 0.5) / 0.5)


def test_floats_and_tokens_pass_through():
    for x in (torch.randn(2, 3, 4, 4), torch.randint(9, (2, 25))):
        assert OWN(x) is x


def test_what_does_not_fit_is_told():
    with pytest.raises(DataError, match="3 channels does not fit"):
        IMAGENET(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(DataError, match="above 0"):
        Decode((0.0,), (0.0,))
    assert Decode.from_json(OWN.to_json()) == OWN
    assert Decode.from_json(None) is None


@pytest.mark.parametrize("scaling", ["unit", "standard", "imagenet"])
@pytest.mark.parametrize("engine", [Engine("loop"), Engine("stacked", chunk=2)], ids=["loop", "stacked"])
def test_bytes_train_as_their_numbers_do_bit_for_bit(scaling, engine):
    federation = images(scaling)
    assert federation.x.dtype == torch.uint8
    ours, scores = trained(federation, engine)
    theirs, expected = trained(as_floats(federation), engine)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert np.array_equal(scores["test"]["loss"], expected["test"]["loss"])


@pytest.mark.parametrize(
    "method", [PFedVMP(SGD(0.1)), FedeRiCo(), PFedBreD(), FedAvg(SGD(0.1))], ids=lambda m: type(m).__name__
)
def test_methods_that_look_at_the_data_in_their_own_way(method):
    federation = images()
    engine = Engine("stacked", chunk=3)
    for a, b in zip(
        trained(federation, engine, method)[0], trained(as_floats(federation), engine, method)[0], strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.slow  # a compiler's seconds
def test_compiled():
    federation = images("imagenet")
    ours, theirs = (simulation(federation, FedAvg(SGD(0.1))) for _ in range(2))
    ours.train(1, Engine("stacked", compiled=True, chunk=3))
    theirs.train(1, Engine("stacked", chunk=3))
    for a, b in zip(tree.leaves(ours.state), tree.leaves(theirs.state), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_in_workers():
    one, two = (trained(images("imagenet"), Engine("loop", workers=workers))[0] for workers in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_standard_scaling_is_that_of_the_training_images():
    federation = images("standard")
    train = torch.from_numpy(np.concatenate([split.train for split in federation.clients.values()]))
    decoded = federation.decode(federation.x)[train]
    torch.testing.assert_close(decoded.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(decoded.std((0, 2, 3), correction=0), torch.ones(3), rtol=1e-4, atol=0)


def test_imagenet_needs_colours():
    with pytest.raises(DataError, match="3 channels, not 1"):
        images("imagenet", channels=1)
