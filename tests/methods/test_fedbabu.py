import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD, Adam
from coterie.core.task import Task
from coterie.methods import FedBABU

from .quadratic import LOOP


def test_the_head_is_neither_trained_nor_sent():
    sim = testing.simulate(FedBABU(SGD(0.1)), rounds=2)
    head, first = sim.task.head_names, sim.task.init()
    assert sim.state.server.keys() == first.keys() - head
    for name in head:
        assert all(torch.equal(row, first[name]) for row in sim.state.clients[name])
    count = torch.tensor(testing.SIZES, dtype=torch.float32)
    body = {name: sim.state.clients[name] for name in sim.state.server}
    for name, value in sim.task.sent(tree.mean(body, count)).items():
        torch.testing.assert_close(sim.state.server[name], value)


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_fine_tuning_changes_what_it_says(part):
    sim = testing.simulate(FedBABU(SGD(0.1), finetune=part), rounds=1)
    views, head = sim.views(1, LOOP), sim.task.head_names
    begin = {**sim.task.init(), **sim.state.server}
    moved = {name for name in sim.task.trainable if not torch.equal(views[name][0], begin[name])}
    assert moved == {"all": sim.task.trainable, "head": head, "body": sim.task.trainable - head}[part]


def test_without_fine_tuning_all_deploy_the_same():
    sim = testing.simulate(FedBABU(SGD(0.1), finetune_epochs=0), rounds=1)
    for name, value in sim.views(1, LOOP).items():
        assert all(torch.equal(value[0], row) for row in value), name


def test_without_a_head_nothing_of_it_is_fine_tuned():
    """Adam has nothing to train then, and the model stays as it is."""
    task = Task(nn.Sequential(nn.Conv1d(1, 3, 6), nn.Flatten()), num_classes=3)
    batches = testing.batches(0)
    batches = batches._replace(x=batches.x[:, None])
    view = FedBABU(Adam(0.1), finetune="head").personalize(task, task.init(), task.init(), batches)
    assert all(torch.equal(value, task.init()[name]) for name, value in view.items())
