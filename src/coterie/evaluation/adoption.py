"""Decides, from validation examples only, which model a site keeps: its local one, its federated one or their mean.

The mean is that of predicted probabilities or, in a regression, of outputs. A mean of *parameters* would be cheaper to
deploy, but the two models may be far apart in weight space, and what a method deploys need not be one model at all; a
mean of outputs is a valid prediction for every method, and its log-loss never exceeds the mean of the two log-losses.

The local model is kept unless another one is shown to be better. A candidate is compared by the loss (log-loss, squared
error): every example counts in it, also those that both models get right, and it is defined if there is one class only.
Log-losses are those at each model's best temperature on these examples (`temperature`): a network that was trained on a
few examples is too sure of itself, and would else give way to any other model, also to one that knows less.
With d_i the local model's loss on validation example i less the candidate's, i = 1..n, and e = s / sqrt(n) the standard
error of their mean, the candidate may be taken if

    mean d > q e,   q = ERRORS t_{n - 1}(0.841),

where Student's quantile t is 1 for large n and larger for small ones, and n is at least `MIN_EXAMPLES`. Of the
candidates that may be taken, the one with the larger mean d / e is kept: the surer, which is mostly the average. ERRORS
is the usual 1, which `take_home_errors` changes (docs/adoption.md shows what one half does).

Where validation examples are few, even a large gain is within one standard error. Then d comes from a cross-validation
of the site's training and validation examples (`coterie.experiment.take_home.held_out`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core.targets import Target
from coterie.core.task import Task
from coterie.evaluation.kinds.classes import flatten_labels
from coterie.evaluation.predictions import Predictions
from coterie.evaluation.scoring import statistic

LOCAL, FEDERATED, AVERAGE = "local", "federated", "average"
BELOW_ONE_ERROR = 0.8413447460685429  # the standard normal's probability below 1
ERRORS = 1.0  # by how many standard errors another model than the local one must be better
MIN_EXAMPLES = 4  # for validation, below which nothing is decided
MIN_FOR_THRESHOLD = 10  # below which the threshold stays at 0.5
ROUNDING = 1e-6  # of a loss: smaller differences are none
MAX_LOG_TEMPERATURE = 3.0
MAX_STEPS = 100  # to find a temperature; it takes about five
TOLERANCE = 1e-9  # of its logarithm
HUGE = 1e30  # stands for infinity where it would be multiplied by 0


class Difference(NamedTuple):
    """How much better a candidate is than the local model on validation data, by the loss."""

    mean: float
    error: float  # standard error of the mean; NaN if there is one example


class Choice(NamedTuple):
    """What a site keeps, and why."""

    kept: str  # LOCAL, FEDERATED or AVERAGE
    reason: str  # "better", "undecided", "few examples" or "not asked"
    examples: int  # for validation
    federated: Difference
    average: Difference
    held_out: bool = False  # the examples are not those for validation, but all known ones, in a cross-validation


def not_asked(kept: str, examples: int) -> Choice:
    """Return the choice of a site that has nothing to choose between."""
    unknown = Difference(math.nan, math.nan)
    return Choice(kept, "not asked", examples, unknown, unknown)


def choose(
    task: Task, ours: Predictions, alone: Predictions, *, errors: float = ERRORS, held_out: bool = False
) -> Choice:
    """Choose by the predictions of one site's two models for examples that they have not seen.

    Args:
        task: the task, which defines the loss.
        ours: the federated model's predictions.
        alone: the local model's, for the same examples.
        errors: by how many standard errors another model than the local one must be better.
        held_out: whether the predictions come from a cross-validation.
    """
    mixed = ours._replace(outputs=average(task.target, ours.outputs, alone.outputs))
    theirs = _losses(task, alone)
    found = {name: _difference(theirs - _losses(task, each)) for name, each in ((FEDERATED, ours), (AVERAGE, mixed))}
    number = len(alone.y)
    if number < MIN_EXAMPLES:
        return Choice(LOCAL, "few examples", number, found[FEDERATED], found[AVERAGE], held_out)
    limit = errors * quantile(number - 1)
    better = {name: sureness(each) for name, each in found.items() if sureness(each) > limit}
    if not better:
        return Choice(LOCAL, "undecided", number, found[FEDERATED], found[AVERAGE], held_out)
    return Choice(
        max(better, key=lambda name: better[name]), "better", number, found[FEDERATED], found[AVERAGE], held_out
    )


def compared(task: Task, ours: Predictions, alone: Predictions) -> Difference:
    """Return how much better `ours` is than `alone` on one site's examples."""
    return _difference(_losses(task, alone) - _losses(task, ours))


def _difference(d: Tensor) -> Difference:
    d = torch.where(d.abs() < ROUNDING, 0.0, d)
    return Difference(float(d.mean()), float(d.std()) / math.sqrt(len(d)) if len(d) > 1 else math.nan)


def _losses(task: Task, one: Predictions) -> Tensor:
    outputs = one.outputs / temperature(one) if task.log_loss else one.outputs
    return task.output_losses(outputs, one.y).double()


def sureness(found: Difference) -> float:
    """Return the difference in standard errors; infinite if all examples agree on it."""
    if found.error:
        return found.mean / found.error
    return math.copysign(math.inf, found.mean) if found.mean else 0.0


def quantile(freedom: int) -> float:
    """Return Student's quantile at the probability that the standard normal has below 1."""
    from scipy.special import stdtrit  # here, since importing it takes a while

    return float(stdtrit(freedom, BELOW_ONE_ERROR))


def average(target: Target, first: Tensor, second: Tensor) -> Tensor:
    """Return outputs that predict the mean of what two models predict: of probabilities or, in a regression, values."""
    return target.mix(torch.stack([first, second]), torch.full((2,), 0.5, dtype=first.dtype, device=first.device))


def temperature(one: Predictions) -> float:
    """Return the T for which softmax(outputs / T) fits validation labels best; above 1 makes predictions less sure.

    It minimises the sum of -log p_y plus u^2 / 2 with u = log T, that is, under a prior by which log T is normal with
    standard deviation 1: without it, a few examples that are all predicted rightly would ask for T = 0. With z =
    outputs / T, and means and variances over classes by p = softmax(z), the derivatives by u are

        sum (z_y - mean z) + u    and    sum (var z + mean z - z_y) + 1,

    and u follows from Newton's steps, or from halving the interval where a step would leave it.
    """
    outputs, y, _ = flatten_labels(one.outputs, one.y, one.owner)
    x = outputs.double().numpy()
    x = np.where(np.isneginf(x), -HUGE, x)  # so that what has no chance counts for nothing in the sums
    x_y, u = x[np.arange(len(x)), y.numpy()], 0.0
    x, x_y = x - x.max(1, keepdims=True), x_y - x.max(1)  # the same for all temperatures
    low, high = -MAX_LOG_TEMPERATURE, MAX_LOG_TEMPERATURE
    for _ in range(MAX_STEPS):
        z = x * math.exp(-u)
        p = np.exp(z)
        pz = p * z
        total = p.sum(1)
        mean = pz.sum(1) / total
        missing = float((mean - x_y * math.exp(-u)).sum())
        slope = u - missing
        curvature = float(np.einsum("ec,ec,e->", pz, z, 1 / total) - mean @ mean) + missing + 1
        low, high = (u, high) if slope < 0 else (low, u)
        newton = u - slope / curvature if curvature > 0 else math.nan
        before, u = u, newton if low < newton < high else (low + high) / 2
        if abs(u - before) < TOLERANCE:
            break
    return math.exp(u)


def threshold(task: Task, metric: str, one: Predictions) -> float:
    """Return the probability of class 1 from which on to predict it, so that `metric` is best on validation examples.

    Tried are 0.5 and the middle between any two neighbouring predictions; of equally good ones, the closest to 0.5 is
    taken. With fewer than `MIN_FOR_THRESHOLD` examples, or one class only, it is 0.5.
    """
    if len(one.y) < MIN_FOR_THRESHOLD or len(np.unique(one.y.numpy())) < 2:
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
