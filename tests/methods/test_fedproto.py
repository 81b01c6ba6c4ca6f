import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import FedProto, Local
from coterie.methods.fedproto import Prototypes, Up, View

from .quadratic import LOOP


def identity() -> Task:
    """Features are the inputs themselves."""
    return Task(nn.Sequential(nn.Identity(), nn.Linear(2, 3)), num_classes=3)


CENTRE = torch.tensor([[[1.0, 1.0], [2.0, 0.0], [0.0, 0.0]], [[3.0, 5.0], [9.0, 9.0], [0.0, 0.0]]])  # of two clients
CLASS_SIZE = torch.tensor([[1.0, 4.0, 0.0], [3.0, 0.0, 0.0]])


@pytest.mark.parametrize(("weighting", "first"), [("uniform", [2.0, 3.0]), ("samples", [2.5, 4.0])])
def test_prototypes_are_means_over_those_who_have_the_class(weighting, first):
    method, task = FedProto(weighting=weighting), identity()
    server = method.init_server(task.init(), Population(2, 2, task))
    server = server._replace(centre=server.centre + 7)
    server = method.aggregate(server, torch.arange(2), Up(CLASS_SIZE, CENTRE))
    # Client 1 has no example of class 1, whatever it says of it; nobody has one of class 2, which keeps what it had.
    torch.testing.assert_close(server.centre, torch.tensor([first, [2.0, 0.0], [7.0, 7.0]]))
    assert server.known.tolist() == [1, 1, 0]
    again = method.aggregate(server, torch.arange(1), Up(torch.zeros(1, 3), torch.zeros(1, 3, 2)))
    assert torch.equal(again.centre, server.centre)
    assert torch.equal(again.known, server.known)


def test_predicts_the_nearest_known_prototype():
    prototypes = Prototypes(torch.tensor([[0.0, 0.0], [4.0, 0.0], [2.0, 2.0]]), torch.tensor([1.0, 1.0, 0.0]))
    x = torch.tensor([[1.0, 0.0], [3.5, 1.0], [2.0, 2.1], [500.0, 400.0]])
    logits = FedProto().predict(identity(), View(identity().init(), prototypes), x)
    torch.testing.assert_close(logits[:2, :2], -torch.tensor([[1.0, 9.0], [13.25, 1.25]]))
    # The third class has no prototype, although what stands there is nearest; it is never predicted.
    assert logits.argmax(1).tolist()[:2] == [0, 1]
    assert (logits[:, 2] < logits[:, :2].amin(1)).all()


def test_first_round_has_no_prototypes_to_pull_to():
    ours = testing.simulate(FedProto(SGD(0.1), lam=100.0), LOOP, rounds=1)
    alone = testing.simulate(Local(SGD(0.1)), LOOP, rounds=1)
    assert all(torch.equal(value, alone.state.clients[name]) for name, value in ours.state.clients.items())


def test_only_prototypes_are_exchanged():
    sim = testing.simulate(FedProto(), LOOP, rounds=1)
    outcome = sim.train(2, LOOP)
    present = sum(
        len(testing.federation().y[torch.from_numpy(s.train)].unique()) for s in sim.federation.clients.values()
    )
    assert outcome.bytes_up == 4 * (len(testing.SIZES) * 3 + 8 * present)  # counts, and 8 features a class a client has
    assert outcome.bytes_down == 4 * len(testing.SIZES) * (3 * 8 + 3)


def test_prototypes_are_of_the_trained_model_in_evaluation_mode():
    sim = testing.simulate(FedProto(SGD(0.1)), LOOP, rounds=1)
    data, total = sim.federation, torch.zeros(3, 8)
    holders = torch.zeros(3)
    for i in range(len(testing.SIZES)):
        own = torch.from_numpy(data.split(i).train)
        z = sim.task.features(tree.rows(sim.state.clients, i), data.x[own])
        for k in data.y[own].unique().tolist():
            total[k] += z[data.y[own] == k].mean(0)
            holders[k] += 1
    assert holders.min() > 0
    torch.testing.assert_close(sim.state.server.centre, total / holders[:, None])
