import dataclasses

import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.experiment.simulation import Simulation
from coterie.methods import FedPer, Local

from .quadratic import LOOP, STACKED, simulation


def federation(*clients: int):
    whole = testing.federation()
    names = [whole.names[i] for i in clients]
    return dataclasses.replace(whole, clients={name: whole.clients[name] for name in names})


def run(method, *clients: int, rounds: int = 2) -> Simulation:
    sim = Simulation.start(method, testing.task(), federation(*clients), testing.PLAN, len(clients), seed=0)
    for number in range(1, rounds + 1):
        sim.train(number, LOOP)
    return sim


def test_one_client_trains_alone():
    ours, alone = run(FedPer(SGD(0.1)), 1), run(Local(SGD(0.1)), 1)
    for name, value in ours.task.sent(alone.views(2, LOOP)).items():
        torch.testing.assert_close(ours.views(2, LOOP)[name], value, rtol=1e-6, atol=1e-7)


def test_a_model_that_is_all_head_is_local_training():
    ours, alone = simulation(FedPer(SGD(0.2)), steps=3), simulation(Local(SGD(0.2)), steps=3)
    for number in (1, 2):
        outcome = ours.train(number, STACKED)
        alone.train(number, STACKED)
    assert ours.state.server == {}
    assert outcome.bytes_up == 3 * 4  # nothing but the counts
    assert torch.equal(ours.views(2, LOOP)["weight"], alone.views(2, LOOP)["weight"])


def test_base_is_the_mean_by_examples_and_heads_stay():
    sim = run(FedPer(SGD(0.1)), 0, 1, 2, 3, rounds=1)
    head = sim.task.head_names
    assert sim.state.server.keys() == sim.task.init().keys() - head
    count = torch.tensor(testing.SIZES, dtype=torch.float32)
    trained, views = sim.state.clients, sim.views(1, LOOP)
    for name, value in sim.task.sent(views).items():
        if name in head:
            assert torch.equal(value, trained[name])
            assert not torch.equal(value[0], value[1])
        else:
            torch.testing.assert_close(value[0], tree.mean({name: trained[name]}, count)[name])
            assert all(torch.equal(value[0], row) for row in value)
