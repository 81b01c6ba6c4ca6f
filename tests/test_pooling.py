"""The faster max pooling is `torch.max_pool2d`, with the gradient and the indices that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from coterie import tree
from coterie.batches import Batches
from coterie.engine.stacked import stacked
from coterie.local import SGD, train
from coterie.pooling import DECOMPOSITIONS
from coterie.scan import compiling
from coterie.task import Task

POOLS = {torch.ops.aten.max_pool2d_with_indices.default, torch.ops.aten.max_pool2d_with_indices_backward.default}


def image(channels: int = 16, last: bool = True) -> Tensor:
    """Of small whole numbers, so that many windows have several largest values."""
    x = torch.randint(-2, 3, (2, channels, 6, 12), generator=torch.Generator().manual_seed(0)).float()
    return x.contiguous(memory_format=torch.channels_last) if last else x


def both(x: Tensor, **options: Any) -> list[Tensor]:
    """Values, indices, gradient."""

    def objective(x: Tensor) -> Tensor:
        out = F.max_pool2d(x, **options)
        return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()  # every output counts differently

    return [*F.max_pool2d(x, **options, return_indices=True), grad(objective)(x)]


def traced(x: Tensor, **options: Any) -> tuple[list[Tensor], bool]:
    """The same with the decompositions, and whether they took over."""
    graph = make_fx(lambda x: both(x, **options), decomposition_table=DECOMPOSITIONS)(x)
    return graph(x), not POOLS & {node.target for node in graph.graph.nodes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, (3, 2), 6], ids=str)
def test_windows_apart_are_compared(size: Any, dtype: torch.dtype) -> None:
    x = image().to(dtype)
    got, replaced = traced(x, kernel_size=size)
    assert replaced
    for ours, theirs in zip(got, both(x, kernel_size=size), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_a_nan_is_the_largest() -> None:
    x = image()
    x[0, 3, 2:4, 5] = float("nan")
    for ours, theirs in zip(traced(x, kernel_size=2)[0], both(x, kernel_size=2), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "options"),
    [
        (image(channels=4), {"kernel_size": 2}),
        (image(last=False), {"kernel_size": 2}),
        (image()[0], {"kernel_size": 2}),
        (image(), {"kernel_size": 5}),  # 6 rows are not filled by windows of 5
        (image(), {"kernel_size": 3, "stride": 1}),
        (image(), {"kernel_size": 2, "padding": 1}),
        (image(), {"kernel_size": 2, "dilation": 2}),
    ],
    ids=["few channels", "channels first", "one image", "left over", "overlap", "padding", "dilation"],
)
def test_others_are_left_alone(x: Tensor, options: dict[str, Any]) -> None:
    got, replaced = traced(x, **options)
    assert not replaced
    for ours, theirs in zip(got, both(x, **options), strict=True):
        assert torch.equal(ours, theirs)


def test_stacked_images() -> None:
    x = torch.stack([image(), -image()])
    x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    lifted = vmap(lambda x: both(x, kernel_size=2))
    graph = make_fx(lifted, decomposition_table=DECOMPOSITIONS)(x)
    assert not POOLS & {node.target for node in graph.graph.nodes}
    for ours, theirs in zip(graph(x), lifted(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("alone", [True, False])
def test_compiled_training_of_a_network_equals_eager_training(alone: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 16, 3), nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.MaxPool2d(2), nn.ReLU()
    task = Task(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)), "classification")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 1, 14, 14, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    index, ones = torch.randint(0, 20, (2, 1, 3, 4), generator=generator), torch.ones(2, 1, 3, 4)
    data = Batches(x, y, index, ones, torch.zeros(2, 1, 3, dtype=torch.int64), torch.full((2,), 20))
    params = tree.map(lambda leaf: leaf.expand(2, *leaf.shape), task.init())

    def one(params: Any, data: Batches) -> Any:
        return train(task, SGD(0.1), params, data)

    def run() -> Any:
        if not alone:
            return stacked(one, (params,), data)
        return one(task.init(), Batches(x, y, *(leaf[0] for leaf in data[2:])))

    expected = run()
    with compiling():
        got = run()
    for ours, theirs in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
