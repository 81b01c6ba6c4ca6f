"""What clients tell of their training: the mean loss over the examples that they trained on."""

import pytest
import torch

from coterie.core.optimizers import SGD
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS
from coterie.methods.fields import with_optimizer
from coterie.testing import kit

STILL = 1e-12  # a step size with which a model stays where it begins
OWN_STEPS = {"per-fedavg": {"alpha": STILL}, "pfedbred": {"eta": STILL}}
OTHER_LOSSES = {
    "federico": "it trains several models",
    "fedem": "it trains several models",
    "ifca": "it begins at the best of several models",
    "pfedbayes": "the loss is of a random model",
    "pfedgp": "the loss is of a Gaussian process",
    "gpfl": "the head sees features that its valve changed",
    "fedfomo": "it withholds some of the examples",
}


def told(method):
    plan = Plan(batch_size=4, epochs=2)  # minibatches of 4, and of what is left: each has to count its examples
    if hasattr(method, "optimizer"):
        method = with_optimizer(method, SGD(STILL))
    sim = Simulation.start(method.scheduled(1), kit.task(norm=False), kit.federation(), plan, len(kit.SIZES), seed=0)
    return sim.train(1, kit.LOOP).info["loss"]


@pytest.fixture(scope="module")
def mean_losses():
    federation, task = kit.federation(), kit.task(norm=False)
    examples = [torch.as_tensor(federation.split(i)["train"]) for i in range(len(kit.SIZES))]
    losses = [task.losses(task.init(), federation.x[own], federation.y[own]).mean() for own in examples]
    return torch.stack(losses)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(OTHER_LOSSES)))
def test_a_client_tells_the_mean_loss_over_its_examples(name, mean_losses):
    torch.testing.assert_close(told(METHODS[name](**OWN_STEPS.get(name, {}))), mean_losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_others_tell_a_loss_too(name):
    found = told(METHODS[name]())
    assert found.shape == (len(kit.SIZES),)
    assert bool(found.isfinite().all())
