"""Decides where the numbers of an image lie in memory, in steps that are compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.compute.torch_private import private


def contiguous(value: Tensor) -> Tensor:
    """Return `value` in rows of memory, which TorchInductor must keep (it may drop `Tensor.contiguous`)."""
    return private("force_stride_order")(value, torch.empty(value.shape, device="meta").stride())  # type: ignore[no-any-return]


def last(value: Tensor) -> Tensor:
    """View [batch, channels, high, wide] with channels last."""
    return value.permute(0, 2, 3, 1)


def first(value: Tensor) -> Tensor:
    """View [batch, high, wide, channels] with channels first."""
    return value.permute(0, 3, 1, 2)
