"""Resamples a client's test examples: metrics as functions of how often each example counts.

A resample draws n of n examples with replacement, so its metric is the weighted metric. All resamples together are a
few products of a weight matrix [resamples, examples] with statistics of each example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core.task import Task
from coterie.evaluation.metrics import BINS, bin_of, confidence_and_surprise, flatten_labels
from coterie.evaluation.predictions import Predictions

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Weights = NDArray[np.float32]
Statistic = Callable[[Weights], Array]  # weights [resamples, examples] -> [resamples]
MAX_WEIGHT_CELLS = 2**19  # of the weight matrix at once: so many stay in the cache
MAX_PAIRS_PER_OTHER = 32  # in the wrong order: up to here visiting the pairs is faster than cumulative sums
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


def draws(examples: int, resamples: int, generator: np.random.Generator) -> Iterator[Weights]:
    """Yield how often each example is drawn, [some resamples, examples], until there are `resamples`."""
    step = max(1, MAX_WEIGHT_CELLS // examples)
    for start in range(0, resamples, step):
        number = min(step, resamples - start)
        drawn = torch.from_numpy(generator.integers(examples, size=(number, examples)))
        times = torch.zeros(number, examples)  # of float32, which represents the counts and their sums exactly
        yield times.scatter_add_(1, drawn, torch.ones(()).expand(number, examples)).numpy()


def statistic(task: Task, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights; with every weight 1 it equals `score`."""
    if metric == "loss":
        losses = task.output_losses(one.outputs, one.y).double().numpy()
        return lambda weights: _product(weights, losses) / weights.sum(1)
    if task.kind == "regression":
        return _rmse(*_targets(one)) if metric == "rmse" else _r2(*_targets(one))
    outputs, y, example = flatten_labels(one.outputs, one.y, torch.arange(len(one.y)))
    labels, found, index = y.numpy(), outputs.argmax(1).numpy(), example.numpy()
    shape = (len(one.y), outputs.shape[1])
    truth = _tally(shape, index, labels)
    if metric == "auroc":
        return _auroc(confidence_and_surprise(outputs)[1].double().numpy(), labels, index, truth)
    right = (labels == found).astype(float)
    if metric == "ece":
        confidence, _ = confidence_and_surprise(outputs)
        gaps = _tally((len(one.y), BINS), index, bin_of(confidence).numpy(), right - confidence.numpy())
        return lambda weights: np.abs(_product(weights, gaps)).sum(1) / _count(weights, truth.sum(1))
    hits = _tally(shape, index, labels, right)
    if metric == "accuracy":
        pair = np.stack([hits.sum(1), truth.sum(1)], 1)
        return lambda weights: np.divide(*_count(weights, pair).T)
    above, below = hits, truth
    if metric == "macro_f1":
        above, below = 2 * hits, truth + _tally(shape, index, found)
    both = np.hstack([above, below])  # one product, since reading the weights is most of its work
    return lambda weights: _mean_ratio(*np.hsplit(_count(weights, both), 2))


def differing(metric: str, ours: Predictions, alone: Predictions, *, regression: bool) -> int:
    """Count the examples on which two models differ in what the metric depends on."""
    a, b = ours.outputs, alone.outputs
    if not regression and metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        a, b = a.argmax(1), b.argmax(1)
        if metric != "macro_f1":
            a, b = a == ours.y, b == ours.y
    return int((a != b).reshape(len(a), -1).any(1).sum())


def _tally(
    shape: tuple[int, int], row: NDArray[np.int64], column: NDArray[np.int64], value: Array | None = None
) -> Array:
    """Sum `value` (default: 1) by row and column, [examples, columns]."""
    flat = np.bincount(row * shape[1] + column, value, minlength=shape[0] * shape[1])
    return flat.reshape(shape).astype(float)


def _count(weights: Weights, tally: Array) -> Array:
    """Compute weights @ tally of whole numbers exactly, in float32 if that represents the sums (half the time)."""
    most = float(tally.max(initial=0.0)) * weights.shape[1]
    whole = np.float32 if most <= 2**24 else np.float64
    counted: Array = _product(weights, tally, whole).astype(float)
    return counted


def _product(weights: Weights, values: Array, kind: type[Any] = np.float64) -> Any:
    """Compute weights @ values with PyTorch, whose threads the caller controls; NumPy would use its own threads."""
    return (torch.from_numpy(weights.astype(kind, copy=False)) @ torch.from_numpy(values.astype(kind))).numpy()


def _mean_ratio(above: Array, below: Array) -> Array:
    """Average the ratios whose denominator is not 0, per row."""
    there = below > 0
    ratio = np.divide(above, below, out=np.zeros_like(above), where=there)
    number = there.sum(1)
    mean = np.full(len(above), np.nan)
    np.divide(ratio.sum(1), number, out=mean, where=number > 0)
    return mean


def _auroc(scores: Array, labels: NDArray[np.int64], index: NDArray[np.int64], truth: Array) -> Statistic:
    """Return the weighted AUROC, where `scores` s [labels, classes] are lower the likelier the class is.

    For class c and weights w it is

        1 - sum_{i in c, j not in c} w_i w_j ([s_jc < s_ic] + [s_jc <= s_ic]) / 2 sum_{i in c, j not in c} w_i w_j.

    The sums are whole numbers, at most labels^2 / 2, and therefore exact.
    """
    classes = np.flatnonzero((truth.sum(0) > 0) & (truth.sum(0) < truth.sum()))
    classes = classes[classes == 1] if scores.shape[1] == 2 else classes
    whole = np.float32 if len(labels) ** 2 / 2 <= 2**24 else np.float64
    each = len(labels) // len(truth)  # labels per example
    curves = []
    for label in classes:
        of_class = labels == label
        curves.append((index[of_class], _likelier_others(scores[:, label], of_class, index, whole)))

    def area(weights: Weights) -> Array:
        rows = np.ascontiguousarray(
            weights.astype(whole, copy=False).T
        )  # [examples, resamples]: what follows works on whole rows
        everyone = each * rows.sum(0)
        total, number = np.zeros(len(weights)), np.zeros(len(weights))
        for members, below in curves:
            mine = rows[members]
            count = mine.sum(0)
            pairs = (count * (everyone - count)).astype(float)
            there = pairs > 0
            lost = np.einsum("er,er->r", mine, below(rows))
            total[there] += 1 - lost[there] / (2 * pairs[there])
            number += there
        mean = np.full(len(weights), np.nan)
        np.divide(total, number, out=mean, where=number > 0)
        return mean

    return area


def _likelier_others(scores: Array, of_class: Mask, index: NDArray[np.int64], whole: type[Any]) -> Callable[[Any], Any]:
    """Return a function from weights [examples, resamples] to the sums over j in `_auroc`, [members, resamples].

    A good model puts few others before a member of the class, and then the pairs themselves are visited.
    """
    others = scores[~of_class]
    order = np.argsort(others)
    rest = index[~of_class][order]
    left, right = (np.searchsorted(others[order], scores[of_class], side) for side in _SIDES)
    by = _by_pairs if right.sum() <= MAX_PAIRS_PER_OTHER * len(rest) else _by_sums
    return by(rest, left, right, index[-1] + 1, whole)


def _by_pairs(
    rest: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64], examples: int, whole: type[Any]
) -> Callable[[Any], Any]:
    """Do it by a sparse matrix [members, examples]: 2 for a likelier other, 1 for one that is as likely."""
    from scipy.sparse import csr_array

    end = right.cumsum()
    place = np.arange(end[-1]) - np.repeat(end - right, right)  # of each pair among the member's own
    twice = np.where(place < np.repeat(left, right), 2, 1).astype(whole)
    pairs = csr_array((twice, rest[place], np.concatenate([[0], end])), shape=(len(right), examples))
    return lambda rows: pairs @ rows


def _by_sums(
    rest: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64], examples: int, whole: type[Any]
) -> Callable[[Any], Any]:
    """Do it for many pairs: add up the weights of the others in the order of their scores."""

    def below(rows: Any) -> Any:
        sums = np.zeros((len(rest) + 1, rows.shape[1]), whole)
        np.cumsum(rows[rest], axis=0, out=sums[1:])
        return sums[left] + sums[right]

    return below


def _targets(one: Predictions) -> tuple[Array, Array]:
    """Return (squared errors, targets), both [examples, targets]."""
    y = one.y.double().reshape(len(one.y), -1)
    return ((one.outputs.double().reshape(y.shape) - y) ** 2).numpy(), y.numpy()


def _rmse(squared: Array, y: Array) -> Statistic:
    return lambda weights: np.sqrt(_product(weights, squared.mean(1)) / weights.sum(1))


def _r2(squared: Array, y: Array) -> Statistic:
    centred = y - y.mean(0)  # so that the difference of squares below does not cancel

    def r2(weights: Weights) -> Array:
        count = weights.sum(1, keepdims=True)
        error, squares = _product(weights, squared), _product(weights, centred**2)
        spread = squares - _product(weights, centred) ** 2 / count
        varies = spread > 1e-12 * np.maximum(squares, 1e-300)
        share = np.divide(error, spread, out=np.zeros_like(error), where=varies)
        return _mean_ratio(np.where(varies, 1 - share, 0.0), varies.astype(float))

    return r2
