import math

import pytest
import torch
from torch import nn

from coterie import CoterieError, testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import MOON, FedAvg
from coterie.methods.moon import SLOPE

from .quadratic import LOOP


def test_the_contrast_by_hand():
    """cos = 1 and 0 for the first example, 0.6 and 0.8 for the second, tau = 0.5; the third is padding."""
    z = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    received = torch.tensor([[5.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    last = torch.tensor([[0.0, 1.0], [4.0, 3.0], [0.0, 1.0]])
    first = -math.log(math.exp(1 / 0.5) / (math.exp(1 / 0.5) + math.exp(0.0)))
    second = -math.log(math.exp(0.6 / 0.5) / (math.exp(0.6 / 0.5) + math.exp(0.8 / 0.5)))
    mask = torch.tensor([1.0, 3.0, 0.0])
    found = MOON(mu=2.0, temperature=0.5)._contrast(z, received, last, mask)
    assert float(found) == pytest.approx(2 * (first + 3 * second) / 4, rel=1e-6)
    automatic = MOON(temperature=0.5)._contrast(z, received, last, mask)  # mu = 0.1 tau |received|, which is 5 and 5
    assert float(automatic) == pytest.approx(0.25 * (first + 3 * second) / 4, rel=1e-6)


def test_the_first_round_has_no_contrast_and_the_second_has():
    """In its first round a client's last model is the received one: the gradient of log 2 is 0."""
    task, first = testing.task(norm=False), testing.simulate(MOON(SGD(0.1), mu=5.0), rounds=1, norm=False)
    plain = testing.simulate(FedAvg(SGD(0.1)), rounds=1, norm=False)
    for name, value in plain.state.server.items():
        torch.testing.assert_close(first.state.server[name], value, rtol=0, atol=1e-6)
    other = tree.map(lambda leaf: leaf + 0.3, task.init())
    client = MOON().init_client(other)
    begin = (task, client._replace(rounds=torch.tensor(1)), task.init(), testing.batches(0))
    with_, without = (MOON(SGD(0.1), mu=mu).local_update(*begin)[0].last for mu in (5.0, 0.0))
    assert float(tree.sqdist(with_, without)) > 1e-6


def test_all_deploy_the_global_model():
    sim = testing.simulate(MOON(SGD(0.1)))
    for name, value in sim.views(2, LOOP).items():
        assert all(torch.equal(row, sim.state.server[name]) for row in value)


def test_features_go_to_the_received_model_and_away_from_the_last():
    task, batches = testing.task(norm=False), testing.batches(0).first_steps(1)
    last = tree.map(lambda leaf: leaf + 0.3, task.init())
    client = MOON().init_client(last)._replace(rounds=torch.tensor(1))
    with_, without = (
        MOON(SGD(0.1), mu=mu, temperature=1.0).local_update(task, client, last, batches)[0].last for mu in (5.0, 0.0)
    )
    # The received model is the last one here: nothing is pulled.
    assert float(tree.sqdist(with_, without)) < 1e-10
    draw = torch.Generator().manual_seed(0)
    away = tree.map(lambda leaf: leaf + 0.3 * torch.randn(leaf.shape, generator=draw), task.init())
    client = MOON().init_client(away)._replace(rounds=torch.tensor(1))
    x = batches.x[batches.index[batches.mask > 0]]

    def cosine_to_last(mu: float) -> float:
        moved = MOON(SGD(0.01), mu=mu).local_update(task, client, task.init(), batches)[0].last
        return float(torch.cosine_similarity(task.features(moved, x), task.features(away, x), dim=1).mean())

    assert cosine_to_last(5.0) < cosine_to_last(0.0)


def test_a_model_without_a_head_is_refused():
    task = Task(nn.Sequential(nn.Conv1d(6, 3, 1), nn.Flatten()), num_classes=3)
    with pytest.raises(CoterieError, match="name one with --head"):
        MOON().init_server(task.init(), Population(2, 2, task))


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_automatic_contrast_has_the_same_slope_whatever_the_scale_of_features(scale, temperature):
    """At z = z_glob only the second cosine has one: mu / (tau |z|) sin(z, z_prev) times the weight of that term."""
    z = scale * torch.tensor([[3.0, 4.0]])
    last = torch.tensor([[4.0, 3.0]])
    method = MOON(temperature=temperature)
    slope = torch.func.grad(lambda moved: method._contrast(moved, z, last, torch.ones(1)))(z)
    sine = (1 - (24 / 25) ** 2) ** 0.5
    away = 24 / 25 - 1
    expected = SLOPE * sine / (1 + math.exp(-away / temperature))
    assert float(slope.norm()) == pytest.approx(expected, rel=1e-3)
