"""Where the numbers of an image lie in memory, in steps that are compiled."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(value: Tensor) -> Tensor:
    from torch._inductor.inductor_prims import force_stride_order  # not earlier: see `machine_code`

    return force_stride_order(value, torch.empty(value.shape, device="meta").stride())  # type: ignore[no-any-return]


def last(value: Tensor) -> Tensor:
    """Channels last."""
    return value.permute(0, 2, 3, 1)


def first(value: Tensor) -> Tensor:
    """Channels first."""
    return value.permute(0, 3, 1, 2)
