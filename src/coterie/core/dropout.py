"""Dropout that is a pure function of a key, so that every engine drops the same units.

PyTorch draws dropout masks from a global generator, in an order that depends on how clients are stacked. Inside `with
KeyedDropout(key)`, each dropout call instead takes its mask from a hash of (key, number of the call, position), which
is the same in every engine and for every chunk size, compiled or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coterie.core.attention import ATTENTION, in_products

_MASK = 0xFFFFFFFF


class KeyedDropout(TorchFunctionMode):
    """A context that replaces `torch.nn.functional.dropout*`, and with them `nn.Dropout*`, by keyed versions.

    Attention drops its weights inside PyTorch's functions: these are replaced as well (`coterie.core.attention`).

    Args:
        key: an int64 scalar, one for each training step.
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        spatial = _DROPOUTS.get(func)
        if spatial is not None:
            return self._drop(spatial, *args, **kwargs)
        if func in ATTENTION:
            func = in_products(func, functools.partial(self._drop, 0))
        return func(*args, **kwargs)

    def _drop(self, spatial: int, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        self.calls += 1
        # Like PyTorch, dropout2d also takes [batch, channels, length]; dropout1d and dropout3d take one example alone.
        lead = min(2, x.ndim) if spatial == 2 else x.ndim - spatial
        shape = (*x.shape[:lead], *[1] * (x.ndim - lead))
        keep = uniform(self.key + self.calls * 0x9E3779B1, shape) >= p
        return x * keep / (1 - p) if p < 1 else torch.zeros_like(x)


# The number of trailing axes that are dropped or kept together.
_DROPOUTS: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return numbers in [0, 1) of the given shape, each a hash of the int64 scalar `key` and its position."""
    size = 1
    for length in shape:
        size *= length
    position = torch.arange(size, device=key.device).reshape(shape)
    # Keys come from a good generator, so one round of hashing for each half of the key is enough, and compiles quickly.
    bits = _hash((position + (key & _MASK)) & _MASK)
    bits = _hash(bits ^ ((key >> 32) & _MASK))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _hash(x: Tensor) -> Tensor:
    """Mix 32 bits in int64 arithmetic; the multiplier is below 2^31, so the product does not overflow."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)
