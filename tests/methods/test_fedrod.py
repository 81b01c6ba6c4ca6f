import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie import CoterieError, testing
from coterie.core.make_task import make_task
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import FedROD

from .quadratic import LOOP


def test_a_personal_head_at_0_deploys_the_generic_model():
    method, task = FedROD(), testing.task()
    view = method.personalize(task, method.init_client(task.init()), task.init(), testing.batches(0))
    assert all(torch.equal(value, task.init()[name]) for name, value in view.items())


def test_a_round_by_hand():
    """Written out with autograd on whole tensors: the generic and the personal loss have separate gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        task = Task(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), num_classes=3)
    method, batches, lr = FedROD(SGD(0.1)), testing.batches(2), 0.1  # this client has no example of class 0
    client, up, _ = method.local_update(task, method.init_client(task.init()), task.init(), batches)
    labels = batches.y[batches.index[0][batches.mask[0] > 0]]
    prior = torch.tensor([max(float((labels == k).sum()), 0.1) for k in range(3)]).log()
    assert float(prior[0]) == float(torch.tensor(0.1).log())
    w = task.init()
    p = {name: torch.zeros_like(w[name]) for name in ("2.weight", "2.bias")}
    for rows, kept in zip(batches.index.flatten(0, 1), batches.mask.flatten(0, 1) > 0, strict=True):
        if not kept.any():
            continue
        x, y = batches.x[rows[kept]], batches.y[rows[kept]]
        w, p = ({name: value.clone().requires_grad_() for name, value in each.items()} for each in (w, p))
        z = torch.tanh(x @ w["0.weight"].T + w["0.bias"])
        generic = z @ w["2.weight"].T + w["2.bias"]
        personal = generic.detach() + z.detach() @ p["2.weight"].T + p["2.bias"]
        (F.cross_entropy(generic + prior, y) + F.cross_entropy(personal, y)).backward()
        w, p = ({name: value.detach() - lr * value.grad for name, value in each.items()} for each in (w, p))
    for name, value in w.items():
        torch.testing.assert_close(up.params[name], value, rtol=1e-5, atol=1e-6)
    for name, value in p.items():
        torch.testing.assert_close(client[name], value, rtol=1e-5, atol=1e-6)
    view = method.personalize(task, client, up.params, batches)
    torch.testing.assert_close(view["2.weight"], w["2.weight"] + p["2.weight"], rtol=1e-5, atol=1e-6)
    assert torch.equal(view["0.weight"], up.params["0.weight"])


def test_what_is_deployed_is_personal():
    sim = testing.simulate(FedROD(SGD(0.1)))
    views = sim.views(2, LOOP)
    for name, value in views.items():
        assert torch.equal(value[0], value[1]) == (name not in sim.task.head_names), name


def test_frozen_parameters_of_the_head_stay():
    """With the bias frozen, the personal head has none, as if it were fixed at 0."""
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    module[1].bias.requires_grad_(False)
    task, method, batches = Task(module, num_classes=3), FedROD(SGD(0.1)), testing.batches(0).first_steps(1)
    client, up, info = method.local_update(task, method.init_client(task.init()), task.init(), batches)
    assert not client["1.bias"].any()
    assert client["1.weight"].any()
    assert "1.bias" not in up.params
    rows = batches.index[batches.mask > 0]
    plain = F.cross_entropy(task.logits(task.init(), batches.x[rows]), batches.y[rows])
    torch.testing.assert_close(info["loss"], plain)  # P_i = 0 adds nothing


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1)), "classification", "must be its last layer"),
        (nn.Linear(6, 1), "regression", "describes classes"),
        (nn.Sequential(nn.Conv1d(6, 3, 1), nn.Flatten()), "classification", "no linear layer"),
    ],
)
def test_what_cannot_have_two_heads_is_refused(module, kind, words):
    x = torch.randn(4, 6, 1) if isinstance(module, nn.Sequential) and words == "no linear layer" else torch.randn(4, 6)
    task = make_task(module, kind, 3 if kind == "classification" else None, x)
    with pytest.raises(CoterieError, match=words):
        FedROD().init_server(task.init(), Population(2, 2, task))


def test_a_last_head_is_accepted():
    task = make_task(testing.module(), "classification", 3, testing.federation().x)
    assert task.head_is_last
    assert FedROD().init_server(task.init(), Population(2, 2, task)).keys() == task.init().keys()
