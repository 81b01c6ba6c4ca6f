import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import train
from coterie.methods import FedPAC
from coterie.methods.fedpac import _statistics, _weights

from .quadratic import LOOP


def test_statistics_by_hand():
    """Features are the inputs: h_k is the class's share times its mean, and v the variance of sum_k h_k over n."""
    task, epoch = Task(nn.Sequential(nn.Identity(), nn.Linear(6, 3)), num_classes=3), testing.batches(1).epoch(0)
    h, v = _statistics(task, task.init(), epoch)
    rows = epoch.index[epoch.mask > 0]
    z, y = epoch.x[rows], epoch.y[rows]
    expected = torch.stack([z[y == k].sum(0) / len(y) for k in range(3)])
    torch.testing.assert_close(h, expected)
    # An example's contribution is z in the row of its class: E||.||^2 - ||E .||^2, over the number of examples.
    contribution = nn.functional.one_hot(y, 3)[:, :, None] * z[:, None]
    torch.testing.assert_close(v, contribution.flatten(1).var(0, correction=0).sum() / len(y))


def test_weights_solve_the_quadratic_program():
    draw = np.random.default_rng(0)
    h, v = draw.normal(size=(5, 3, 2)), draw.uniform(0.1, 1.0, 5)
    found = _weights(torch.from_numpy(h), torch.from_numpy(v)).numpy()
    flat = h.reshape(5, -1)
    for i in range(5):

        def value(a, i=i):
            return ((a @ flat - flat[i]) ** 2).sum() + (a**2 * v).sum()

        best = minimize(
            value, np.full(5, 0.2), bounds=[(0, 1)] * 5, constraints={"type": "eq", "fun": lambda a: a.sum() - 1}
        )
        assert value(found[i]) <= best.fun + 1e-7


def test_certain_clients_keep_their_heads_and_equal_ones_share_by_certainty():
    h = torch.tensor([[[0.0]], [[5.0]], [[5.0]]])
    own = _weights(h, torch.full((3,), 1e-9))
    torch.testing.assert_close(own[0], torch.tensor([1.0, 0, 0], dtype=torch.float64), atol=1e-3, rtol=0)
    # Alike clients: no bias, so the weights are inverse to the variances, 1/1 and 1/3.
    alike = _weights(torch.zeros(2, 1, 1), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(alike, torch.tensor([[0.75, 0.25]] * 2, dtype=torch.float64), atol=1e-5, rtol=0)


def test_heads_are_combined_and_the_body_is_averaged():
    sim = testing.simulate(FedPAC(SGD(0.1)), rounds=2)
    server, views = sim.state.server, sim.views(2, LOOP)
    torch.testing.assert_close(server.alpha.sum(1), torch.ones(4), atol=1e-5, rtol=0)
    for name, value in views.items():
        if name in sim.task.head_names:
            assert torch.equal(value, server.heads[name])
            assert not torch.equal(value[0], value[1])
        else:
            assert all(torch.equal(row, server.body[name]) for row in value)


def test_a_round_in_order():
    """The head trains on the received body; then the body trains, and the head stays."""
    task, method, batches = testing.task(norm=False), FedPAC(SGD(0.1), lam=0.0), testing.batches(0)
    server = method.init_server(task.init(), Population(1, 1, task))
    down = method.dispatch(server, torch.arange(1), torch.Generator())
    _, up, _ = method.local_update(task, (), tree.rows(down, 0), batches)
    first, _ = train(task, SGD(0.1), task.init(), batches, only=task.head_names)
    second, _ = train(task, SGD(0.1), first, batches, only=frozenset(server.body))
    for name, value in second.items():
        torch.testing.assert_close(up.theta[name], value)
