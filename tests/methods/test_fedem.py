import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import FedAvg, FedEM
from coterie.parts.mixtures import Mixture

from .planted import KINDS, simulation
from .quadratic import LOOP, STACKED


@pytest.mark.parametrize(("m_step", "scale"), [("plain", [1.0, 1.0]), ("scaled", [2.0, 1 / 0.7])])
def test_one_step_by_hand(m_step, scale):
    """One minibatch of a linear model: responsibilities, proportions and weighted gradients, written out."""
    task, batches, lr = Task(nn.Linear(6, 3), num_classes=3), testing.batches(1), 0.2
    some = batches.epoch(0).first_steps(1)
    rows = some.index.flatten()[some.mask.flatten() > 0]
    x, y = batches.x[rows], batches.y[rows]
    draw = torch.Generator().manual_seed(0)
    theta = {"weight": torch.randn(2, 3, 6, generator=draw), "bias": torch.randn(2, 3, generator=draw)}
    pi = torch.tensor([0.3, 0.7])
    new_pi, up, _ = FedEM(SGD(lr), components=2, m_step=m_step).local_update(task, pi, theta, some)
    logits = torch.einsum("mcf,nf->mnc", theta["weight"], x) + theta["bias"][:, None]
    probabilities = logits.softmax(2)
    likelihood = pi[:, None] * probabilities[:, torch.arange(len(y)), y]
    q = likelihood / likelihood.sum(0)  # [2, n]
    torch.testing.assert_close(new_pi, q.mean(1))
    residual = (
        torch.tensor(scale)[:, None, None] * q[..., None] * (probabilities - nn.functional.one_hot(y, 3)) / len(y)
    )  # of mean q l, by the logits
    torch.testing.assert_close(up.params["weight"], theta["weight"] - lr * torch.einsum("mnc,nf->mcf", residual, x))
    torch.testing.assert_close(up.params["bias"], theta["bias"] - lr * residual.sum(1))


def test_it_predicts_the_mixture_of_probabilities():
    task = Task(nn.Linear(6, 3), num_classes=3)
    models = tree.stack([task.init(), tree.scale(task.init(), -1.0)])
    x, pi = testing.federation().x[:5], torch.tensor([0.25, 0.75])
    expected = sum(p * task.logits(tree.rows(models, m), x).softmax(1) for m, p in enumerate(pi))
    torch.testing.assert_close(FedEM(components=2).predict(task, Mixture(models, pi), x).exp(), expected)


def test_planted_distributions_are_told_apart():
    sim = simulation(FedEM(SGD(0.5), components=2))
    for number in range(1, 16):
        sim.train(number, STACKED)
    pi = sim.state.clients  # [clients, 2]
    first, second = (pi[list(kind)].mean(0) for kind in KINDS)
    assert abs(float(first[0] - second[0])) > 0.5
    assert float(sim.evaluate(15, LOOP)["test"]["accuracy"].mean()) > 0.8


def test_responsibilities_are_those_of_the_received_models():
    """Two minibatches: after large steps on the first, q of the second is still that of the models as received."""
    task, batches = Task(nn.Linear(6, 3), num_classes=3), testing.batches(1).epoch(0).first_steps(2)
    draw = torch.Generator().manual_seed(0)
    theta = {"weight": torch.randn(2, 3, 6, generator=draw), "bias": torch.randn(2, 3, generator=draw)}
    pi = torch.tensor([0.3, 0.7])
    found, _, _ = FedEM(SGD(2.0), components=2).local_update(task, pi, theta, batches)
    rows = batches.index[batches.mask > 0]
    x, y = batches.x[rows], batches.y[rows]
    logits = torch.einsum("mcf,nf->mnc", theta["weight"], x) + theta["bias"][:, None]
    likelihood = pi[:, None] * logits.softmax(2)[:, torch.arange(len(y)), y]
    torch.testing.assert_close(found, (likelihood / likelihood.sum(0)).mean(1))
    assert int((batches.mask.flatten(0, 1) > 0).any(1).sum()) == 2


def test_components_of_equal_shares_learn_as_fast_as_fedavg():
    """Equal components have q = 1/M for all examples: each then takes FedAvg's steps, or a third of them (plain)."""
    task, batches = Task(nn.Linear(6, 3), num_classes=3), testing.batches(1).epoch(0).first_steps(1)
    theta, pi = tree.broadcast(task.init(), 3), torch.full((3,), 1 / 3)
    begin = task.init()["weight"]
    _, alone, _ = FedAvg(SGD(0.1)).local_update(task, (), task.init(), batches)
    way = alone.params["weight"] - begin
    for m_step, share in (("scaled", 1.0), ("plain", 1 / 3)):
        _, up, _ = FedEM(SGD(0.1), m_step=m_step).local_update(task, pi, theta, batches)
        for m in range(3):
            torch.testing.assert_close(up.params["weight"][m] - begin, share * way, rtol=1e-4, atol=1e-7)
