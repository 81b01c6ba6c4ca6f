import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Newcomer, Population
from coterie.core.optimizers import SGD, Adam
from coterie.core.privacy import Guard, noisy_sum
from coterie.core.task import Task
from coterie.core.training import train
from coterie.methods import FedPAC
from coterie.methods.fedpac import Up, _statistics, _weights
from coterie.parts import class_moments

from .quadratic import LOOP


def test_statistics_by_hand():
    """Features are the inputs: h_k is the class's share times its mean, and v the variance of sum_k h_k over n."""
    task, epoch = Task(nn.Sequential(nn.Identity(), nn.Linear(6, 3)), num_classes=3), testing.batches(1).epoch(0)
    h, v = _statistics(task, task.init(), epoch)
    rows = epoch.index[epoch.mask > 0]
    z, y = epoch.x[rows], epoch.y[rows]
    expected = torch.stack([z[y == k].sum(0) / len(y) for k in range(3)])
    torch.testing.assert_close(h, expected)
    # An example's contribution is z in the row of its class: its unbiased variance over the number of examples.
    contribution = nn.functional.one_hot(y, 3)[:, :, None] * z[:, None]
    torch.testing.assert_close(v, contribution.flatten(1).var(0, correction=1).sum() / len(y))
    # One example says nothing of its variance: its square stands in.
    one = epoch.first_steps(1)
    one = one._replace(mask=one.mask * (one.mask.flatten().cumsum(0).reshape(one.mask.shape) == 1))
    h, v = _statistics(task, task.init(), one)
    torch.testing.assert_close(v, (h**2).sum())
    assert float(v) > 0


def test_private_statistics_by_hand():
    """As above with clipped features; the sum of their squares has the noise of a square of the clip."""
    task, epoch = Task(nn.Sequential(nn.Identity(), nn.Linear(6, 3)), num_classes=3), testing.batches(1).epoch(0)
    guard = Guard(8, sum_noise=0.3, clip_features=2.0)
    rows = epoch.index[epoch.mask > 0]
    short = class_moments.clipped(epoch.x[rows], guard)
    assert not torch.equal(short, epoch.x[rows])
    size, mean = class_moments.class_means(task, task.init(), epoch, guard)
    n = size.sum()
    squares = noisy_sum(guard, (short**2).sum(), 4.0, epoch.key[0, 0], 2)
    h, v = _statistics(task, task.init(), epoch, guard)
    torch.testing.assert_close(h, size[:, None] / n * mean)
    torch.testing.assert_close(v, (squares / n - (h**2).sum()) / (n - 1))
    assert float(v) > 0


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


def ups(task: Task) -> Up:
    """Two clients, of which the first is three times as large and much less certain."""
    theta = tree.stack([task.init(), tree.scale(task.init(), 3.0)])
    class_size = torch.tensor([[3.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    centroid = torch.stack([torch.full((3, 6), 4.0), torch.full((3, 6), 8.0)])
    size, v = torch.tensor([3.0, 1.0]), torch.tensor([3.0, 1.0])
    return Up(task.sent(theta), size, class_size, centroid, torch.zeros(2, 3, 6), v)


def linear_task(frozen_bias: bool = False) -> Task:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    module[1].bias.requires_grad_(not frozen_bias)
    return Task(module, num_classes=3)


def test_an_aggregation_by_hand():
    """h is alike, so the weights are inverse to v: 1/4 and 3/4. The body is averaged by n, 3/4 and 1/4."""
    task, method = linear_task(), FedPAC()
    server = method.init_server(task.init(), Population(2, 2, task))
    server = method.aggregate(server, torch.arange(2), ups(task))
    torch.testing.assert_close(server.body["0.weight"], task.init()["0.weight"] * (0.75 + 0.25 * 3))
    for row in server.heads["1.weight"]:
        torch.testing.assert_close(row, task.init()["1.weight"] * (0.25 + 0.75 * 3), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(server.centroid[0], torch.full((6,), (3 * 4.0 + 8.0) / 4))
    torch.testing.assert_close(server.centroid[2], torch.full((6,), 8.0))
    assert server.known.tolist() == [1.0, 0.0, 1.0]


def test_each_client_has_a_row_of_weights():
    """The first client is certain and stays with its own head; the second, uncertain, borrows the first one's."""
    h = torch.tensor([[[0.0]], [[1.0]]])
    weights = _weights(h, torch.tensor([0.0, 100.0]))
    # Client 1 minimises a_0^2 (1 - 0)^2 + 100 a_1^2 with a_1 = 1 - a_0: a_0 = 100 / 101; client 0 has a_0 = 1.
    expected = torch.tensor([[1.0, 0.0], [100 / 101, 1 / 101]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


def test_what_all_features_share_changes_no_weights():
    h = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    v = torch.linspace(0.1, 1.0, 6, dtype=torch.float64)
    torch.testing.assert_close(_weights(h, v), _weights(h + 100.0, v), atol=1e-7, rtol=0)


def test_a_partly_frozen_head():
    task, method = linear_task(frozen_bias=True), FedPAC()
    server = method.init_server(task.init(), Population(2, 2, task))
    server = method.aggregate(server, torch.arange(2), ups(task))
    assert torch.equal(server.heads["1.bias"], task.init()["1.bias"].expand(2, 3))
    assert not torch.equal(server.heads["1.weight"][0], task.init()["1.weight"])
    newcomer, one = Newcomer(server, task.init()), tree.rows(ups(task), torch.tensor([1]))
    head = method.onboard(task, newcomer, torch.tensor([1]), one).server.heads
    torch.testing.assert_close(head["1.weight"][1], 3 * task.init()["1.weight"])
    assert torch.equal(head["1.bias"][1], task.init()["1.bias"])


def test_a_newcomer_trains_nothing_but_its_head_with_adam():
    task = testing.task(norm=False)
    begun, method = task.beginning(task.init(), task.head_names), FedPAC(Adam(0.01))
    down = method.dispatch(method.init_server(task.init(), Population(1, 1, task)), torch.arange(1), torch.Generator())
    _, up, _ = method.local_update(begun, (), tree.rows(down, 0), testing.batches(0))
    assert up.theta.keys() == task.head_names
