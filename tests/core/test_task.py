"""`Task`: any module as pure functions of its parameters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad

from coterie.core import tree
from coterie.core.batches import Batch
from coterie.core.decode import Decode
from coterie.core.task import Task


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of(x: Tensor, y: Tensor, mask: list[float] | None = None) -> Batch:
    return Batch(x, y, torch.tensor(mask) if mask else torch.ones(len(x)), torch.tensor(0))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 5), norm=nn.BatchNorm1d(5), act=nn.Tanh(), head=nn.Linear(5, 3)))


class Backwards(nn.Module):
    """Registers its head first."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(5, 3)
        self.body = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x).relu())


class Tied(nn.Module):
    """Two layers with one weight; the second is the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def test_init_is_the_modules_own_state() -> None:
    module = mlp()
    task = Task(module)
    params = task.init()
    assert params.keys() == module.state_dict().keys()
    assert all(torch.equal(params[name], value) for name, value in module.state_dict().items())
    with torch.no_grad():
        module.body.weight.zero_()  # the task has a copy of its own
        params["head.bias"].zero_()
    assert task.init()["body.weight"].any()
    assert task.init()["head.bias"].any()


def test_head_is_the_last_linear_layer_or_the_named_one() -> None:
    task = Task(mlp())
    assert task.head_module == "head"
    assert task.head_names == {"head.weight", "head.bias"}
    assert task.feature_dim == 5
    named = Task(Backwards(), head="top")
    assert named.head_names == {"top.weight", "top.bias"}
    assert Task(nn.Sequential(nn.Conv2d(1, 2, 3))).head_names == frozenset()


def test_head_errors() -> None:
    with pytest.raises(ValueError, match=r"no layer 'tail' .* it has body, norm, head"):
        Task(mlp(), head="tail")
    with pytest.raises(ValueError, match="act"):
        Task(mlp(), head="act")  # has no parameters
    task = Task(nn.Sequential(nn.Conv2d(1, 2, 3)))
    with pytest.raises(ValueError, match=r"head='layer\.name'"):
        task.features(task.init(), normal(2, 1, 4, 4))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        _ = Task(mlp(), head="norm").feature_dim


@pytest.mark.parametrize(
    ("module", "head"),
    [(mlp(), None), (mlp(), "norm"), (Backwards(), "top"), (Tied(), None)],
    ids=["last", "not-last", "named", "tied"],
)
def test_head_of_features_is_logits(module: nn.Module, head: str | None) -> None:
    task = Task(module, head=head)
    params, x = tree.map(lambda v: v + 0.1 if v.is_floating_point() else v, task.init()), normal(6, 4)
    out = task.head(params, task.features(params, x))
    if head == "norm":  # layers follow this head: apply them
        out = F.linear(out.tanh(), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(out, task.logits(params, x))


def test_norm_names_go_by_module_type() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)
    )
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    affine = {f"{layer}.{part}" for layer in (1, 2, 4) for part in ("weight", "bias")}
    assert Task(module).norm_names == affine | statistics
    assert Task(Backwards()).norm_names == frozenset()
    # A prefix of a number is another layer.
    layers = [nn.Linear(2, 2) for _ in range(10)]
    assert Task(nn.Sequential(layers[0], nn.LayerNorm(2), *layers[1:])).norm_names == {"1.weight", "1.bias"}


def test_frozen_parameters_and_buffers_are_not_trained() -> None:
    module = mlp()
    module.body.weight.requires_grad_(False)
    task = Task(module)
    trained, rest = task.split(task.init())
    assert task.trainable == trained.keys() == {"body.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert rest.keys() == task.init().keys() - trained.keys()
    _, left = task.loss(task.init(), batch_of(normal(3, 4), torch.tensor([0, 1, 2])))
    assert left.keys() == rest.keys()
    assert torch.equal(left["body.weight"], rest["body.weight"])


def test_logits_are_those_of_the_module_in_evaluation_mode() -> None:
    module, x = mlp(), normal(6, 4)
    module(3 * x + 1)  # running statistics that differ from the batch's
    task = Task(module)
    torch.testing.assert_close(task.logits(task.init(), x), module.eval()(x))
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    expected = F.cross_entropy(module(x), y, reduction="none")
    torch.testing.assert_close(task.losses(task.init(), x, y), expected)


def test_buffers_are_returned_not_mutated() -> None:
    module, x, y = mlp(), normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    task = Task(module)
    params = task.init()
    before = tree.clone(params)
    loss, left = task.loss(params, batch_of(x, y))
    assert all(torch.equal(params[name], before[name]) for name in before)
    assert torch.equal(task.loss(params, batch_of(x, y))[0], loss)
    torch.testing.assert_close(loss, F.cross_entropy(module.train()(x), y))
    for name, value in left.items():  # the module has updated its own in place
        torch.testing.assert_close(value, module.state_dict()[name])
    assert left["norm.num_batches_tracked"] == 1


def test_masked_loss_is_the_loss_of_the_other_examples() -> None:
    task = Task(Backwards())
    x, y, kept = normal(5, 4), torch.tensor([0, 2, 1, 1, 0]), torch.tensor([0, 2, 3])
    masked, whole = batch_of(x, y, [1, 0, 1, 1, 0]), batch_of(x[kept], y[kept])

    def gradient(batch: Batch) -> Any:
        return grad(lambda params: task.loss(params, batch)[0])(task.init())

    torch.testing.assert_close(task.loss(task.init(), masked)[0], task.loss(task.init(), whole)[0])
    torch.testing.assert_close(gradient(masked), gradient(whole))
    assert task.loss(task.init(), batch_of(x, y, [0, 0, 0, 0, 0]))[0] == 0


@pytest.mark.parametrize(
    ("outputs", "targets"), [((4, 1), (4,)), ((4, 1), (4, 1)), ((4, 3), (4, 3)), ((4, 2, 3), (4, 2, 3))]
)
def test_regression_is_squared_error_an_example(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    last = [nn.Unflatten(1, outputs[1:])] if len(outputs) > 2 else []
    module = nn.Sequential(nn.Linear(4, outputs[1] * (outputs[2] if last else 1)), *last)
    task = Task(module, "regression")
    x, y = normal(4, 4), normal(*targets, seed=1)
    expected = ((module(x).reshape(4, -1) - y.reshape(4, -1)) ** 2).mean(1)
    torch.testing.assert_close(task.losses(task.init(), x, y), expected)
    mean, _ = task.loss(task.init(), batch_of(x, y, [1, 1, 0, 1]))
    torch.testing.assert_close(mean, expected[[0, 1, 3]].mean())


def test_regression_accepts_integer_targets_and_outputs_without_a_last_axis() -> None:
    module = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    task = Task(module, "regression")
    x, y = normal(4, 4), torch.tensor([0, 3, -1, 2])
    torch.testing.assert_close(task.losses(task.init(), x, y), (module(x) - y) ** 2)


@pytest.mark.parametrize(("width", "targets"), [(2, (4,)), (2, (4, 3)), (1, (4, 3))])
def test_regression_never_broadcasts(width: int, targets: tuple[int, ...]) -> None:
    task = Task(nn.Linear(4, width), "regression")
    with pytest.raises(ValueError, match=rf"\(4, {width}\).*\({', '.join(map(str, targets))},?\)"):
        task.losses(task.init(), normal(4, 4), normal(*targets))


def test_classification_of_sequences_averages_over_positions() -> None:
    module = nn.Conv1d(2, 3, 1)  # [batch, classes, length]
    task = Task(module)
    x, y = normal(4, 2, 5), torch.arange(20).reshape(4, 5) % 3
    expected = torch.stack([F.cross_entropy(module(x[i : i + 1]), y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(task.losses(task.init(), x, y), expected)


def test_tied_weights_stay_one_parameter() -> None:
    module, x, y = Tied(), normal(5, 4), torch.tensor([0, 1, 2, 3, 0])
    task = Task(module)
    torch.testing.assert_close(task.logits(task.init(), x), module.eval()(x))
    trained, rest = task.split(task.init())
    gradient = grad(lambda trained: task.loss({**trained, **rest}, batch_of(x, y))[0])(trained)
    F.cross_entropy(module(x), y).backward()
    torch.testing.assert_close(gradient["first.weight"], module.first.weight.grad)  # of both uses


def test_custom_loss() -> None:
    module = nn.Linear(4, 1)
    task = Task(module, "regression", loss=lambda out, y: (out.squeeze(-1) - y).abs())
    x, y = normal(4, 4), normal(4, seed=1)
    expected = (module(x).squeeze(-1) - y).abs()
    torch.testing.assert_close(task.losses(task.init(), x, y), expected)
    torch.testing.assert_close(task.loss(task.init(), batch_of(x, y, [0, 1, 1, 0]))[0], expected[1:3].mean())


@pytest.mark.parametrize(
    "loss", [nn.L1Loss(), lambda out, y: (out - y[:, None]).abs()], ids=["a mean", "a column, [batch, 1]"]
)
def test_custom_loss_must_give_one_number_an_example(loss: Any) -> None:
    """Else the mask would broadcast against it: padding would count, or losses be summed instead of averaged."""
    task = Task(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0 if isinstance(loss, nn.L1Loss) else 1)), loss=loss)
    with pytest.raises(ValueError, match="loss"):
        task.loss(task.init(), batch_of(normal(4, 4), normal(4, seed=1), [0, 1, 1, 0]))


def test_task_errors() -> None:
    with pytest.raises(ValueError, match="not 'ranking'"):
        Task(mlp(), "ranking")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no trainable parameter"):
        Task(mlp().requires_grad_(False))
    with pytest.raises(ValueError, match="lazy"):
        Task(nn.Sequential(nn.LazyLinear(3)))


def test_tasks_are_equal_where_only_the_values_differ() -> None:
    def task(*sizes: int, act: Any = nn.ReLU, **options: Any) -> Task:
        layers = [nn.Linear(sizes[0], sizes[1]), act(), nn.BatchNorm1d(sizes[1]), nn.Linear(sizes[1], sizes[2])]
        return Task(nn.Sequential(*layers), num_classes=2, **options)

    one, other = task(4, 3, 2), task(4, 3, 2)
    assert one == other
    assert hash(one) == hash(other)
    assert not torch.equal(one.init()["0.weight"], other.init()["0.weight"])
    for different in (
        task(4, 3, 2, act=nn.Tanh),
        task(4, 5, 2),
        task(4, 3, 2, loss=lambda out, y: out.sum(1)),
        task(4, 3, 2, decode=Decode()),
        one.beginning(one.init(), only=frozenset({"0.weight"})),
    ):
        assert one != different


def test_a_module_with_something_of_its_own_equals_no_other() -> None:
    class Own(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.own = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.own)

    one = Task(Own())
    assert one == one
    assert one != Task(Own())


def test_tasks_that_round_differently_differ():
    module = nn.Linear(2, 2)
    assert Task(module) == Task(module)
    assert Task(module, bf16=True) != Task(module)
