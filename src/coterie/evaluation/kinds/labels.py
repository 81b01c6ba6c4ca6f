"""Metrics of several labels an example. A label that nobody recorded does not count.

- auroc: of each label that some, but not all, of the client's examples have, averaged over these labels;
- f1: 2 TP / (2 TP + FP + FN) of each label at p = 1/2, averaged over the labels that occur or are predicted;
- accuracy: the share of all labels that are right at p = 1/2;
- the loss of the task.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from coterie.core.targets import Classes, Target
from coterie.evaluation.bootstrap import Array, Statistic, Weights, counted, mean_ratio
from coterie.evaluation.kinds import classes
from coterie.evaluation.predictions import Predictions

NAMES = ("auroc", "f1", "accuracy", "loss")
TWO = Classes(2)


def names(target: Target) -> tuple[str, ...]:
    """Return the metrics."""
    return NAMES


def default(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    return "auroc"


def scorer(target: Target, y: Tensor, owner: Tensor, clients: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from outputs to every client's metrics, [clients].

    Each label of each client is a cell, whose AUROC is that of a client with two classes.
    """
    number = y.shape[1]
    known = ~torch.isnan(y)
    row, label = known.nonzero(as_tuple=True)
    cell = owner[row] * number + label
    truth = y[known].long()
    ranks = classes.Truth(truth, cell, clients * number, 2)

    def scores(outputs: Tensor) -> dict[str, Tensor]:
        logit = outputs[known]
        both = torch.stack([torch.zeros_like(logit), logit], 1)
        area = classes.auroc_of_cells(classes.confidence_and_surprise(both)[1], ranks)

        def total(values: Tensor) -> Tensor:
            return torch.bincount(cell, values.double(), minlength=clients * number).reshape(clients, number)

        holds, found = truth == 1, logit > 0
        f1 = 2 * total(holds & found) / (total(holds) + total(found))
        accuracy = total(holds == found).sum(1) / total(torch.ones_like(found)).sum(1)
        return {"auroc": area.reshape(clients, number).nanmean(1), "f1": f1.nanmean(1), "accuracy": accuracy}

    return scores


def statistic(target: Target, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights."""
    known = ~torch.isnan(one.y)
    holds, found = ((known & part).double().numpy() for part in (one.y == 1, one.outputs > 0))
    if metric == "f1":
        both = np.hstack([2 * holds * found, holds + found])
        return lambda weights: mean_ratio(*np.hsplit(counted(weights, both), 2))
    if metric == "accuracy":
        right = np.where(known.numpy(), holds == found, 0.0).sum(1)
        pair = np.stack([right, known.double().numpy().sum(1)], 1)
        return lambda weights: mean_ratio(*np.hsplit(counted(weights, pair), 2))
    return mean_of([_area(one, known[:, k], k) for k in range(one.y.shape[1])])


def depends_on(target: Target, metric: str, one: Predictions) -> Tensor:
    """Return what a metric depends on, [examples, ...]."""
    return one.outputs if metric == "auroc" else one.outputs > 0


def mean_of(each: list[Statistic]) -> Statistic:
    """Return the mean of several statistics, of those that are defined in a resample."""

    def mean(weights: Weights) -> Array:
        found = np.stack([one(weights) for one in each], 1)
        there = ~np.isnan(found)
        return mean_ratio(np.where(there, found, 0.0), there.astype(float))

    return mean


def on_some(statistic: Statistic, rows: Tensor) -> Statistic:
    """Return a statistic of some examples as one of all."""
    index = rows.nonzero().flatten().numpy()
    return lambda weights: statistic(np.ascontiguousarray(weights[:, index]))


def _area(one: Predictions, known: Tensor, label: int) -> Statistic:
    logit = one.outputs[known, label]
    outputs = torch.stack([torch.zeros_like(logit), logit], 1)
    if not len(logit):
        return lambda weights: np.full(len(weights), np.nan)
    mine = Predictions(outputs, one.y[known, label].long(), one.owner[known])
    return on_some(classes.statistic(TWO, "auroc", mine), known)
