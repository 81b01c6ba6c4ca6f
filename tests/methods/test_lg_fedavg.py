import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Newcomer, Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import LGFedAvg

from .quadratic import LOOP


def test_heads_are_averaged_and_bodies_stay():
    sim = testing.simulate(LGFedAvg(SGD(0.1)), rounds=1)
    head = sim.task.head_names
    assert sim.state.server.keys() == head
    count, trained, views = torch.tensor(testing.SIZES, dtype=torch.float32), sim.state.clients, sim.views(1, LOOP)
    for name, value in views.items():
        if name in head:
            assert all(torch.equal(value[0], row) for row in value)
            torch.testing.assert_close(value[0], tree.mean({name: trained[name]}, count)[name])
        else:
            assert torch.equal(value, trained[name])
    assert not torch.equal(views["0.weight"][0], views["0.weight"][1])


def test_a_newcomer_trains_its_body_under_the_shared_head():
    """A model that is nothing but its head has no body to train: then a newcomer trains as everybody does."""
    for task, only in (
        (testing.task(), {"0.weight", "1.weight", "1.bias"}),
        (Task(nn.Linear(6, 3), num_classes=3), None),
    ):
        newcomer = Newcomer(task.init(), task.init())
        assert LGFedAvg().onboard(task, newcomer, torch.tensor([4]), None).only == only


def test_without_a_head_it_says_that_nothing_is_shared():
    headless = Task(nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten()), num_classes=3)
    assert "nothing is shared" in LGFedAvg().cautions(headless, Population(4, 4))[0]
    assert LGFedAvg().cautions(testing.task(), Population(4, 4)) == []
