import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.errors import CoterieError
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import PFedGP
from coterie.methods.pfedgp import Shared
from coterie.parts import class_tree
from coterie.parts import gaussian_process as gp

from .quadratic import LOOP

METHOD = PFedGP(SGD(0.1), examples=40)
POINTS = 30  # of the examples below


def data(classes=3, seed=0):
    """Examples of some of four classes, apart from each other, in the order of the pool."""
    y = torch.arange(POINTS) % classes
    return torch.randn(POINTS, 4, generator=torch.Generator().manual_seed(seed)) + 3 * torch.eye(4)[y], y


def drawn(x, y, order=None):
    index = torch.arange(len(x)) if order is None else order
    steps = index.reshape(1, 2, -1)
    return Batches(x, y, steps, torch.ones(steps.shape), torch.tensor([[11, 12]]), torch.tensor(float(len(index))))


def network():
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), num_classes=4)


def start(method, task):
    server = method.init_server(task.init(), Population(1, 1, task))
    return task.init(), server


def probabilities(method, batches, new, task=None):
    task = task or network()
    view = method.personalize(task, *start(method, task), batches)
    return method.predict(task, view, new).exp()


@pytest.mark.parametrize("classes", [1, 2, 3, 4])
def test_probabilities_add_up_to_one_whatever_classes_a_client_has(classes):
    x, y = data(classes)
    found = probabilities(METHOD, drawn(x, y), x)
    torch.testing.assert_close(found.sum(1), torch.ones(POINTS))
    # Classes without examples share 1 / (n + 1) among them.
    torch.testing.assert_close(found[:, classes:], torch.full((POINTS, 4 - classes), 1 / 31 / max(4 - classes, 1)))
    assert (found.argmax(1) == y).float().mean() > 0.8


def test_two_examples_and_none():
    x, y = data()
    two = probabilities(METHOD, drawn(x, y, torch.tensor([0, 1])), x[:3])
    assert two.argmax(1).tolist()[:2] == [0, 1]
    none = drawn(x, y).first_steps(0)
    for batches in (none, none.epoch(0, 0)):
        torch.testing.assert_close(probabilities(METHOD, batches, x[:3]), torch.full((3, 4), 0.25))


def test_the_order_of_examples_changes_nothing():
    x, y = data()
    order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(1))
    task = network()
    one, other = (METHOD.personalize(task, *start(METHOD, task), drawn(x, y, each)) for each in (None, order))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True))
    server = start(METHOD, task)[1]
    updates = [METHOD.local_update(task, task.init(), server, drawn(x, y, each)) for each in (None, order)]
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(updates[0]), tree.leaves(updates[1]), strict=True))


def test_predicting_is_a_pure_function_and_its_randomness_is_the_batchs_key():
    x, y = data()
    task, batches = network(), drawn(x, y)
    view = METHOD.personalize(task, *start(METHOD, task), batches)
    assert torch.equal(METHOD.predict(task, view, x), METHOD.predict(task, view, x))
    assert torch.equal(METHOD.predict(task, view, x[3:5]), METHOD.predict(task, view, x)[3:5]) or torch.allclose(
        METHOD.predict(task, view, x[3:5]), METHOD.predict(task, view, x)[3:5], atol=1e-6
    )
    other = METHOD.personalize(task, *start(METHOD, task), batches._replace(key=batches.key + 1))
    assert not torch.equal(view.found.a, other.found.a)
    assert float((METHOD.predict(task, view, x) - METHOD.predict(task, other, x)).abs().max()) < 0.5


def test_views_have_the_same_shapes_however_many_examples_a_client_has():
    x, y = data()
    task = network()
    views = [METHOD.personalize(task, *start(METHOD, task), drawn(x, y, torch.arange(n))) for n in (2, POINTS)]
    assert [leaf.shape for leaf in tree.leaves(views[0])] == [leaf.shape for leaf in tree.leaves(views[1])]
    assert [float(view.count) for view in views] == [2, 30]


def test_of_many_examples_some_of_every_class_are_kept():
    x, y = data()
    view = PFedGP(examples=6).personalize(network(), *start(METHOD, network()), drawn(x, y))
    assert sorted(view.leaf.tolist()) == sorted(view.tree[:3].tolist() * 2)
    assert float(view.count) == 6


def test_a_step_goes_up_the_evidence_given_omega():
    """The same gradient by autograd, of the density of the pseudo-observations."""
    x, y = data(classes=2)
    task, rate = network(), 1e-3
    method = PFedGP(SGD(rate), examples=32)
    theta, server = start(method, task)
    batches = drawn(x, y)
    new = method.local_update(task, theta, server, batches)[1]
    whole = batches.whole(32).batch()
    mean = torch.stack([task.features(theta, x[y == k]).mean(0) for k in (0, 1)] + [torch.zeros(6)] * 2)
    leaf = class_tree.balanced_tree(mean, torch.tensor([True, True, False, False]))[y]
    values = {name: theta[name].clone().requires_grad_(True) for name in server.body}
    log = server.kernel.clone().requires_grad_(True)
    z = task.outputs_and_features({**theta, **values}, whole)[1][:POINTS].double()
    gram = gp.kernel(z, z, gp.Kernel(log, gp.unit_of(z, torch.ones(POINTS))))
    tree_i = class_tree.balanced_tree(mean, torch.tensor([True, True, False, False]))
    nodes = gp.nodes_of(tree_i, leaf, torch.ones(POINTS))
    omega = gp.gibbs(gram.detach(), nodes, whole.key, method.gibbs_steps)[-1].omega
    loss = 0.0
    for d in range(2):
        if nodes.weight[d].any():
            noise = torch.diag(1 / omega[d])
            normal = torch.distributions.MultivariateNormal(torch.zeros(POINTS).double(), gram + noise)
            loss = loss - normal.log_prob(nodes.kappa[d] / omega[d]) / POINTS
    loss.backward()
    for name, value in values.items():
        torch.testing.assert_close((theta[name] - new.body[name]) / rate, value.grad, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close((server.kernel - new.kernel) / rate, log.grad, rtol=1e-2, atol=1e-3)


def test_a_client_with_one_class_learns_nothing_and_spoils_nothing():
    x, y = data(classes=1)
    task = network()
    theta, server = start(METHOD, task)
    new, up, info = METHOD.local_update(task, theta, server, drawn(x, y))
    assert all(torch.equal(new[name], value) for name, value in theta.items())
    assert torch.equal(up.kernel, server.kernel)
    assert float(info["loss"]) == 0


def test_the_server_has_the_mean_and_features_never_travel():
    sim = testing.simulate(METHOD, rounds=1)
    count = torch.tensor(testing.SIZES, dtype=torch.float32)
    head = sim.task.head_names
    body = {name: value for name, value in sim.state.clients.items() if name not in head}
    for name, value in sim.task.sent(tree.mean(body, count)).items():
        torch.testing.assert_close(sim.state.server.body[name], value)
    assert not head & sim.state.server.body.keys()
    for name in head:
        assert all(torch.equal(row, sim.task.init()[name]) for row in sim.state.clients[name])
    up = METHOD.local_update(sim.task, sim.task.init(), sim.state.server, testing.batches(1))[1]
    names = {f"body/{name}" for name in sim.task.sent(sim.task.init()).keys() - head}
    assert tree.pack(up).keys() == names | {"kernel", "count"}
    assert all(up.body[path.partition("/")[2]].shape == sim.task.init()[path.partition("/")[2]].shape for path in names)
    assert (up.kernel.shape, up.count.shape) == ((2,), ())


def test_one_client_alone_deploys_the_network_that_it_trained():
    x, y = data()
    task = network()
    theta, server = start(METHOD, task)
    client, up, _ = METHOD.local_update(task, theta, server, drawn(x, y))
    server = METHOD.aggregate(server, torch.arange(1), tree.stack([up]))
    assert isinstance(server, Shared)
    view = METHOD.personalize(task, client, server, drawn(x, y))
    assert all(torch.allclose(view.theta[name], value) for name, value in client.items())
    torch.testing.assert_close(view.z[:POINTS], task.features(client, x))


def test_without_learning_the_kernel_it_stays():
    sims = [testing.simulate(PFedGP(SGD(0.1), learn_kernel=learn), rounds=1) for learn in (True, False)]
    first = torch.tensor([PFedGP().output_scale, PFedGP().length_scale]).log()
    assert [torch.equal(sim.state.server.kernel, first) for sim in sims] == [False, True]


def test_features_of_any_size_give_the_same_predictions():
    x, y = data()
    task = Task(nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4)), num_classes=4)
    first, found = task.init(), []
    for factor in (1.0, 50.0):
        values = {**first, "0.weight": factor * first["0.weight"]}
        server = METHOD.init_server(values, Population(1, 1, task))
        found.append(METHOD.predict(task, METHOD.personalize(task, values, server, drawn(x, y)), x))
    torch.testing.assert_close(*found, atol=1e-3, rtol=1e-3)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def test_features_that_have_a_shape_are_as_good_as_flat_ones():
    """A linear head sees each of two tokens, whose outputs are averaged, or both of them as a row."""
    x, y = data()
    torch.manual_seed(0)
    body = [nn.Unflatten(1, (2, 2)), nn.Linear(2, 3), nn.Tanh()]
    nets = nn.Sequential(*body, nn.Linear(3, 4), Mean()), nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 4))
    torch.testing.assert_close(*(probabilities(METHOD, drawn(x, y), x, Task(net, num_classes=4)) for net in nets))


def test_it_learns_better_features():
    """Accuracy from few examples, of features that were trained on other clients' and of the initial ones."""
    sim = testing.simulate(PFedGP(SGD(0.1), inner_steps=4), rounds=8)
    losses = [float(r) for r in sim.evaluate(8, LOOP)["test"]["loss"]]
    first = testing.simulate(PFedGP(SGD(0.1)), rounds=0)
    before = [float(r) for r in first.evaluate(0, LOOP)["test"]["loss"]]
    assert sum(losses) < sum(before)


def test_data_without_classes_is_refused_in_words():
    task = Task(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1)), "regression")
    with pytest.raises(CoterieError, match="classes by their features"):
        METHOD.init_server(task.init(), Population(1, 1, task))
