import torch
from torch import nn

from coterie import testing
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import train
from coterie.experiment.simulation import Simulation
from coterie.methods import FedRep

from . import quadratic
from .quadratic import LOOP, STACKED


def update(method: FedRep):
    """(before, after, its message) of one client's round, on a network with BatchNorm."""
    task = testing.task()
    params = task.init()
    body = {name: value for name, value in params.items() if name not in task.head_names}
    theta, up, _ = method.local_update(task, params, body, testing.batches(1))
    return task, params, theta, up


def test_head_first_with_the_body_fixed_then_the_body_with_the_head_fixed():
    task, params, theta, up = update(FedRep(SGD(0.1)))
    batches, head = testing.batches(1), task.head_names
    first, _ = train(task, SGD(0.1), params, batches, only=head)
    for name in params:
        assert torch.equal(first[name], params[name]) == (name not in head)  # buffers of the body are fixed too
    second, _ = train(task, SGD(0.1), first, batches, only=frozenset(params) - head)
    for name in params:
        assert torch.equal(second[name], first[name]) == (name in head)
        assert torch.equal(theta[name], second[name])
    assert up.params.keys() == params.keys() - head - {"1.num_batches_tracked"}


def test_head_epochs_and_body_epochs_are_passes_over_the_minibatches():
    task, params, theta, _ = update(FedRep(SGD(0.1), head_epochs=2, body_epochs=3))
    expected, batches = params, testing.batches(1)
    for _ in range(2):  # plain SGD keeps nothing between steps, so passes can be taken one by one
        expected, _ = train(task, SGD(0.1), expected, batches, only=task.head_names)
    for _ in range(3):
        expected, _ = train(task, SGD(0.1), expected, batches, only=frozenset(params) - task.head_names)
    for name in params:
        assert torch.equal(theta[name], expected[name])


def test_head_is_the_least_squares_solution_on_the_received_features():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(quadratic.DIM, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    task, data = Task(module, "regression"), quadratic.federation()
    plan = quadratic.simulation(FedRep(), steps=1).plan
    sim = Simulation.start(FedRep(SGD(0.3), head_epochs=700), task, data, plan, 3, seed=0)
    body = sim.state.server["0.weight"]
    sim.train(1, STACKED)
    for k in range(3):
        own = torch.from_numpy(data.split(k).train)
        expected = torch.linalg.lstsq(data.x[own] @ body.T, data.y[own][:, None]).solution
        torch.testing.assert_close(sim.state.clients["1.weight"][k], expected.T, rtol=1e-6, atol=1e-7)
    # One full-batch step of each body with that head, averaged by size.
    weight = body.clone().requires_grad_()
    for k, share in enumerate(quadratic.SHARE):
        own = torch.from_numpy(data.split(k).train)
        out = data.x[own] @ weight.T @ sim.state.clients["1.weight"][k].T
        (share * ((out[:, 0] - data.y[own]) ** 2).mean()).backward()
    torch.testing.assert_close(sim.state.server["0.weight"], body - 0.3 * weight.grad, rtol=1e-6, atol=1e-7)


def test_every_client_deploys_the_same_body():
    sim = testing.simulate(FedRep(SGD(0.1)), LOOP, rounds=2)
    for name, rows in sim.views(2, LOOP).items():
        assert all(torch.equal(rows[0], row) for row in rows) == (name not in sim.task.head_names), name
