"""Dropout that is a pure function of a key, so that every engine drops the same units.

PyTorch draws dropout masks from a global generator, whose order depends on how clients are stacked. Inside
`with KeyedDropout(key)`, each dropout call takes its mask from a hash of (key, number of the call, position) instead:
the same in every engine, for every chunking, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MASK = 0xFFFFFFFF


class KeyedDropout(TorchFunctionMode):
    """Replaces `torch.nn.functional.dropout*` (and so all of `nn.Dropout*`) by keyed versions."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.key = key
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        spatial = _DROPOUTS.get(func)
        return func(*args, **kwargs) if spatial is None else self._drop(spatial, *args, **kwargs)

    def _drop(self, spatial: int, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return x
        self.calls += 1
        # dropout2d takes [batch, channels, length] too, as PyTorch does; the others take one example without a batch.
        lead = min(2, x.ndim) if spatial == 2 else x.ndim - spatial
        shape = (*x.shape[:lead], *[1] * (x.ndim - lead))
        keep = uniform(self.key + self.calls * 0x9E3779B1, shape) >= p
        return x * keep / (1 - p) if p < 1 else torch.zeros_like(x)


# How many of the last axes are dropped as one.
_DROPOUTS: dict[Callable[..., Any], int] = {F.dropout: 0, F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1), a hash of (key, position); `key` is an int64 scalar."""
    size = 1
    for length in shape:
        size *= length
    position = torch.arange(size, device=key.device).reshape(shape)
    # Keys are drawn from a good generator, so one round for each half of the key is enough (and quick to compile).
    bits = _hash((position + (key & _MASK)) & _MASK)
    bits = _hash(bits ^ ((key >> 32) & _MASK))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def _hash(x: Tensor) -> Tensor:
    """A 32-bit mixer in int64 arithmetic; the multiplier is below 2^31, so the product does not overflow."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)
