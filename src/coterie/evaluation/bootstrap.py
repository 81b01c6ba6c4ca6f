"""Resamples a client's test examples: metrics as functions of how often each example counts.

A resample draws n of n examples with replacement, so its metric is the weighted metric. All resamples together are a
few products of a weight matrix [resamples, examples] with statistics of each example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]
Statistic = Callable[[Weights], Array]  # weights [resamples, examples] -> [resamples]
MAX_WEIGHT_CELLS = 2**19  # of the weight matrix at once: so many stay in the cache


def draws(examples: int, resamples: int, generator: np.random.Generator) -> Iterator[Weights]:
    """Yield how often each example is drawn, [some resamples, examples], until there are `resamples`."""
    step = max(1, MAX_WEIGHT_CELLS // examples)
    for start in range(0, resamples, step):
        number = min(step, resamples - start)
        drawn = torch.from_numpy(generator.integers(examples, size=(number, examples)))
        times = torch.zeros(number, examples)  # of float32, which represents the counts and their sums exactly
        yield times.scatter_add_(1, drawn, torch.ones(()).expand(number, examples)).numpy()


def tally(
    shape: tuple[int, int], row: NDArray[np.int64], column: NDArray[np.int64], value: Array | None = None
) -> Array:
    """Sum `value` (default: 1) by row and column, [examples, columns]."""
    flat = np.bincount(row * shape[1] + column, value, minlength=shape[0] * shape[1])
    return flat.reshape(shape).astype(float)


def counted(weights: Weights, tally: Array) -> Array:
    """Compute weights @ tally of whole numbers exactly, in float32 if that represents the sums (half the time)."""
    most = float(tally.max(initial=0.0)) * weights.shape[1]
    whole = np.float32 if most <= 2**24 else np.float64
    found: Array = product(weights, tally, whole).astype(float)
    return found


def product(weights: Weights, values: Array, kind: type[Any] = np.float64) -> Any:
    """Compute weights @ values with PyTorch, whose threads the caller controls; NumPy would use its own threads."""
    return (torch.from_numpy(weights.astype(kind, copy=False)) @ torch.from_numpy(values.astype(kind))).numpy()


def mean_ratio(above: Array, below: Array) -> Array:
    """Average the ratios whose denominator is not 0, per row."""
    there = below > 0
    ratio = np.divide(above, below, out=np.zeros_like(above), where=there)
    number = there.sum(1)
    mean = np.full(len(above), np.nan)
    np.divide(ratio.sum(1), number, out=mean, where=number > 0)
    return mean
