"""Products in faster forms are the same products, and what is changed in place is nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coterie import tree
from coterie.batches import Batch, Batches
from coterie.engine.stacked import stacked
from coterie.local import SGD, AdamW, quadratic, train
from coterie.products import faster_products
from coterie.scan import _compiled, compiling, scan
from coterie.task import Task

CLIENTS, STEPS, SIZE = 3, 4, 6


def batches(features: int) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, features, generator=generator)
    y = torch.randint(0, 3, (40,), generator=generator)
    index = torch.randint(0, 40, (CLIENTS, 1, STEPS, SIZE), generator=generator)
    mask = torch.ones(CLIENTS, 1, STEPS, SIZE)
    mask[1, :, 2:] = 0  # one client is used up before the others
    return Batches(x, y, index, mask, torch.zeros(CLIENTS, 1, STEPS, dtype=torch.int64), torch.full((CLIENTS,), 40))


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.1),
        AdamW(0.01, eps=1e-3),  # so that a gradient that is all rounding is not divided by itself
        pytest.param(SGD(0.1, momentum=0.9), marks=pytest.mark.slow),
        pytest.param(SGD(0.1, weight_decay=0.1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_training_equals_eager_training(optimizer: Any) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())
    before = tree.clone(params)
    data = batches(200)

    def one(params: Any, data: Batches) -> Any:
        return train(task, optimizer, params, data)

    expected = stacked(one, (params,), data)
    with compiling():
        got = stacked(one, (params,), data)
        again = stacked(one, (params,), data)
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
    assert all(bool((a == b).all()) for a, b in zip(tree.leaves(got), tree.leaves(again), strict=True))
    assert all(bool((a == b).all()) for a, b in zip(tree.leaves(params), tree.leaves(before), strict=True))
    if optimizer == SGD(0.1):  # the large matrix is changed in place, the head is too small for that
        assert [run.in_place for run in _compiled.values() if run is not None and run.descents][-1] == {0}


def test_the_value_before_the_step_survives_it() -> None:
    """A carry may keep the last value beside the new one: the new one must then not be written over it."""

    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        weight, _ = carry
        return weight - 0.1 * (torch.ones(128, 6) @ batch.x), weight

    def one(start: Tensor, data: Batches) -> Any:
        return scan(step, (start, start), (), data)

    start, data = torch.zeros(CLIENTS, 128, 200), batches(200)
    expected = stacked(one, (start,), data)
    with compiling():
        got = stacked(one, (start,), data)
    assert not bool((expected[0] == expected[1]).all())
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_a_factor_that_is_itself_carried_is_not_changed_first() -> None:
    def step(carry: Any, aux: Any, batch: Batch) -> Any:
        a, b = carry
        return a - 0.01 * (b @ b), b - 0.01 * (a @ a)

    def one(start: Any, data: Batches) -> Any:
        return scan(step, start, (), data)

    generator = torch.Generator().manual_seed(1)
    start = tuple(torch.randn(CLIENTS, 130, 130, generator=generator) / 10 for _ in range(2))
    expected = stacked(one, (start,), batches(5))
    with compiling():
        got = stacked(one, (start,), batches(5))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def test_numbers_are_divided_by_multiplying() -> None:
    def step(x: Tensor, y: Tensor, whole: Tensor) -> list[Tensor]:
        return [x / 255, x / y, whole / 3, x / 0.0]

    given = torch.tensor([1.0, 254.0]), torch.tensor([3.0, 7.0]), torch.tensor([2, 5])
    graph, _ = faster_products(make_fx(step)(*given), 0)
    divisions = [node for node in graph.graph.nodes if node.target is torch.ops.aten.div.Tensor]
    assert len(divisions) == 3  # by a tensor, of whole numbers, and by nothing
    for ours, theirs in zip(graph(*given), step(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)


def test_a_penalised_step_is_taken_in_place() -> None:
    def step(weight: Tensor, centre: Tensor, d: Tensor, x: Tensor) -> list[Tensor]:
        grad = torch.bmm(d.transpose(1, 2), x) + 0.5 * (weight - centre)
        return [weight - 0.1 * grad]

    shapes = ((2, 100, 256), (2, 100, 256), (2, 10, 100), (2, 10, 256))
    given = [torch.randn(*shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    expected = step(*given)[0]
    graph, (descent,) = faster_products(make_fx(step)(*given), 1)
    others = [value.clone() for value in given[1:]]
    got = descent.apply(given, graph(*given))
    assert got is given[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, given[1:], others))


def test_penalised_training_leaves_where_it_began_alone() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 3)), "classification")
    params = tree.map(lambda leaf: leaf + 0.01 * torch.randn(CLIENTS, *leaf.shape), task.init())
    before, data, anchor = tree.clone(params), batches(200), (task.init(), torch.tensor(2.0))

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(0.1), params, data, quadratic, anchor)[0]

    expected = stacked(one, (params,), data)
    with compiling():
        got = stacked(one, (params,), data)
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(before)))
    assert [run.in_place for run in _compiled.values() if run is not None and run.descents][-1] == {0}


def targets(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_steps_between_begin_where_they_are() -> None:
    """As those of a proximal step on one minibatch do: what they end at is carried, what they begin at is not."""

    def step(_: Tensor, begin: Tensor, centre: Tensor, d: Tensor, x: Tensor) -> list[Tensor]:
        weight = begin - 0.2 * torch.mm(d.t(), x)
        for _ in range(3):
            weight = weight - 0.1 * (torch.mm(d.t(), x * weight.mean()) + 0.5 * (1.0 * weight - 1.0 * centre))
        return [weight - 0.1 * (torch.mm(d.t(), x) + weight.exp())]

    shapes = ((100, 256), (100, 256), (100, 256), (10, 100), (10, 256))
    given = [torch.randn(*shape, generator=torch.Generator().manual_seed(k)) for k, shape in enumerate(shapes)]
    graph, descents = faster_products(make_fx(step)(*given), 1)
    names = targets(graph)
    assert not descents
    assert [names.count(f"{name}.default") for name in ("aten.addmm", "coterie.towards", "aten.mm")] == [1, 3, 1]
    torch.testing.assert_close(graph(*given)[0], step(*given)[0], rtol=1e-4, atol=1e-4)


def test_what_is_written_twice_is_computed_once() -> None:
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            (x @ y).exp() + (x @ y).exp().sum(),
            (x + y) * 2,
            (x + y).t() * 2,
            (x - y).view(2, 2),
            (x - y).view(2, 2),
        ]

    given = torch.randn(2, 2), torch.randn(2, 2)
    graph, _ = faster_products(make_fx(step)(*given), 0)
    names = targets(graph)
    assert [names.count(f"aten.{name}") for name in ("mm.default", "exp.default", "add.Tensor")] == [1, 1, 2]
    assert names.count("aten.sub.Tensor") == 2  # results do not share memory
    assert all(map(torch.equal, graph(*given), step(*given)))


def test_what_is_changed_in_place_is_not_shared() -> None:
    def step(x: Tensor) -> list[Tensor]:
        one, other = x.clone(), x.clone()
        one.add_(1.0)
        return [one * 2, other * 3]

    given = torch.randn(2, 2)
    graph, _ = faster_products(make_fx(step)(given), 0)
    assert all(map(torch.equal, graph(given), step(given)))
