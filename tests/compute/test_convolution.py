"""The im2col convolution is `torch.conv2d`, whichever calls it takes over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from coterie.compute.convolution import FewChannelConvolution


def data(channels: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(channels)
    return tuple(torch.randn(shape, generator=generator) for shape in ((2, channels, 9, 10), (4, channels, 3, 5), (4,)))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"padding": (2, 0)},
        {"padding": (1,)},
        {"padding": "same"},
        {"padding": "valid"},
        {"bias": None},
        {"stride": 2, "padding": 1},
        {"stride": (1, 2)},
        {"dilation": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("alone", [True, False])
def test_equals_conv2d_with_its_gradients(channels: int, options: dict[str, Any], alone: bool) -> None:
    def run() -> list[Tensor]:
        inputs = [value.requires_grad_() for value in data(channels)]
        used = inputs if "bias" not in options else inputs[:2]
        out = F.conv2d(*inputs[:2], **{"bias": inputs[2], **options})
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)  # every output counts differently
        return [out, *torch.autograd.grad((out * weights).sum(), used)]

    expected = run()
    with FewChannelConvolution(alone):
        got = run()
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_takes_arguments_by_name() -> None:
    x, weight, bias = data(1)
    with FewChannelConvolution(alone=False):
        got = F.conv2d(input=x, weight=weight, bias=bias)
    torch.testing.assert_close(got, F.conv2d(x, weight, bias), rtol=1e-5, atol=1e-5)


class Convolutions(TorchDispatchMode):
    """Counts PyTorch's own convolutions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("module", "replaced"),
    [
        (nn.Conv2d(1, 2, 3), True),
        (nn.Conv2d(3, 2, 3, padding=1), True),
        (nn.Conv2d(3, 2, 3, stride=2), False),
        (nn.Conv2d(3, 3, 3, groups=3), False),
        (nn.Conv2d(4, 2, 3), False),
    ],
    ids=str,
)
def test_only_plain_calls_on_few_channels_are_replaced(module: nn.Conv2d, replaced: bool) -> None:
    with Convolutions() as plain, FewChannelConvolution(alone=False):
        module(torch.ones(1, module.in_channels, 5, 5))
    assert plain.count == (0 if replaced else 1)


def test_other_operations_are_left_alone() -> None:
    x = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    pooled = F.max_pool2d(x.relu(), 2)
    with FewChannelConvolution(alone=False):
        assert torch.equal(F.max_pool2d(x.relu(), 2), pooled)
