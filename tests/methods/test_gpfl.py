import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie import CoterieError, testing
from coterie.core import tree
from coterie.core.batches import Batch
from coterie.core.make_task import make_task
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import train
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import GPFL
from coterie.methods.gpfl import Server, Valve, _condition, angle_loss, distance, turned, valve_of
from coterie.parts import class_moments
from coterie.parts.auxiliary import Dense

from .quadratic import LOOP

DIM, CLASSES = 8, 3


def random_valve(draw, dim=DIM):
    shapes = ((dim, dim), (dim,), (dim,), (dim,))
    return Valve(*(Dense(*(torch.randn(shape, generator=draw) for shape in shapes)) for _ in range(2)))


def begun(method=None, seed=0):
    """(task, the server as it begins, with another valve and other embeddings)."""
    draw, task = torch.Generator().manual_seed(seed), testing.task(norm=False)
    server = (method or GPFL()).init_server(task.init(), Population(4, 4, task))
    return task, server._replace(valve=random_valve(draw), embeddings=torch.randn(CLASSES, DIM, generator=draw))


def test_a_valve_of_0_is_relu():
    x = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned(x, torch.zeros(DIM), torch.zeros(DIM)), x.relu())
    task = testing.task()
    server = GPFL().init_server(task.init(), Population(4, 4, task))
    for value in valve_of(server.valve, server.embeddings[0]):
        assert not value.any()  # so it begins
    assert server.valve.gamma.weight.any()
    assert not torch.equal(server.valve.gamma.weight, server.valve.beta.weight)


def test_the_valve_by_hand():
    valve = random_valve(torch.Generator().manual_seed(1))
    c = torch.randn(DIM, generator=torch.Generator().manual_seed(2))
    for layer, found in zip(valve, valve_of(valve, c), strict=True):
        inner = torch.relu(layer.weight @ c + layer.bias)
        torch.testing.assert_close(found, F.layer_norm(inner, (DIM,), layer.scale, layer.shift), rtol=1e-4, atol=1e-5)
    assert turned(torch.tensor([[2.0, 2.0]]), torch.tensor([0.5, -2.0]), torch.tensor([-1.0, 1.0])).tolist() == [[2, 0]]


def batch_of(y, mask):
    return Batch(torch.zeros(len(y), 1), torch.tensor(y), torch.tensor(mask), torch.tensor(0))


def test_the_cosine_softmax_by_hand():
    """cosines (1, 0.6) and (0, 0.8) with two embeddings of other lengths; the third example is padding."""
    z, u = torch.tensor([[3.0, 0.0], [0.0, 2.0], [7.0, 7.0]]), torch.tensor([[5.0, 0.0], [3.0, 4.0]])
    first = -math.log(math.exp(1) / (math.exp(1) + math.exp(0.6)))
    second = -math.log(math.exp(0.8) / (math.exp(0) + math.exp(0.8)))
    found = angle_loss(z, u, batch_of([0, 1, 0], [1.0, 3.0, 0.0]))  # what an example weighs does not matter
    assert float(found) == pytest.approx((first + second) / 2, rel=1e-6)


def test_the_distance_by_hand():
    z, u = torch.tensor([[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    found = distance(z, u, batch_of([0, 1, 0], [1.0, 2.0, 0.0]))
    assert float(found) == pytest.approx((5 + 2) / 2)


def test_features_of_0_and_features_at_the_embedding_have_no_slope_of_nan():
    u = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    for term in (angle_loss, distance):
        for z in (torch.zeros(1, 2), u[:1]):
            assert bool(torch.isfinite(torch.func.grad(term)(z, u, batch_of([0], [1.0]))).all())


def by_hand(task, theta, server, batch, condition, lam, mu):
    """(the loss, the objective) of a model that has no dropout, for examples that all count."""
    z = torch.tanh(batch.x @ theta["0.weight"].T + theta["0.bias"])
    own, common = (turned(z, *valve_of(server.valve, c)) for c in (condition, begun()[1].embeddings.mean(0)))
    loss = F.cross_entropy(own @ theta["2.weight"].T + theta["2.bias"], batch.y)
    angle = F.cross_entropy(F.normalize(common) @ F.normalize(server.embeddings).T, batch.y)
    far = (common - begun()[1].embeddings[batch.y]).norm(dim=1).mean()
    squares = sum((leaf**2).sum() for leaf in tree.leaves((server.valve, server.embeddings)))
    return loss, loss + angle + lam * far + mu / 2 * squares


@pytest.mark.parametrize(("lam", "mu"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.2)])
def test_a_step_by_hand(lam, mu):
    """One step is the gradient of all four terms, by the body, the head, the valve and the embeddings."""
    method, lr = GPFL(SGD(0.1), lam=lam, mu=mu), 0.1
    (task, server), batches = begun(), testing.batches(1).first_steps(1)
    rows = batches.index[batches.mask > 0]
    batch = Batch(batches.x[rows], batches.y[rows], torch.ones(len(rows)), torch.tensor(0))
    counts = torch.bincount(batch.y, minlength=CLASSES).float()
    condition = (counts / counts.sum()) @ server.embeddings
    theta, up, info = method.local_update(task, task.init(), server, batches)

    leaves = {name: value.clone().requires_grad_() for name, value in task.init().items()}
    parts = tree.map(lambda leaf: leaf.clone().requires_grad_(), server)
    loss, value = by_hand(task, leaves, parts, batch, condition, lam, mu)
    value.backward()
    torch.testing.assert_close(info["loss"], loss.detach(), rtol=1e-5, atol=1e-6)
    for name, leaf in leaves.items():
        torch.testing.assert_close(theta[name], leaf.detach() - lr * leaf.grad, rtol=1e-4, atol=1e-5)
    for path in tree.pack((server.valve, server.embeddings)):
        before, after, found = (tree.pack((each.valve, each.embeddings))[path] for each in (server, parts, up))
        torch.testing.assert_close(found, before - lr * after.grad, rtol=1e-4, atol=1e-5)
        assert bool(after.grad.any()), path


def test_without_the_guiding_terms_a_closed_valve_leaves_fedpers_training():
    """Features that are all positive pass relu as they are. With lam = mu = 0 what is left beside the own loss is
    L_ang, whose cosines are all the same if the embeddings are: then it has no gradient."""
    module = nn.Sequential(nn.Linear(6, DIM), nn.Softplus(), nn.Linear(DIM, CLASSES))
    task, batches = Task(module, num_classes=CLASSES), testing.batches(1)
    method = GPFL(SGD(0.1), lam=0.0)
    server = method.init_server(task.init(), Population(4, 4, task))
    shut = tree.map(torch.zeros_like, server.valve)
    server = server._replace(valve=shut, embeddings=torch.ones(CLASSES, DIM))
    theta, up, info = method.local_update(task, task.init(), server, batches.first_steps(1))
    expected, loss = train(task, SGD(0.1), task.init(), batches.first_steps(1))
    torch.testing.assert_close(info["loss"], loss)
    for name, value in expected.items():
        torch.testing.assert_close(theta[name], value, rtol=1e-5, atol=1e-6)
    assert bool(up.valve.beta.shift.any())  # but the valve opens


def test_the_loss_told_is_the_mean_over_examples():
    """Minibatches of 4 and a last one of 3: a mean over minibatches would differ."""
    (task, server), batches = begun(), testing.batches(1)
    own = torch.from_numpy(testing.federation().split(1).train)
    x, y = testing.federation().x[own], testing.federation().y[own]
    info = GPFL(SGD(1e-12)).local_update(task, task.init(), server, batches)[2]
    condition = (torch.bincount(y, minlength=CLASSES) / len(y)) @ server.embeddings
    batch = Batch(x, y, torch.ones(len(y)), torch.tensor(0))
    expected = by_hand(task, task.init(), server, batch, condition, 0.0, 0.0)[0]
    torch.testing.assert_close(info["loss"], expected, rtol=1e-5, atol=1e-6)


def test_a_condition_is_the_mean_embedding_of_the_clients_examples():
    """Of several, of a single one, and of none: then all classes count alike."""
    task, method, batches = testing.task(norm=False), GPFL(), testing.batches(1)
    server = method.init_server(task.init(), Population(1, 1, task))
    order = batches.mask.flatten().cumsum(0).reshape(batches.mask.shape)
    for most in (len(batches.y), 3, 1):
        some = batches._replace(mask=batches.mask * (order <= most)).epoch(0)
        y = batches.y[some.index[some.mask > 0]]
        assert len(y) > 0
        torch.testing.assert_close(_condition(task, server, some), server.embeddings[y].mean(0))
    nobody = batches._replace(mask=0 * batches.mask)
    torch.testing.assert_close(_condition(task, server, nobody), server.embeddings.mean(0))


def test_what_a_client_deploys_has_its_own_condition():
    method, (task, server) = GPFL(), begun()
    x = testing.federation().x[:9]
    for client in (1, 2):  # the second one has no example of class 0
        sizes = class_moments.class_sizes(task, testing.batches(client).epoch(0))
        assert int(sizes.sum()) == testing.SIZES[client]
        view = method.personalize(task, task.init(), server, testing.batches(client))
        gamma, beta = valve_of(server.valve, sizes / sizes.sum() @ server.embeddings)
        torch.testing.assert_close((view.gamma, view.beta), (gamma, beta))
        z = torch.relu(task.features(task.init(), x) * (gamma + 1) + beta)
        torch.testing.assert_close(method.predict(task, view, x), task.head(task.init(), z))
    nobody = testing.batches(1).epoch(0, 0)
    view = method.personalize(task, task.init(), server, nobody)
    torch.testing.assert_close(view.gamma, valve_of(server.valve, server.embeddings.mean(0))[0])


def test_the_server_averages_what_is_shared_and_never_gets_a_head_or_a_condition():
    method, (task, server) = GPFL(SGD(0.1)), begun()
    done = [method.local_update(task, task.init(), server, testing.batches(i)) for i in range(2)]
    ups = [up for _, up, _ in done]
    new = method.aggregate(server, torch.arange(2), tree.stack(ups))
    n = [float(size) / sum(testing.SIZES[:2]) for size in testing.SIZES[:2]]
    for path, leaf in tree.pack(new).items():
        torch.testing.assert_close(leaf, sum(a * tree.pack(up)[path] for a, up in zip(n, ups, strict=True)))
    for theta, up, _ in done:
        sent = tree.pack(up)
        assert sent.keys() == tree.pack(server).keys() | {"count"}
        for name in task.head_names:
            own = theta[name]
            assert not any(leaf.shape == own.shape and torch.allclose(leaf, own) for leaf in sent.values())


def test_views_share_the_body_alone():
    sim = testing.simulate(GPFL(SGD(0.1)))
    for path, rows in tree.pack(sim.views(2, LOOP)).items():
        shared = path.startswith("theta/") and path.removeprefix("theta/") not in sim.task.head_names
        assert torch.equal(rows[0], rows[1]) == shared, path


def test_the_valve_and_the_embeddings_begin_with_the_seed_of_the_run():
    def at(seed):
        plan = Plan(batch_size=4)
        return Simulation.start(GPFL(), testing.task(), testing.federation(), plan, 4, seed=seed).state.server

    assert torch.equal(at(0).embeddings, at(0).embeddings)
    assert not torch.equal(at(0).embeddings, at(1).embeddings)
    assert not torch.equal(at(0).valve.beta.weight, at(1).valve.beta.weight)


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1)), "classification", "must be its last layer"),
        (nn.Linear(6, 1), "regression", "describes classes"),
        (nn.Sequential(nn.Conv1d(6, 3, 1), nn.Flatten()), "classification", "name one with --head"),
    ],
)
def test_what_it_cannot_work_on_is_refused(module, kind, words):
    x = torch.randn(4, 6, 1) if "name" in words else torch.randn(4, 6)
    task = make_task(module, kind, 3 if kind == "classification" else None, x)
    with pytest.raises(CoterieError, match=words):
        GPFL().init_server(task.init(), Population(2, 2, task))


def test_the_decay_draws_what_is_beside_the_model_to_0():
    task, server = begun()
    found = [
        dataclasses.replace(GPFL(SGD(0.1)), mu=mu).local_update(task, task.init(), server, testing.batches(1))[1]
        for mu in (0.0, 0.5)
    ]
    assert isinstance(server, Server)
    sizes = [float(tree.dot((up.valve, up.embeddings), (up.valve, up.embeddings))) for up in found]
    assert sizes[1] < 0.8 * sizes[0]
