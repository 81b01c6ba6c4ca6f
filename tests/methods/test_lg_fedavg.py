import torch

from coterie import testing
from coterie.core import tree
from coterie.core.optimizers import SGD
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
