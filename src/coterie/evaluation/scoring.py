"""Computes the metrics of all clients, whatever the kind of target: the files of `kinds/` by name, and users' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.targets import Target
from coterie.core.task import Task
from coterie.evaluation.bootstrap import Array, Statistic, Weights, product
from coterie.evaluation.kinds import several
from coterie.evaluation.metrics import LARGEST, Scores, about
from coterie.evaluation.predictions import Predictions

PAIRS_AT_ONCE = 2**22  # of examples, in the resamples of a joint loss
KINDS: dict[str, Any] = {**several.KINDS, "multitask": several}


def names_of(target: Target) -> tuple[str, ...]:
    """Return the metrics of a kind of target."""
    found: tuple[str, ...] = KINDS[target.kind].names(target)
    return found


def metrics_of(task: Task) -> tuple[str, ...]:
    """Return the metrics of a task, the user's own last."""
    return (*names_of(task.target), *task.metrics)


def default_metric(target: Target) -> str:
    """Return the metric that selects rounds unless another one is asked for."""
    found: str = KINDS[target.kind].default(target)
    return found


def score(task: Task, outputs: Tensor, y: Tensor, owner: Tensor, clients: int) -> Scores:
    """Compute every metric of every client.

    Args:
        task: The task, which defines the kind of target and the loss.
        outputs: The models' outputs, [examples, ...].
        y: The targets, [examples, ...].
        owner: The client of each example, [examples].
        clients: The number of clients; each has at least one example.
    """
    return Scorer(task, y, owner, clients)(outputs)


class Scorer:
    """Computes `score` repeatedly for the same examples, as in every round; precomputes what outputs do not change."""

    def __init__(self, task: Task, y: Tensor, owner: Tensor, clients: int) -> None:
        self.task, self.y, self.owner, self.clients = task, y.cpu(), owner.cpu(), clients
        self.count = torch.bincount(self.owner, minlength=clients).double()
        self._scores = KINDS[task.kind].scorer(task.target, self.y, self.owner, clients)

    def __call__(self, outputs: Tensor) -> Scores:
        outputs = outputs.cpu()
        scores: dict[str, Tensor] = self._scores(outputs)
        if not self.task.log_loss:
            losses = self._losses(outputs).double()
            scores["loss"] = torch.bincount(self.owner, losses, minlength=self.clients) / self.count
        found = {name: value.numpy() for name, value in scores.items()}
        if self.task.metrics:
            predictions = self.task.target.predictions(outputs)
            for name in self.task.metrics:
                each = [(self.owner == i).nonzero().flatten() for i in range(self.clients)]
                found[name] = np.array([_own(name, predictions[own], self.y[own]) for own in each])
        return found

    def _losses(self, outputs: Tensor) -> Tensor:
        if not self.task.joint:
            return self.task.output_losses(outputs, self.y)
        losses = torch.zeros(len(outputs), dtype=outputs.dtype)
        for i in range(self.clients):  # clients are not compared with each other
            own = self.owner == i
            losses[own] = self.task.output_losses(outputs[own], self.y[own])
        return losses


def statistic(task: Task, metric: str, one: Predictions) -> Statistic:
    """Return a metric of one client as a function of weights; with every weight 1 it equals `score`."""
    if metric in task.metrics:
        return _resampled(metric, task.target.predictions(one.outputs), one.y)
    if metric == "loss" and task.joint:
        return _joint_loss(task, one)
    if metric == "loss":
        losses = task.output_losses(one.outputs, one.y).double().numpy()
        return lambda weights: product(weights, losses) / weights.sum(1)
    found: Statistic = KINDS[task.kind].statistic(task.target, metric, one)
    return found


def differing(task: Task, metric: str, ours: Predictions, alone: Predictions) -> int:
    """Count the examples on which two models differ in what the metric depends on."""
    if metric == "loss" or metric in task.metrics:
        a, b = ours.outputs, alone.outputs
    else:
        a, b = (KINDS[task.kind].depends_on(task.target, metric, one) for one in (ours, alone))
    return int((a != b).reshape(len(a), -1).any(1).sum())


def _joint_loss(task: Task, one: Predictions) -> Statistic:
    """Return a loss as a function of weights, on which each example's own loss depends, too."""
    step = max(1, PAIRS_AT_ONCE // len(one.y) ** 2)

    def mean(weight: Tensor) -> Tensor:
        return (task.output_losses(one.outputs, one.y, weight) * weight).sum() / weight.sum()

    def each(weights: Weights) -> Array:
        pieces = torch.split(torch.from_numpy(weights.astype(np.float32)), step)
        return torch.cat([torch.vmap(mean)(piece) for piece in pieces]).double().numpy()

    return each


def _resampled(metric: str, predictions: Tensor, y: Tensor) -> Statistic:
    """Return a user's metric as a function of weights: an example that counts twice is given twice."""

    def each(weights: Weights) -> Array:
        times = torch.from_numpy(weights).long()
        rows = [torch.repeat_interleave(torch.arange(len(y)), own) for own in times]
        return np.array([_own(metric, predictions[own], y[own]) for own in rows])

    return each


def _own(name: str, predictions: Tensor, y: Tensor) -> float:
    """Compute a user's metric; raise `CoterieError` if it is no number, or not between its ends."""
    known = about(name)
    value = known(predictions, y)
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise CoterieError(f"metric '{name}' gives {value!r} instead of one number") from None
    if found == found and abs(found) <= LARGEST and not known.low <= found <= known.high:
        raise CoterieError(f"metric '{name}' gives {found:g}, but says that it is {known.low:g} to {known.high:g}")
    return found
