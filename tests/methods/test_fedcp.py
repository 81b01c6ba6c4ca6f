import math

import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.batches import Batch
from coterie.core.method import CountedParams, Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import FedCP, FedPer
from coterie.methods.fedcp import Model, _combined, discrepancy, shares
from coterie.parts.auxiliary import Dense

from .quadratic import LOOP

DIM = 8


def held(own, dim=DIM):
    """A gate that gives all of every feature to one head, whatever the features are, and has no gradient."""
    open_, shut = torch.full((dim,), 100.0), torch.zeros(dim)
    shift = torch.cat([open_, shut] if own else [shut, open_])
    weight = torch.randn(2 * dim, dim, generator=torch.Generator().manual_seed(0))
    return Dense(weight, torch.zeros(2 * dim), torch.zeros(2 * dim), shift)


def simulated(method, bias, gate=None, rounds=3):
    """Three of four clients take part in every round."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = [nn.Linear(6, DIM, bias=False), nn.BatchNorm1d(DIM), nn.ReLU(), nn.Dropout(0.2)]
        task = Task(nn.Sequential(*body, nn.Linear(DIM, 3, bias=bias)), num_classes=3)
    sim = Simulation.start(method, task, testing.federation(), Plan(batch_size=4, epochs=2), 4, seed=0)
    if gate is not None:
        sim.state = sim.state._replace(server=sim.state.server._replace(gate=gate))
    for number in range(1, rounds + 1):
        sim.train(number, LOOP)
    return sim


def pieces(seed=0, mask=None):
    """(task, own model, the received one, a gate, a minibatch)."""
    draw = torch.Generator().manual_seed(seed)
    task = testing.task(norm=False)
    theta, received = (
        tree.map(lambda leaf: torch.randn(leaf.shape, generator=draw) / 2, task.init()) for _ in range(2)
    )
    gate = Dense(*(torch.randn(shape, generator=draw) for shape in ((16, 8), (16,), (16,), (16,))))
    x, y = torch.randn(5, 6, generator=draw), torch.tensor([0, 1, 2, 0, 1])
    mask = torch.ones(5) if mask is None else mask
    return task, theta, received, gate, Batch(x, y, mask, torch.tensor(0))


@pytest.mark.parametrize("bias", [True, False])
def test_with_everything_to_the_own_head_and_without_the_pull_it_is_fedper(bias):
    """The same bodies and heads in every round, but for rounding: the server's head is not seen, nor trained."""
    ours = simulated(FedCP(SGD(0.1), lam=0.0), bias, held(own=True))
    theirs = simulated(FedPer(SGD(0.1)), bias)
    for name, value in theirs.state.server.items():
        torch.testing.assert_close(ours.state.server.theta[name], value, rtol=1e-5, atol=1e-6)
    for name in ours.task.head_names:
        torch.testing.assert_close(ours.state.clients.theta[name], theirs.state.clients[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        ours.predictions(3, LOOP).outputs, theirs.predictions(3, LOOP).outputs, rtol=1e-5, atol=1e-5
    )
    for now, before in zip(ours.state.server.gate, held(own=True), strict=True):
        torch.testing.assert_close(now, before)


def test_with_everything_to_the_servers_head_no_head_is_trained():
    sim = simulated(FedCP(SGD(0.1), lam=0.0), bias=True, gate=held(own=False))
    for name in sim.task.head_names:
        torch.testing.assert_close(sim.state.server.theta[name], sim.task.init()[name])
        torch.testing.assert_close(sim.state.clients.theta[name][0], sim.task.init()[name])
    assert not torch.allclose(sim.state.server.theta["0.weight"], sim.task.init()["0.weight"], atol=1e-3)


def test_shares_add_up_to_1_for_every_feature():
    _, _, _, gate, _ = pieces()
    r, s = shares(gate, torch.randn(7, 8, generator=torch.Generator().manual_seed(1)))
    assert r.shape == s.shape == (7, 8)
    torch.testing.assert_close(r + s, torch.ones(7, 8))
    assert float(r.min()) >= 0
    assert float((r - r.mean(0)).abs().max()) > 0.05  # they depend on the example
    # By hand, for one feature of one example with a gate that only shifts: scores relu(2) and relu(-1).
    only = Dense(torch.zeros(2, 1), torch.zeros(2), torch.zeros(2), torch.tensor([2.0, -1.0]))
    r, s = shares(only, torch.tensor([[5.0]]))
    assert float(r) == pytest.approx(math.exp(2) / (math.exp(2) + 1))
    assert float(s) == pytest.approx(1 / (math.exp(2) + 1))


def test_a_prediction_by_hand():
    task, theta, received, gate, batch = pieces()
    z = task.features(theta, batch.x)
    p, b, w, d = (each[name] for each in (theta, received) for name in ("2.weight", "2.bias"))
    v = p.sum(0)
    context = v / v.norm() * z
    scores = torch.relu(nn.functional.layer_norm(context @ gate.weight.T + gate.bias, (16,), gate.scale, gate.shift))
    r = torch.sigmoid(scores[:, :8] - scores[:, 8:])
    expected = (r * z) @ p.T + r.mean(1, keepdim=True) * b + ((1 - r) * z) @ w.T + (1 - r).mean(1, keepdim=True) * d
    torch.testing.assert_close(_combined(task, theta, received_head(task, received), gate, z), expected)


def received_head(task, received):
    return {name: received[name] for name in task.head_names}


def test_two_equal_heads_predict_what_one_does():
    task, theta, _, gate, batch = pieces()
    outputs = _combined(task, theta, received_head(task, theta), gate, task.features(theta, batch.x))
    torch.testing.assert_close(outputs, task.logits(theta, batch.x), rtol=1e-5, atol=1e-5)


def test_a_client_that_never_took_part_deploys_the_servers_model():
    method, task = FedCP(), testing.task()
    server = method.init_server(tree.map(lambda leaf: leaf + 1, task.init()), Population(1, 1, task))
    view = method.personalize(task, method.init_client(task.init()), server, testing.batches(0))
    x = testing.federation().x[:7]
    torch.testing.assert_close(method.predict(task, view, x), task.logits(server.theta, x), rtol=1e-5, atol=1e-4)


def test_equal_samples_do_not_differ():
    a = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    everyone = torch.ones(6)
    assert float(discrepancy(a, a, everyone)) == pytest.approx(0, abs=1e-6)
    assert float(discrepancy(a, a.flip(0), everyone)) == pytest.approx(0, abs=1e-6)  # samples have no order
    assert float(discrepancy(torch.zeros(6, 5), torch.zeros(6, 5), everyone)) == 0
    slope = torch.func.grad(discrepancy)(a, a, everyone)
    torch.testing.assert_close(slope, torch.zeros(6, 5), rtol=0, atol=1e-6)


def test_the_discrepancy_by_hand():
    """Samples 0, 2 and 1, 1 on a line; the third example of each is left out."""
    a, b = torch.tensor([[0.0], [2.0], [50.0]]), torch.tensor([[1.0], [1.0], [-50.0]])
    # Squared distances of the four: within a 0 and 4, within b 0, between 1; the mean over all 16 pairs is D = 1.
    unit = (2 * 4 + 8 * 1) / 16

    def kernel(square):
        return unit / 7 * sum(math.exp(-square / (width * unit)) for width in (0.5, 1.0, 2.0))

    expected = (kernel(0) + kernel(4)) / 2 + kernel(0) - 2 * kernel(1)
    for weight in (1.0, 3.0):  # what an example weighs in the loss does not matter
        found = discrepancy(a, b, torch.tensor([1.0, weight, 0.0]))
        assert float(found) == pytest.approx(expected, rel=1e-5)


def test_differences_near_rounding_are_measured_in_units_of_the_features_size():
    """At a distance of 1e-5 of their length the kernels are straight, and what is left is ||difference of means||^2."""
    a = 100 + 1e-3 * torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = a.flip(0) + 1e-3
    found = float(discrepancy(a, b, torch.ones(8)))
    assert found == pytest.approx(float(((a.mean(0) - b.mean(0)) ** 2).sum()), rel=1e-3)


def test_the_unit_is_that_of_squared_features():
    """Features ten times as large differ a hundred times as much; a shift by e counts ||e||^2 at most."""
    a = torch.randn(64, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for length in (0.01, 0.1, 1.0, 10.0):
        shift = length * torch.ones(5, dtype=torch.float64) / 5**0.5
        found = [float(discrepancy(size * (a + shift), size * a, torch.ones(64))) for size in (1.0, 10.0)]
        assert found[1] == pytest.approx(100 * found[0], rel=1e-5)
        assert 0.1 * length**2 < found[0] < length**2


def test_a_step_by_hand():
    """One step is the gradient of the loss and the pull, by the body, the own head and the gate; W has none."""
    task, theta, received, gate, batch = pieces(mask=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
    own = {name: value for name, value in theta.items() if name in task.head_names}
    method, lr = FedCP(SGD(0.1), lam=0.7), 0.1
    rows = torch.arange(5)[None, None]
    batches = testing.batches(0)._replace(
        x=batch.x, y=batch.y, index=rows, mask=batch.mask[None, None], key=torch.zeros(1, 1, dtype=torch.int64)
    )
    client = method.init_client({**received, **own})._replace(rounds=torch.tensor(1))
    client, up, _ = method.local_update(task, client, Model(received, gate), batches)

    start = {**received, **own}
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    parts = Dense(*(value.clone().requires_grad_() for value in gate))
    x, y = batch.x[batch.mask > 0], batch.y[batch.mask > 0]
    z = torch.tanh(x @ leaves["0.weight"].T + leaves["0.bias"])
    outputs = _combined(task, leaves, received_head(task, received), parts, z)
    pull = discrepancy(z, task.features(received, x), torch.ones(4))
    (nn.functional.cross_entropy(outputs, y) + 0.7 * pull).backward()
    for name, value in leaves.items():
        torch.testing.assert_close(client.theta[name], start[name] - lr * value.grad, rtol=1e-5, atol=1e-6)
        mixed = (client.theta[name] + received[name]) / 2
        sent = mixed if name in task.head_names else client.theta[name]
        torch.testing.assert_close(up.theta[name], sent, rtol=1e-5, atol=1e-6)
    for before, after, found in zip(gate, parts, up.gate, strict=True):
        torch.testing.assert_close(found, before - lr * after.grad, rtol=1e-4, atol=1e-5)
    assert all(bool(value.grad.any()) for value in parts)


def test_the_pull_keeps_features_near_the_received_bodys():
    task, _, received, gate, _ = pieces()
    batches = testing.batches(1)

    def away(lam):
        method = FedCP(SGD(0.1), lam=lam)
        client, _, _ = method.local_update(task, method.init_client(task.init()), Model(received, gate), batches)
        x = batches.x[batches.index[batches.mask > 0]]
        return float((task.features(client.theta, x).mean(0) - task.features(received, x).mean(0)).norm())

    assert away(2.0) < 0.8 * away(0.0)


def test_the_server_averages_what_is_shared_and_never_gets_the_own_head():
    method = FedCP(SGD(0.1))
    sim = testing.simulate(method, rounds=1)
    task, down = sim.task, tree.rows(method.dispatch(sim.state.server, torch.arange(1), torch.Generator()), 0)
    clients, ups = [], []
    for i in range(2):
        client, up, _ = method.local_update(task, tree.rows(sim.state.clients, i), down, testing.batches(i))
        clients.append(client)
        ups.append(up)
    server = method.aggregate(sim.state.server, torch.arange(2), tree.stack(ups))
    n = torch.tensor([float(size) for size in testing.SIZES[:2]])
    for path, leaf in tree.pack(Model(server.theta, server.gate)).items():
        parts = [tree.pack(Model(up.theta, up.gate)).get(path) for up in ups]
        if parts[0] is not None and leaf.is_floating_point():
            torch.testing.assert_close(leaf, (n[0] * parts[0] + n[1] * parts[1]) / n.sum())
    for client, up in zip(clients, ups, strict=True):
        for name in task.head_names:
            own = client.theta[name]
            assert not any(leaf.shape == own.shape and torch.equal(leaf, own) for leaf in tree.leaves(up))
    assert not isinstance(ups[0], CountedParams)


def test_views_share_all_but_the_head():
    sim = testing.simulate(FedCP(SGD(0.1)))
    views = sim.views(2, LOOP)
    for path, rows in tree.pack(views).items():
        own = path.removeprefix("theta/") in sim.task.head_names
        assert torch.equal(rows[0], rows[1]) != own, path


def test_the_gate_begins_with_the_seed_of_the_run():
    def begun(seed):
        federation, task = testing.federation(), testing.task()
        return Simulation.start(FedCP(), task, federation, Plan(batch_size=4), 4, seed=seed).state.server.gate

    assert torch.equal(begun(0).weight, begun(0).weight)
    assert not torch.equal(begun(0).weight, begun(1).weight)


def test_numbers_can_be_predicted_too():
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), "regression")
    method = FedCP(SGD(0.05))
    server = method.init_server(task.init(), Population(1, 1, task))
    batches = testing.batches(1)._replace(y=testing.batches(1).x[:, :1].sum(1))
    _, _, first = method.local_update(task, method.init_client(task.init()), server, batches)
    for _ in range(5):
        client, up, last = method.local_update(task, method.init_client(task.init()), server, batches)
        server = method.aggregate(server, torch.arange(1), tree.stack([up]))
    assert float(last["loss"]) < float(first["loss"])
    assert method.predict(task, method.personalize(task, client, server, batches), batches.x[:3]).shape == (3, 1)
