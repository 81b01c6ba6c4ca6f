"""Max pooling in forms that a processor is fast at, used where steps are compiled.

Where windows do not overlap, every input belongs to one window, and its gradient is that of its window or 0: a
comparison, computed along vectors of channels and together with what follows. The compiler alone scatters the gradients
one by one. Results are the same, ties and all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.layout import first, laid_out, last

aten = torch.ops.aten
VECTOR = 16  # channels, at least


def max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """(largest value of each window, its place in the image); `NotImplemented` where windows overlap, do not fill the
    image, or the channels do not come last."""
    if not _plain(x, kernel, stride, padding, dilation):
        return NotImplemented
    rows, columns = kernel[0], kernel[-1]
    values = _windows(x, rows, columns)
    best = values[0]
    for value in values[1:]:
        best = torch.maximum(best, value)
    place = _place(values).to(torch.int64)
    high, wide = (torch.arange(size, device=x.device) for size in best.shape[1:3])
    row, column = (high * rows)[:, None, None] + place // columns, (wide * columns)[:, None] + place % columns
    return first(laid_out(best)), first(row * x.shape[3] + column)


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Any:
    """The gradient at x; `NotImplemented` likewise."""
    if not _plain(x, kernel, stride, padding, dilation):
        return NotImplemented
    rows, columns = kernel[0], kernel[-1]
    # Written down once a window: the compiler would otherwise find it again for every input.
    place = laid_out(_place(_windows(x, rows, columns)))
    own = torch.arange(rows * columns, dtype=place.dtype, device=x.device).view(rows, 1, columns, 1)
    chosen = place[:, :, None, :, None] == own
    spread = torch.where(chosen, laid_out(last(grad))[:, :, None, :, None], 0.0)
    return first(spread.reshape(last(x).shape))


DECOMPOSITIONS: dict[torch._ops.OpOverload[..., Any], Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}


def _plain(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    apart = not stride or (stride[0], stride[-1]) == (kernel[0], kernel[-1])
    whole = x.shape[-2] % kernel[0] == 0 and x.shape[-1] % kernel[-1] == 0
    last = x.ndim == 4 and x.shape[1] >= VECTOR and x.stride(1) == 1
    return apart and whole and last and set(padding) == {0} and set(dilation) == {1}


def _windows(x: Tensor, rows: int, columns: int) -> list[Tensor]:
    """The values at each place of the windows, [batch, high, wide, channels] each."""
    return [last(x)[:, row::rows, column::columns] for row in range(rows) for column in range(columns)]


def _place(values: list[Tensor]) -> Tensor:
    """Where the largest is: the first of equals, and a NaN before all. As floats, which are compared faster."""
    best, place = values[0], torch.zeros_like(values[0], dtype=torch.float32)
    for at, value in enumerate(values[1:], 1):
        better = (value > best) | (value != value)
        best, place = torch.where(better, value, best), torch.where(better, float(at), place)
    return place
