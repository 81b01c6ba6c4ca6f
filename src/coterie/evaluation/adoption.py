"""Decides, from validation examples only, which model a site keeps: its local one, its federated one or their mean.

The mean is that of predicted probabilities or, in a regression, of outputs. A mean of *parameters* would be cheaper to
deploy, but the two models may be far apart in weight space, and what a method deploys need not be one model at all; a
mean of outputs is a valid prediction for every method, and its log-loss never exceeds the mean of the two log-losses.

The local model is kept unless another one is shown to be better. A candidate is compared by the loss (log-loss, squared
error): every example counts in it, also those that both models get right, and it is defined if there is one class only.
With d_i the local model's loss on validation example i less the candidate's, i = 1..n, and s their standard deviation,
the candidate may be taken if

- mean d > q s / sqrt(n), where q = t_{n - 1}(0.841) is Student's quantile that is 1 for large n: the rule of one
  standard error, in favour of the local model;
- it is no worse on these examples by the metric that the run reports, where that is defined;
- n is at least `MIN_EXAMPLES`.

Of the candidates that may be taken, the one with the larger mean d is kept. Repeated splits would need the federation
to be trained again for each; a site with few examples keeps its local model instead.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.task import Task
from coterie.evaluation.benefit import sign_of
from coterie.evaluation.bootstrap import statistic
from coterie.evaluation.metrics import flatten_labels, score
from coterie.evaluation.predictions import Predictions

LOCAL, FEDERATED, AVERAGE = "local", "federated", "average"
BELOW_ONE_ERROR = 0.8413447460685429  # the standard normal's probability below 1
MIN_EXAMPLES = 8  # for validation, below which nothing is decided
THRESHOLDED = ("balanced_accuracy", "accuracy", "macro_f1")  # the metrics that depend on a threshold
MAX_LOG_TEMPERATURE = 3.0


class Difference(NamedTuple):
    """How much better a candidate is than the local model on validation data."""

    mean: float  # by the loss
    low: float  # the mean less one standard error
    metric: float  # by the metric that the run reports, signed so that positive is better


class Choice(NamedTuple):
    """What a site keeps, and why."""

    kept: str  # LOCAL, FEDERATED or AVERAGE
    reason: str  # "better", "undecided", "few examples" or "not asked"
    examples: int  # for validation
    federated: Difference
    average: Difference


def not_asked(kept: str, examples: int) -> Choice:
    """Return the choice of a site that has nothing to choose between."""
    unknown = Difference(math.nan, math.nan, math.nan)
    return Choice(kept, "not asked", examples, unknown, unknown)


def choose(task: Task, metric: str, ours: Predictions, alone: Predictions) -> Choice:
    """Choose by the predictions of one site's two models for its validation examples."""
    mixed = ours._replace(outputs=average(ours.outputs, alone.outputs, regression=task.kind == "regression"))
    found = {name: compared(task, metric, each, alone) for name, each in ((FEDERATED, ours), (AVERAGE, mixed))}
    number = len(alone.y)
    if number < MIN_EXAMPLES:
        return Choice(LOCAL, "few examples", number, *found.values())
    better = {name: each.mean for name, each in found.items() if each.low > 0 and not each.metric < 0}
    if not better:
        return Choice(LOCAL, "undecided", number, *found.values())
    return Choice(max(better, key=lambda name: better[name]), "better", number, *found.values())


def compared(task: Task, metric: str, ours: Predictions, alone: Predictions) -> Difference:
    """Return how much better `ours` is than `alone` on one site's examples."""
    losses, theirs = (task.output_losses(each.outputs, each.y).double() for each in (alone, ours))
    d = losses - theirs
    mean, low = float(d.mean()), math.nan
    if len(d) > 1:
        low = mean - quantile(len(d) - 1) * float(d.std()) / math.sqrt(len(d))
    values = [score(task, each.outputs, each.y, torch.zeros(len(d), dtype=torch.int64), 1) for each in (ours, alone)]
    return Difference(mean, low, float(sign_of(metric) * (values[0][metric][0] - values[1][metric][0])))


def quantile(freedom: int) -> float:
    """Return Student's quantile at the probability that the standard normal has below 1."""
    from scipy.special import stdtrit  # here, since importing it takes a while

    return float(stdtrit(freedom, BELOW_ONE_ERROR))


def average(first: Tensor, second: Tensor, *, regression: bool) -> Tensor:
    """Return outputs whose softmax is the mean of the two models' probabilities; in a regression, the mean output."""
    if regression:
        return (first + second) / 2
    return torch.logaddexp(first.log_softmax(1), second.log_softmax(1)) - math.log(2)


def temperature(one: Predictions) -> float:
    """Return the T for which softmax(outputs / T) fits validation labels best; above 1 makes predictions less sure.

    It minimises the sum of -log p_y plus log(T)^2 / 2, that is, under a prior by which log T is normal with standard
    deviation 1: without it, a few examples that are all predicted rightly would ask for T = 0.
    """
    from scipy.optimize import minimize_scalar

    outputs, y, _ = flatten_labels(one.outputs, one.y, one.owner)
    outputs = outputs.double()

    def cost(log_t: float) -> float:
        losses = torch.nn.functional.cross_entropy(outputs / math.exp(log_t), y, reduction="sum")
        return float(losses) + log_t**2 / 2

    bounds = (-MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE)
    return math.exp(float(minimize_scalar(cost, bounds=bounds, method="bounded").x))


def threshold(task: Task, metric: str, one: Predictions) -> float:
    """Return the probability of class 1 from which on to predict it, so that `metric` is best on validation examples.

    Tried are 0.5 and the middle between any two neighbouring predictions; of equally good ones, the closest to 0.5 is
    taken. With fewer than `MIN_EXAMPLES`, or one class only, it is 0.5.
    """
    if len(one.y) < MIN_EXAMPLES or len(np.unique(one.y.numpy())) < 2:
        return 0.5
    p = np.unique(one.outputs.double().softmax(1)[:, 1].numpy())
    tried = np.concatenate([[0.5], (p[1:] + p[:-1]) / 2])
    everyone = np.ones((1, len(one.y)), np.float32)
    scores = [
        float(statistic(task, metric, one._replace(outputs=at_threshold(one.outputs, each)))(everyone)[0])
        for each in tried.tolist()
    ]
    best = np.flatnonzero(np.array(scores) >= max(scores) - 1e-12)
    return float(tried[best[np.abs(tried[best] - 0.5).argmin()]])


def at_threshold(outputs: Tensor, value: float) -> Tensor:
    """Return outputs [examples, 2] of which class 1 is the larger where its probability is above `value`."""
    shift = math.log(value) - math.log1p(-value)
    return outputs.double() - torch.tensor([0.0, shift], dtype=torch.float64)
