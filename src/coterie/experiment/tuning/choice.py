"""Choose a method from held-out predictions: the cheapest of those that are as good as the best, if it beats local.

All methods have predicted the same examples, each of which was held out once. Differences come with a paired bootstrap
over the examples inside each site, as in `coterie.evaluation.benefit`. The rule has two steps:

1. Of all methods within one standard error of the best (of the paired difference), take the cheapest: the one that
   sends least, and of equal ones the first of the panel.
2. Unless the interval of its gain over training alone lies above 0, nothing is known to beat training alone, and local
   it is. As the best of several is looked at, the interval is Bonferroni's: 95 % for all methods together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.core.task import Task
from coterie.evaluation import Benefit, Predictions, score
from coterie.evaluation.benefit import Trial, judge, measure_each, sign_of
from coterie.evaluation.metrics import mean

LOCAL = "local"
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much better one method is than another: the mean over sites, positive is better."""

    mean: float
    low: float
    high: float
    error: float  # its standard error

    @property
    def clear(self) -> bool:
        """Whether chance does not explain it."""
        return self.low > 0


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the panel says.

    Attributes:
        scores: the mean over sites of every method's metric on held-out examples.
        best: the method with the best score.
        chosen: the method to use; "local" if nothing is known to beat it.
        candidate: what would have been chosen if it need not beat local.
        second: the best of the others; "" if there are none.
        over_local: of every other method, with intervals that hold for all of them together.
        over_second: of `chosen`, with a 95 % interval.
        benefit: who gains and who loses by `candidate`; None if that is local.
    """

    scores: dict[str, float]
    best: str
    chosen: str
    candidate: str
    second: str
    over_local: dict[str, Difference]
    over_second: Difference | None
    benefit: Benefit | None


def choose_method(
    task: Task,
    metric: str,
    found: Mapping[str, Predictions],
    names: Sequence[str],
    cost: Mapping[str, float],
    *,
    seed: int,
) -> Choice:
    """Choose a method; see the module's text for the rule.

    Args:
        task: the model and its loss.
        metric: what to choose by.
        found: every method's held-out predictions, local's among them, in the order of the panel.
        names: the clients' names.
        cost: the bytes that each method sends.
        seed: of the bootstrap.
    """
    sign = sign_of(metric)
    each = {label: score(task, *predictions, len(names))[metric] for label, predictions in found.items()}
    scores = {label: mean(values) for label, values in each.items()}
    best = max(scores, key=lambda label: sign * scores[label] if scores[label] == scores[label] else -math.inf)
    others = [label for label in found if label != best]
    behind = _differences(task, metric, found, others, best, names, seed, 1)
    near = [best, *(label for label, lead in behind.items() if -lead.mean <= lead.error)]
    order = list(found)
    candidate = min(near, key=lambda label: (cost[label], order.index(label)))
    rivals = [label for label in found if label != LOCAL]
    trials = _trials(task, metric, found, rivals, LOCAL, names, seed)
    over_local = {label: _difference(trial, sign, len(rivals)) for label, trial in trials.items()}
    chosen = candidate if candidate == LOCAL or over_local[candidate].clear else LOCAL
    rest = [label for label in found if label != chosen]
    second = max(rest, key=lambda label: sign * scores[label], default="")
    against = _differences(task, metric, found, [chosen], second, names, seed, 1)[chosen] if second else None
    benefit = None if candidate == LOCAL else judge(metric, names, [trials[candidate]], seed=seed)
    return Choice(scores, best, chosen, candidate, second, over_local, against, benefit)


def _trials(
    task: Task,
    metric: str,
    found: Mapping[str, Predictions],
    ours: Sequence[str],
    other: str,
    names: Sequence[str],
    seed: int,
) -> dict[str, Trial]:
    if not ours:
        return {}
    return measure_each(task, metric, {label: found[label] for label in ours}, found[other], names, seed=seed)


def _differences(
    task: Task,
    metric: str,
    found: Mapping[str, Predictions],
    ours: Sequence[str],
    other: str,
    names: Sequence[str],
    seed: int,
    number: int,
) -> dict[str, Difference]:
    trials = _trials(task, metric, found, ours, other, names, seed)
    return {label: _difference(trial, sign_of(metric), number) for label, trial in trials.items()}


def _difference(trial: Trial, sign: int, number: int) -> Difference:
    """Return the mean gain with an interval that holds for so many of them together."""
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.array([mean(column) for column in trial.samples.T])
    known = means[~np.isnan(means)]
    gain = mean(sign * (trial.federated - trial.local))
    if not len(known):
        return Difference(gain, math.nan, math.nan, math.nan)
    tail = (1 - LEVEL) / number / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Difference(gain, float(low), float(high), float(known.std(ddof=1)))
