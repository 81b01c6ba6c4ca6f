"""Convolutions by products of polynomials, used where steps are compiled: 64 multiplications for 4 x 4 outputs of 5 x 5
weights, not 400 (Winograd, 1980; Lavin and Gray, 2016).

A row of m = 4 outputs of r = 5 weights g over n = m + r - 1 = 8 inputs d is linear in each of the two, so it is

    y = A^T ((G g) * (B^T d))

where the rows of A and G evaluate polynomials at n points and B undoes that (Toom and Cook). Along rows and columns of
a tile: Y = A^T [(G g G^T) * (B^T d B)] A, and the sum over channels is a matrix product for each of the n^2 points. The
gradients are the adjoints of the same three steps, with products as small. The points are 0, 1, -1, 2, -2, 1/2, -1/2
and infinity: A, B and G then have few digits, and the relative error is 3e-6, where that of PyTorch's own is 3e-7.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coterie.compute.custom_ops import register_op
from coterie.compute.layout import contiguous, first, last

aten = torch.ops.aten
KERNEL = 5  # r
TILE = 4  # m
CHANNELS = 16  # in and out, a multiple of it: vectors
POINTS = tuple(map(Fraction, ("0", "1", "-1", "2", "-2", "1/2", "-1/2")))
Matrix = tuple[tuple[float, ...], ...]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """`NotImplemented` unless channels are last, weights are 5 x 5 and tiles fill the outputs."""
    if not _plain(x, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    out: Tensor = _ops().products(*_ops().points(x, weight))
    return out if bias is None else out + bias[:, None, None]


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """The gradients at x, weight and bias, of which `mask` says which are wanted; `NotImplemented` likewise."""
    if not _plain(x, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    grad = grad.contiguous(memory_format=torch.channels_last)
    both = _ops().gradients(grad, *_ops().points(x, weight))
    return tuple(value if each else None for value, each in zip((*both, grad.sum((0, 2, 3))), mask, strict=True))


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}


def _plain(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> bool:
    simple = {*stride, *dilation} == {1} and set(padding) == {0} and not transposed and groups == 1
    if not simple or x.ndim != 4 or tuple(weight.shape[2:]) != (KERNEL, KERNEL) or x.stride(1) != 1:
        return False
    if x.dtype not in (torch.float32, torch.float64) or weight.dtype != x.dtype:  # of fewer digits, too many are lost
        return False
    filled = all(size >= KERNEL and (size - KERNEL + 1) % TILE == 0 for size in x.shape[2:])
    return filled and all(size % CHANNELS == 0 for size in weight.shape[:2])


@functools.cache
def matrices() -> tuple[Matrix, Matrix, Matrix]:
    """A^T [m, n], G [n, r] and B^T [n, n]."""
    n = TILE + KERNEL - 1

    def values(terms: int) -> list[list[Fraction]]:
        """Of 1, t, t^2, ... at each point; at infinity, the last term."""
        return [*([p**k for k in range(terms)] for p in POINTS), [Fraction(k == terms - 1) for k in range(terms)]]

    evaluate, g, every = values(TILE), values(KERNEL), values(n)
    inverse = _inverse(every)
    return (
        _floats([[row[k] for row in evaluate] for k in range(TILE)]),
        _floats(g),
        _floats([[row[k] for row in inverse] for k in range(n)]),
    )


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """By elimination, exactly."""
    n = len(matrix)
    rows = [[*row, *(Fraction(i == k) for k in range(n))] for i, row in enumerate(matrix)]
    for column in range(n):
        pivot = next(i for i in range(column, n) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for i in range(n):
            if i != column:
                rows[i] = [a - rows[i][column] * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[n:] for row in rows]


def _floats(matrix: list[list[Fraction]]) -> Matrix:
    return tuple(tuple(map(float, row)) for row in matrix)


def _turned(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def _mixed(matrix: Matrix, parts: Sequence[Tensor]) -> list[Tensor]:
    """Each row's sum of its multiples of `parts`, term by term: compiled, it is one pass, and zeros cost nothing."""
    return [functools.reduce(torch.add, _terms(row, parts)) for row in matrix]


def _terms(row: Sequence[float], parts: Sequence[Tensor]) -> list[Tensor]:
    return [part if factor == 1 else part * factor for factor, part in zip(row, parts, strict=True) if factor]


def points(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """B^T d B of every tile, [n, n, batch, tiles, tiles, channels in], and G g G^T, [n, n, in, out]."""
    _, g, b = matrices()
    rows = torch.stack(_mixed(b, [_every(last(x), 1, k) for k in range(len(b))]))  # [n, batch, tiles, wide, channels]
    inputs = torch.stack(_mixed(b, [_every(rows, 3, k) for k in range(len(b))]), 1)
    rows = torch.stack(_mixed(g, contiguous(weight.permute(2, 3, 1, 0)).unbind(0)))  # [n, r, in, out]
    return inputs, torch.stack(_mixed(g, rows.unbind(1)), 1)


def products(inputs: Tensor, weights: Tensor) -> Tensor:
    """The outputs, [batch, channels, high, wide]."""
    a = matrices()[0]
    out = torch.bmm(_matrices(inputs), _matrices(weights)).view(*inputs.shape[:-1], -1)
    rows = torch.stack(_mixed(a, out.unbind(1)), 4)  # [n, batch, tiles, tiles, m, channels]
    both = torch.stack(_mixed(a, rows.unbind(0)), 2)  # [batch, tiles, m, tiles, m, channels]
    return first(both.flatten(3, 4).flatten(1, 2))


def gradients(grad: Tensor, inputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """At x and at the weights: the adjoints of `products` and of `points`."""
    a, g, b = map(_turned, matrices())
    size, high, wide, channels = last(grad).shape
    tiles = last(grad).view(size, high // TILE, TILE, wide // TILE, TILE, channels)
    rows = torch.stack(_mixed(a, tiles.unbind(2)))  # [n, batch, tiles, tiles, m, channels]
    out = _matrices(torch.stack(_mixed(a, rows.unbind(4)), 1))
    x = torch.bmm(out, _matrices(weights).transpose(1, 2)).view(inputs.shape)
    x = _overlapped(_mixed(b, x.unbind(1)), 3)  # [n, batch, tiles, wide, channels]
    weight = torch.bmm(_matrices(inputs).transpose(1, 2), out).view(weights.shape)
    weight = torch.stack(_mixed(g, weight.unbind(1)), 1)  # [n, r, in, out]
    return (
        first(_overlapped(_mixed(b, x.unbind(0)), 1)),
        contiguous(torch.stack(_mixed(g, weight.unbind(0))).permute(3, 2, 0, 1)),
    )


def _matrices(points: Tensor) -> Tensor:
    """One a point, [points, ..., channels]."""
    return points.flatten(0, 1).flatten(1, -2)


def _every(x: Tensor, axis: int, start: int) -> Tensor:
    """The `start`-th of every tile along `axis`."""
    tiles = (x.shape[axis] - KERNEL + 1) // TILE
    return x[(slice(None),) * axis + (slice(start, start + TILE * (tiles - 1) + 1, TILE),)]


def _overlapped(parts: list[Tensor], axis: int) -> Tensor:
    """Along `axis`, part k of tile t is at TILE t + k; there are at most two parts for a place."""
    tiles = parts[0].shape[axis]
    zero = torch.zeros_like(parts[0].narrow(axis, 0, 1))
    places = []
    for k in range(TILE):
        first, second = parts[k], parts[k + TILE] if k + TILE < len(parts) else None
        if second is None:
            places.append(torch.cat([first, zero], axis))
            continue
        middle = first.narrow(axis, 1, tiles - 1) + second.narrow(axis, 0, tiles - 1)
        places.append(torch.cat([first.narrow(axis, 0, 1), middle, second.narrow(axis, tiles - 1, 1)], axis))
    return torch.stack(places, axis + 1).flatten(axis, axis + 1)


@functools.cache
def _ops() -> Any:
    return SimpleNamespace(
        points=register_op(points, 2, 2), products=register_op(products, 2, 1), gradients=register_op(gradients, 3, 2)
    )
