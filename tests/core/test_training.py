"""What clients do: the optimisers are PyTorch's, penalised training finds the known minimiser, losses are means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Optimizer, RMSprop
from coterie.core.task import Task
from coterie.core.training import envelope_step, mean_loss, minimise, quadratic_penalty, train
from coterie.core.tree import Params
from coterie.core.wrapped import with_lr, without_lr


def batches_of(x: Tensor, y: Tensor, index: Tensor, mask: Tensor | None = None) -> Batches:
    """`index` and `mask` are [steps, batch]."""
    mask = torch.ones(index.shape) if mask is None else mask
    keys = torch.arange(len(index))
    return Batches(x, y, index[None], mask[None], keys[None], torch.tensor(float(len(x))))


def classes(steps: int = 20) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    return batches_of(x, y, torch.randint(0, 40, (steps, 8), generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias before the normalisation: its gradient would be rounding noise, which Adam makes as large as any other.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"lr": 0.02}),
        (Adam, torch.optim.Adam, {"lr": 0.02, "weight_decay": 0.1}),
        (Adam, torch.optim.Adam, {"lr": 0.02, "beta1": 0.5, "beta2": 0.9, "eps": 1e-3}),
        (Adam, torch.optim.Adam, {"lr": 0.02, "beta1": 0.0, "beta2": 0.9, "eps": 1e-3}),
        (AdamW, torch.optim.AdamW, {"lr": 0.02}),
        (AdamW, torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5}),
        (RMSprop, torch.optim.RMSprop, {"lr": 0.02, "eps": 1e-4}),
        (RMSprop, torch.optim.RMSprop, {"lr": 0.02, "beta2": 0.8, "momentum": 0.5, "weight_decay": 0.1, "eps": 1e-4}),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_optimisers_take_the_steps_of_pytorch(
    ours: type[Optimizer], theirs: type[torch.optim.Optimizer], options: dict[str, float], steps: int
) -> None:
    data, module = classes(steps), network()
    task = Task(module)
    params, loss = train(task, ours(**options), task.init(), data)

    betas: dict[str, Any] = {"betas": (options["beta1"], options["beta2"])} if "beta1" in options else {}
    if ours is RMSprop:
        betas = {"alpha": options.get("beta2", 0.99)}
    plain = {name: value for name, value in options.items() if not name.startswith("beta")}
    optimizer: Any = theirs(module.train().parameters(), **plain, **betas)
    losses = []
    for index in data.index[0]:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(module(data.x[index]), data.y[index]))
        losses[-1].backward()
        optimizer.step()

    for name, value in module.state_dict().items():  # parameters and running statistics
        torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, torch.stack(losses).mean().detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.1), AdamW(lr=0.1)])
def test_first_step_of_adam_is_lr_times_the_sign(optimizer: Optimizer) -> None:
    # Both moments are corrected for their start at 0, so m / sqrt(v) = g / |g|, here far above eps.
    params, grads = {"w": torch.zeros(4)}, {"w": torch.tensor([0.5, -2.0, 30.0, -7.0])}
    new, _ = optimizer.update(grads, optimizer.init(params), params)
    torch.testing.assert_close(new["w"], -0.1 * grads["w"].sign(), rtol=1e-6, atol=0)


def linear_regression() -> tuple[Task, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(12, 3, generator=generator), torch.randn(12, generator=generator)
    torch.manual_seed(0)
    return Task(nn.Linear(3, 1), "regression"), x, x @ torch.tensor([1.0, -2.0, 0.5]) + 3 + noise


@pytest.mark.parametrize("strength", [0.0, 0.7, 5.0])
def test_penalised_training_finds_the_closed_form_minimiser(strength: float) -> None:
    # mean_j (a_j . theta - y_j)^2 + s/2 ||theta - c||^2 is smallest at (2/n A'A + s I) theta = 2/n A'y + s c.
    task, x, y = linear_regression()
    centre = {"weight": torch.tensor([[4.0, 4.0, 4.0]]), "bias": torch.tensor([-4.0])}
    n = 10  # the other two examples are padding
    design = torch.cat([x, torch.ones(12, 1)], 1)[:n].double()
    system = 2 / n * design.T @ design + strength * torch.eye(4)
    c = torch.cat([centre["weight"][0], centre["bias"]]).double()
    expected = torch.linalg.solve(system, 2 / n * design.T @ y[:n].double() + strength * c)

    every = torch.arange(12).expand(400, 12)
    data = batches_of(x, y, every, (every < n).float())
    theta, _ = train(task, SGD(lr=0.15), task.init(), data, quadratic_penalty, (centre, torch.tensor(strength)))
    torch.testing.assert_close(torch.cat([theta["weight"][0], theta["bias"]]).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_penalty_sees_the_parameters_and_then_the_anchor_with_and_without_a_penalty_of_features() -> None:
    task, x, y = linear_regression()
    data = batches_of(x, y, torch.arange(12).reshape(3, 4), torch.ones(3, 4))
    anchor = tree.map(lambda leaf: leaf + 1, task.init())

    def penalty(params: Params, anchor: Any) -> Tensor:  # not symmetric: it pulls to half of the anchor
        return tree.sqdist(params, tree.scale(anchor, 0.5))

    def nothing(features: Tensor, batch: Batch, anchor: Any) -> Tensor:
        return torch.zeros(())

    plain, _ = train(task, SGD(0.1), task.init(), data, penalty, anchor)
    beside, _ = train(task, SGD(0.1), task.init(), data, penalty, anchor, feature_penalty=nothing)
    without, _ = train(task, SGD(0.1), task.init(), data)
    torch.testing.assert_close(beside, plain)
    first = task.init()
    expected = tree.map(lambda p, a: p - 0.1 * 2 * (p - a / 2), first, anchor)  # the penalty's part of the first step
    one, _ = train(task, SGD(0.1), first, data.first_steps(1), penalty, anchor)
    alone, _ = train(task, SGD(0.1), first, data.first_steps(1))
    torch.testing.assert_close(tree.map(lambda a, b, p: a - b + p, one, alone, first), expected)
    assert not torch.allclose(plain["weight"], without["weight"])


def test_quadratic_has_its_value_and_gradient() -> None:
    params, centre = {"w": torch.tensor([3.0, 1.0])}, {"other": torch.ones(1), "w": torch.tensor([1.0, 2.0])}
    gradient, value = torch.func.grad_and_value(quadratic_penalty)(params, (centre, torch.tensor(0.5)))
    assert value == 0.25 * (4 + 1)
    assert torch.equal(gradient["w"], 0.5 * torch.tensor([2.0, -1.0]))


def test_train_reports_the_data_loss_of_the_examples_it_saw() -> None:
    # Without movement this is the mean over examples, not over minibatches, and without the penalty.
    task, x, y = linear_regression()
    index = torch.arange(12).reshape(3, 4)
    mask = torch.ones(3, 4)
    mask[2, 1:] = 0
    data = batches_of(x, y, index, mask)
    anchor = (tree.map(torch.ones_like, task.init()), torch.tensor(9.0))
    params, loss = train(task, SGD(lr=0.0), task.init(), data, quadratic_penalty, anchor)
    torch.testing.assert_close(params, task.init(), rtol=0, atol=0)
    torch.testing.assert_close(loss, task.losses(task.init(), x, y)[:9].mean())
    torch.testing.assert_close(mean_loss(task, task.init(), data), loss)


def test_train_keeps_names_and_order_and_frozen_values_and_its_inputs() -> None:
    module = network()
    module[0].weight.requires_grad_(False)
    task = Task(module)
    start = dict(reversed(task.init().items()))
    before = tree.clone(start)
    params, _ = train(task, Adam(lr=0.1), start, classes())
    assert list(params) == list(start)
    torch.testing.assert_close(start, before, rtol=0, atol=0)
    assert torch.equal(params["0.weight"], start["0.weight"])
    moved = {name for name in params if not torch.equal(params[name], start[name])}
    assert moved == params.keys() - {"0.weight"}
    again, _ = train(task, Adam(lr=0.1), task.init(), classes())
    torch.testing.assert_close(again, params, rtol=0, atol=0)


def test_without_examples_nothing_happens() -> None:
    task, data = Task(network()), classes(3)
    for nothing in (data._replace(mask=torch.zeros_like(data.mask)), data.epoch(0, 0)):
        params, loss = train(task, SGD(lr=0.1, weight_decay=0.1), task.init(), nothing)
        torch.testing.assert_close(params, task.init(), rtol=0, atol=0)
        assert loss == 0
        assert mean_loss(task, params, nothing) == 0


def test_mean_loss_is_in_evaluation_mode() -> None:
    module, data = network(), classes()
    module(data.x * 2 + 1)  # running statistics unlike any batch's
    task = Task(module)
    seen = data.index.flatten()
    expected = F.cross_entropy(module.eval()(data.x[seen]), data.y[seen])
    torch.testing.assert_close(mean_loss(task, task.init(), data), expected.detach())


class Both(NamedTuple):
    theta: Params
    beside: tuple[Tensor, Tensor]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(SGD(0.1, momentum=0.9), torch.optim.SGD), (Adam(0.02), torch.optim.Adam)]
)
def test_an_objective_trains_a_model_and_what_is_beside_it(
    ours: Optimizer, theirs: type[torch.optim.Optimizer]
) -> None:
    """A tree of a model and two more tensors, with BatchNorm's statistics as the rest: PyTorch's steps."""
    data, module = classes(), network()
    task = Task(module)
    turn, shift, anchor = torch.eye(3) + 0.1, torch.tensor([0.1, 0.2, 0.3]), torch.ones(3)

    def objective(both: Both, rest: Params, batch: Batch, anchor: Tensor) -> tuple[Tensor, tuple[Tensor, Params]]:
        outputs, _, rest = task.outputs_and_features({**rest, **both.theta}, batch)
        turn, shift = both.beside
        loss = F.cross_entropy(outputs @ turn + shift, batch.y)
        return loss + ((shift - anchor) ** 2).sum(), (loss, rest)

    trained, rest = task.split(task.init())
    both, rest, told = minimise(ours, objective, Both(trained, (turn, shift)), rest, data, anchor)

    free = [nn.Parameter(turn.clone()), nn.Parameter(shift.clone())]
    options = {"momentum": 0.9} if isinstance(ours, SGD) else {}
    optimizer: Any = theirs([*module.train().parameters(), *free], lr=ours.lr, **options)
    losses = []
    for index in data.index[0]:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(module(data.x[index]) @ free[0] + free[1], data.y[index]))
        (losses[-1] + ((free[1] - anchor) ** 2).sum()).backward()
        optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close({**both.theta, **rest}[name], value, rtol=1e-5, atol=1e-5)
    for found, expected in zip(both.beside, free, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(told, torch.stack(losses).mean().detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lr", [1e-3, 0.01, 0.05, 0.5])
def test_the_envelope_step_moves_w_by_one_plain_step(lr: float) -> None:
    """f(theta) = g . theta: K steps on it and the pull end at w - (1 - (1 - lr lam)^K) / lam g, in closed form."""
    lam, steps, g = 15.0, 5, 0.7
    theta = w = 0.3
    for _ in range(steps):
        theta -= lr * (g + lam * (theta - w))
    eta = envelope_step(SGD(lr), lam, steps)
    if lr * lam < 1:
        assert eta * lam * (w - theta) == pytest.approx(lr * g)
    else:
        assert eta == 1 / lam  # w becomes theta and does not overshoot
    assert eta <= 1 / lam + 1e-12
    assert envelope_step(Adam(lr), lam, steps) == 1 / (steps * lam)


def test_an_optimiser_is_found_by_its_name_in_pytorch() -> None:
    for name, theirs in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)):
        assert OPTIMIZERS[name].__name__ == theirs.__name__


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1), AdamW(lr=0.1)])
def test_an_optimizer_may_have_nothing_to_train(optimizer):
    assert optimizer.update({}, optimizer.init({}), {})[0] == {}


@pytest.mark.parametrize("optimizer", [SGD(0.3, momentum=0.5), Adam(0.02), AdamW(0.04), RMSprop(0.05)])
def test_runs_that_differ_in_the_step_size_only_share_their_step(optimizer):
    """The step size is taken out as a number of the parameters' type, and put back inside the step."""
    params = {"w": torch.zeros(2, dtype=torch.float64)}
    taker, lr = without_lr(optimizer, params)
    assert taker == without_lr(replace(optimizer, lr=0.7), params)[0] != optimizer
    assert isinstance(lr, Tensor)
    assert (lr.dtype, lr.item()) == (torch.float64, optimizer.lr)
    back = with_lr(taker, lr)
    assert replace(back, lr=float(lr)) == optimizer


def test_an_optimiser_of_the_users_own_keeps_its_step_size():
    class Own(SGD):
        pass

    assert without_lr(Own(0.3), {"w": torch.zeros(2)}) == (Own(0.3), ())
    assert without_lr(SGD(0.3), {}) == (SGD(0.3), ())
    assert with_lr(Own(0.3), ()) == Own(0.3)
