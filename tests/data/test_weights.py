import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torch.func import grad

from coterie.core import tree
from coterie.core.batches import Batch
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import mean_gradient, mean_loss, train
from coterie.data import from_clients
from coterie.data.minibatches import Plan, draw
from coterie.data.weights import balanced
from coterie.experiment.run import run
from coterie.parts import class_moments


def skewed(sizes=((40, 10), (12, 3))):
    draw = torch.Generator().manual_seed(0)
    labels = [torch.cat([torch.zeros(a), torch.ones(b)]).long() for a, b in sizes]
    return balanced(from_clients([(torch.randn(len(y), 3, generator=draw), y) for y in labels]))


def own(federation, client):
    train_part = torch.from_numpy(federation.split(client).train)
    return federation.x[train_part], federation.y[train_part]


def one_client(federation, client, plan):
    batches = draw(federation, [client], plan, seed=0, purpose="t", round=1)
    return batches._replace(**{name: getattr(batches, name)[0] for name in ("index", "mask", "key", "count")})


def torch_weight(y):
    """scikit-learn's and everybody's 'balanced'."""
    return len(y) / (2 * torch.bincount(y).float())


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_weights_are_of_the_clients_own_training_examples():
    federation = skewed()
    for client in (0, 1):
        train_part = federation.split(client).train
        _, y = own(federation, client)
        np.testing.assert_allclose(federation.weights[train_part], torch_weight(y)[y], rtol=1e-6)
        assert float(federation.weights[train_part].mean()) == pytest.approx(1)
    y = own(federation, 0)[1].numpy()
    np.testing.assert_allclose(
        torch_weight(torch.from_numpy(y)), compute_class_weight("balanced", classes=np.array([0, 1]), y=y)
    )


@pytest.mark.parametrize("client", [0, 1])
def test_loss_and_gradient_are_those_of_torchs_weighted_cross_entropy(client):
    federation, task = skewed(), Task(model(), num_classes=2)
    x, y = own(federation, client)
    params, weight = task.init(), torch_weight(y)

    def theirs(params):
        return F.cross_entropy(task.logits(params, x), y, weight=weight)

    batches = one_client(federation, client, Plan(batch_size=len(y)))
    grads, _ = mean_gradient(task, params, batches)
    for name, value in grad(theirs)(params).items():
        torch.testing.assert_close(grads[name], value, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mean_loss(task, params, batches), theirs(params))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_training_is_torchs_with_the_same_minibatches(batch_size):
    """Minibatches of one example weigh below 1 in all; each step is normalised by its own weights, as torch does."""
    federation, task = skewed(), Task(model(), num_classes=2)
    batches = one_client(federation, 0, Plan(batch_size=batch_size))
    ours, _ = train(task, SGD(lr=0.1), task.init(), batches)
    module = task.module(task.init())
    weight = torch_weight(own(federation, 0)[1])
    step = torch.optim.SGD(module.parameters(), lr=0.1)
    for index, mask in zip(batches.index[0], batches.mask[0], strict=True):
        rows = index[mask > 0]
        step.zero_grad()
        F.cross_entropy(module(federation.x[rows]), federation.y[rows], weight=weight).backward()
        step.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_class_moments_and_centroid_distances_count_examples():
    """Class weights belong to the loss: what a client says of its classes stays what it was."""
    weighted = skewed()
    plain = from_clients([(weighted.x[:50], weighted.y[:50]), (weighted.x[50:], weighted.y[50:])])
    task = Task(model(), num_classes=2)
    said = []
    for federation in (plain, weighted):
        batches = one_client(federation, 0, Plan(batch_size=8))
        count, mean = class_moments.class_means(task, task.init(), batches)
        z = task.features(task.init(), federation.x[batches.index[0, -1]])
        last = Batch(
            federation.x[batches.index[0, -1]],
            federation.y[batches.index[0, -1]],
            batches.mask[0, -1],
            batches.key[0, -1],
        )
        distance = class_moments.centroid_distance(z, last, (mean, count > 0, torch.tensor(1.0)))
        said.append((count, mean, class_moments.class_variances(task, task.init(), batches, count, mean), distance))
    for a, b in zip(*said, strict=True):
        assert torch.equal(a, b)
    assert said[0][0].tolist() == torch.bincount(own(plain, 0)[1]).tolist()


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "scaffold", "pfedvmp", "federico"])
def test_engines_agree(method):
    federation = skewed()
    how = {
        "rounds": 2,
        "batch_size": 4,
        "compile": False,
        "workers": 1,
        "reference": False,
        "lr": 0.1,
        "optimizer": "sgd",
    }
    loop, stacked = (run(method, federation, model=model(), engine=engine, **how) for engine in ("loop", "stacked"))
    a, b = (tree.pack(result.views) for result in (loop, stacked))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_compiled_step_agrees():
    how = {"rounds": 2, "batch_size": 4, "workers": 1, "reference": False, "lr": 0.1, "optimizer": "sgd"}
    loop = run("fedavg", skewed(), model=model(), engine="loop", compile=False, **how)
    compiled = run("fedavg", skewed(), model=model(), engine="stacked", compile=True, **how)
    for ours, theirs in zip(tree.pack(loop.views).values(), tree.pack(compiled.views).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_weights_change_the_result_and_help_the_rare_class():
    sizes = ((270, 30), (180, 20))
    plain = skewed(sizes)
    how = {
        "rounds": 3,
        "engine": "loop",
        "compile": False,
        "workers": 1,
        "reference": False,
        "lr": 0.1,
        "optimizer": "sgd",
    }
    share = []
    for class_weights in (None, "balanced"):
        federation = dataclasses.replace(plain, weights=None)
        result = run("fedavg", federation, model=model(), class_weights=class_weights, **how)
        out = torch.cat([result.model(i)(federation.x[federation.split(i).train]) for i in (0, 1)])
        share.append(float((out.argmax(1) == 1).float().mean()))
    assert share[0] < 0.05
    assert share[1] > 0.2


def test_a_regression_has_no_classes_to_weigh():
    federation = from_clients([(torch.randn(9, 2), torch.randn(9))])
    with pytest.raises(ConfigError, match="class_weights"):
        run("fedavg", federation, model="linear", class_weights="balanced")


def test_padding_stays_padding():
    federation = skewed()
    batches = draw(federation, [0, 1], Plan(batch_size=8), seed=0, purpose="t", round=1)
    for row, client in enumerate((0, 1)):
        assert int((batches.mask[row] > 0).sum()) == len(federation.split(client).train)
        assert float(batches.mask[row].sum()) == pytest.approx(len(federation.split(client).train))
