"""Metrics of levels in an order; k is the predicted level (the median), y the true one.

- mae: the mean of |k - y|, in ranks;
- kappa: the quadratic weighted kappa, 1 - sum (k - y)^2 / sum of the same if the predictions were dealt out at random,
  which is sum k^2 + sum y^2 - 2 (sum k) (sum y) / n; NaN where all levels, predicted and true, are the same;
- accuracy;
- the loss of the task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.targets import Ordered, Target
from coterie.evaluation.bootstrap import Array, Statistic, counted
from coterie.evaluation.predictions import Predictions

NAMES = ("mae", "kappa", "accuracy", "loss")


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "mae"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]."""

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        moments = _moments(_levels(target, outputs), y)
        sums = [torch.bincount(owner, each, minlength=clients).numpy() for each in moments.T]
        return {name: torch.from_numpy(_metric(name, np.stack(sums, 1))) for name in NAMES[:-1]}

    return scores


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    moments = _moments(_levels(target, one.outputs), one.y).numpy()
    return lambda weights: _metric(metric, counted(weights, moments))


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    return _levels(target, one.outputs)


def _levels(target: Any, outputs: Tensor) -> Tensor:
    assert isinstance(target, Ordered)
    return target.predicted(outputs)


def _moments(k: Tensor, y: Tensor) -> Tensor:
    """Return what all metrics follow from when it is added up over examples, [examples, 7]."""
    k, y = k.double(), y.double()
    return torch.stack([(k - y).abs(), (k - y) ** 2, k**2 + y**2, k, y, (k == y).double(), torch.ones_like(k)], 1)


def _metric(name: str, sums: Array) -> Array:
    apart, squares, powers, k, y, right, number = sums.T
    with np.errstate(invalid="ignore", divide="ignore"):  # no examples, or no differences
        if name == "kappa":
            chance = powers - 2 * k * y / number
            kappa: Array = np.where(chance > 1e-9 * number, 1 - squares / chance, np.nan)
            return kappa
        found: Array = (apart if name == "mae" else right) / number
        return found
