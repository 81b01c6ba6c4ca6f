"""Faster layers where the model of one client is evaluated: nothing is lifted over clients or differentiated.

- Images with few channels, and channels last, as in `coterie.compute.convolution`.
- A linear layer with few outputs, as most heads are: x W^T with many rows in x and few in W takes the CPU about twice
  as long as (W x^T)^T (82 against 43 microseconds for 154 rows of 784 numbers and 10 outputs, each measured alone).

Results agree to float tolerance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coterie.compute import torch_private
from coterie.compute.availability import asked_for_plain
from coterie.compute.convolution import conv2d

MAX_OUTPUTS = 16  # with 20 the gain is a fifth, with 40 there is none
MIN_INPUTS = 256  # features that are summed over
MIN_ROWS = 64
MIN_ONEDNN_PRODUCTS = 2**24  # of two numbers, in a layer that is left to oneDNN


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextlib.contextmanager
def one_client() -> Iterator[None]:
    """Say that what is inside runs for one client at a time."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def faster_if_alone() -> contextlib.AbstractContextManager[Any]:
    """Use faster layers inside `one_client`."""
    return faster_inference() if _alone.get() else contextlib.nullcontext()


def faster_inference() -> contextlib.AbstractContextManager[Any]:
    """Use faster layers inside, unless the environment asks for plain PyTorch.

    It is for predictions only. A step that is traced inside would be compiled with these layers, and be found again
    where it should have others.
    """
    return contextlib.nullcontext() if asked_for_plain() else _FasterInference()


class _FasterInference(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.conv2d:
            return conv2d(True, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if (fast := _onednn(input, weight, bias)) is not None:
        return fast
    few = weight.ndim == 2 and len(weight) <= MAX_OUTPUTS and weight.shape[1] >= MIN_INPUTS
    if not few or input.ndim != 2 or len(input) < MIN_ROWS or not input.is_cpu:
        return F.linear(input, weight, bias)
    turned = input.t()
    return (weight @ turned if bias is None else torch.addmm(bias[:, None], weight, turned)).t()


def _onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return what oneDNN makes of a large layer; None if the layer is not large, or is for somebody else."""
    if input.ndim != 2 or weight.ndim != 2 or len(input) * weight.numel() < MIN_ONEDNN_PRODUCTS:
        return None
    given = [input, weight] if bias is None else [input, weight, bias]
    if any(each.dtype != torch.float32 or not each.is_cpu for each in given):
        return None
    if torch.is_grad_enabled() and any(each.requires_grad for each in given):
        return None  # it has no derivative
    linear = torch_private.onednn_linear()
    return None if linear is None else linear(input, weight, bias, "none", [], "")
