"""bf16: matrix products and convolutions with half the bits.

Inside `with BFloat16():` they take their arguments as bfloat16 and return float32, in the forward pass and, by the
derivative of the casts, in the backward pass. Parameters, their gradients, optimisers, normalisation and losses stay
float32, so no loss scaling is needed.

`torch.autocast` would not do: it leaves activations in bfloat16, which BatchNorm with float32 statistics refuses when
clients are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    [
        F.linear,
        F.bilinear,
        F.scaled_dot_product_attention,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        torch.addmm,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.bmm,
        Tensor.addmm,
        Tensor.baddbmm,
    ]
)


class BFloat16(TorchFunctionMode):
    """A context in which the functions in `_PRODUCTS` round their float32 arguments to bfloat16."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        out = func(*map(_narrow, args), **{name: _narrow(value) for name, value in kwargs.items()})
        return out.float() if out.dtype == torch.bfloat16 else out


def _narrow(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
