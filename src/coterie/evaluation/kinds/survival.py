"""Metrics of times until an event.

- concordance: Harrell's C. Two examples can be compared if the event of one, i, happened first: t_i < t_j, or t_i = t_j
  and j was censored then. Of these pairs, it is the share in which i was at more risk by the model; equal risks count
  one half. It is NaN where no two examples can be compared. Pairs are of one client.
- the loss of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets import Cox, Survival, Target
from coterie.core.targets.survival import EVENT, TIME
from coterie.evaluation.bootstrap import Array, Mask, Statistic, Weights, product
from coterie.evaluation.predictions import Predictions

NAMES = ("concordance", "loss")
PAIRS_AT_ONCE = 2**22  # of which a matrix is made


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "concordance"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]."""
    members = [(owner == i).nonzero().flatten() for i in range(clients)]

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        risk = _risk(target, outputs)
        found = [concordance(risk[own].numpy(), y[own].numpy()) for own in members]
        return {"concordance": torch.tensor(found, dtype=torch.float64)}

    return scores


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    risk, y = _risk(target, one.outputs).numpy(), one.y.numpy()
    kept = list(_pairs(risk, y)) if len(risk) ** 2 <= PAIRS_AT_ONCE else None

    def share(weights: Weights) -> Array:
        agree, all_of_them = np.zeros(len(weights)), np.zeros(len(weights))
        for first, better, comparable in kept or _pairs(risk, y):
            mine = np.ascontiguousarray(weights[:, first])
            agree += (product(mine, better) * weights).sum(1)
            all_of_them += (product(mine, comparable.astype(float)) * weights).sum(1)
        found: Array = np.full(len(weights), np.nan)
        np.divide(agree, all_of_them, out=found, where=all_of_them > 0)
        return found

    return share


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    return _risk(target, one.outputs)


def concordance(risk: Array, y: NDArray[Any]) -> float:
    """Return Harrell's C of one client; NaN if there is nothing to compare."""
    agree = number = 0.0
    for _, better, comparable in _pairs(risk, y):
        agree += float(better.sum())
        number += float(comparable.sum())
    return agree / number if number else float("nan")


def _pairs(risk: Array, y: NDArray[Any]) -> Iterator[tuple[NDArray[np.int64], Array, Mask]]:
    """Yield (i, [i, j] how far i and j agree: 1, 1/2 or 0, [i, j] whether they can be compared), some i at once."""
    time, event = y[:, TIME], y[:, EVENT] > 0
    first = np.flatnonzero(event)
    step = max(1, PAIRS_AT_ONCE // max(len(y), 1))
    for start in range(0, len(first), step):
        i = first[start : start + step]
        comparable = (time[i, None] < time) | ((time[i, None] == time) & ~event)
        better = np.where(comparable, (risk[i, None] > risk) + 0.5 * (risk[i, None] == risk), 0.0)
        yield i, better, comparable


def _risk(target: Target, outputs: Tensor) -> Tensor:
    assert isinstance(target, Survival | Cox)
    return target.risk(outputs)
