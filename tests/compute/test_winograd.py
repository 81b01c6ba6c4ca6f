"""Convolutions by Winograd's way are `torch.conv2d`, with its gradients, and nearly as exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.compute import winograd
from coterie.compute.compiled import compiling
from coterie.core.batches import Batches
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.core.training import train
from tests.marks import compiles

LAST = torch.channels_last


def data(channels: int = 16, size: tuple[int, int] = (12, 8), last: bool = True, kernel: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, channels, *size), (32, channels, kernel, kernel), (32,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return [x.relu().contiguous(memory_format=LAST if last else torch.contiguous_format), weight, bias]


def both(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Outputs, and the gradients at x, weight and bias."""
    out, back = vjp(lambda *given: F.conv2d(*given, **options), *inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)  # every output counts differently
    return [out, *back(weights)]


def traced(inputs: list[Tensor], **options: Any) -> Any:
    trace = make_fx(lambda *given: both(list(given), options), winograd.DECOMPOSITIONS, tracing_mode="fake")
    return trace(*inputs)  # of shapes only, so that nothing is compiled


def ours(graph: Any) -> bool:
    return any(getattr(node.target, "namespace", "") == "coterie" for node in graph.graph.nodes)


@pytest.mark.parametrize("size", [(12, 12), (8, 16), (20, 8)], ids=str)
def test_equals_conv2d_with_its_gradients(size: tuple[int, int]) -> None:
    x, weight, _ = data(size=size)
    out, at_x, at_weight = both([x.double(), weight.double()], {})
    points = winograd.points(x, weight)
    grad = torch.linspace(-1, 1, out.numel()).reshape(out.shape).contiguous(memory_format=LAST)
    got = winograd.products(*points), *winograd.gradients(grad, *points)
    for ours, exact in zip(got, (out, at_x, at_weight), strict=True):
        assert ours.shape == exact.shape
        assert float((ours - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        (data(channels=3), {}),
        (data(last=False), {}),
        (data(kernel=3), {}),
        (data(size=(10, 12)), {}),
        ([value.bfloat16() for value in data()], {}),
        (data(), {"stride": 2}),
        (data(), {"padding": 2}),
        (data(size=(16, 16)), {"dilation": 2}),
    ],
    ids=["few channels", "channels first", "3 x 3", "left over", "bfloat16", "stride", "padding", "dilation"],
)
def test_others_are_left_alone(inputs: list[Tensor], options: dict[str, Any]) -> None:
    graph = traced(inputs, **options)
    assert not ours(graph)
    for got, expected in zip(graph(*inputs), both(inputs, options), strict=True):
        assert torch.equal(got, expected)


@compiles
@pytest.mark.parametrize(("threads", "first", "shape"), [(1, 0, (1, 20, 20)), (2, 3, (16, 8, 8))])
def test_compiled_training_of_a_network_equals_eager_training(
    threads: int, first: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which C++ repeats, convolutions and all, unless it has threads to share the work (then only the last half)."""
    monkeypatch.setattr("coterie.compute.compiled._compiled", compiled := {})
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 5), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()
    task = Task(nn.Sequential(*layers[first:], nn.Flatten(), nn.Linear(32 * 4, 3)), "classification")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, *shape, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    index = torch.randint(0, 20, (1, 3, 4), generator=generator)
    batches = Batches(x, y, index, torch.ones(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64), torch.tensor(20))
    expected = train(task, SGD(0.1), task.init(), batches)[0]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with compiling():
            got = train(task, SGD(0.1), task.init(), batches)[0]
    finally:
        torch.set_num_threads(before)
    (step,) = compiled.values()
    assert step is not None
    assert (step.replayed is not None) == (threads == 1)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)
