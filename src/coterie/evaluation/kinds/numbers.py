"""Metrics of a regression: rmse; r2 (NaN where the targets do not vary; the mean over targets where there are several);
the loss of the task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from coterie.core.targets import Target
from coterie.evaluation.bootstrap import Array, Statistic, Weights, mean_ratio, product
from coterie.evaluation.predictions import Predictions

NAMES = ("rmse", "r2", "loss")


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "rmse"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients]."""
    count = torch.bincount(owner, minlength=clients).double()
    return lambda outputs: _scores(outputs, y, owner, count)


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    return _rmse(*_targets(one)) if metric == "rmse" else _r2(*_targets(one))


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    return one.outputs


def _scores(outputs: Tensor, y: Tensor, owner: Tensor, count: Tensor) -> dict[str, Tensor]:
    y = y.double().reshape(len(y), -1)  # [examples, targets]
    clients, targets = len(count), y.shape[1]
    cell = (owner[:, None] * targets + torch.arange(targets)).flatten()

    def per_client(values: Tensor) -> Tensor:  # [clients, targets]
        return torch.bincount(cell, values.flatten(), minlength=clients * targets).reshape(clients, -1) / count[:, None]

    mse = per_client((outputs.double().reshape(y.shape) - y) ** 2)
    spread = per_client((y - per_client(y)[owner]) ** 2)
    return {"rmse": mse.mean(1).sqrt(), "r2": torch.where(spread > 0, 1 - mse / spread, torch.nan).nanmean(1)}


def _targets(one: Predictions) -> tuple[Array, Array]:
    """Return (squared errors, targets), both [examples, targets]."""
    y = one.y.double().reshape(len(one.y), -1)
    return ((one.outputs.double().reshape(y.shape) - y) ** 2).numpy(), y.numpy()


def _rmse(squared: Array, y: Array) -> Statistic:
    return lambda weights: np.sqrt(product(weights, squared.mean(1)) / weights.sum(1))


def _r2(squared: Array, y: Array) -> Statistic:
    centred = y - y.mean(0)  # so that the difference of squares below does not cancel

    def r2(weights: Weights) -> Array:
        count = weights.sum(1, keepdims=True)
        error, squares = product(weights, squared), product(weights, centred**2)
        spread = squares - product(weights, centred) ** 2 / count
        varies = spread > 1e-12 * np.maximum(squares, 1e-300)
        share = np.divide(error, spread, out=np.zeros_like(error), where=varies)
        return mean_ratio(np.where(varies, 1 - share, 0.0), varies.astype(float))

    return r2
