"""Names of metrics, which values are better, between which they must be, and how clients are averaged.

How they are computed depends on the kind of target: `coterie.evaluation.scoring`, and `kinds/` with a file for each. A
metric of your own is a function that is decorated with `metric`, and is called by its name:

    @coterie.metric(better=min, low=0.0, high=1.0)
    def brier(p, y):
        return ((p[:, 1] - y) ** 2).mean()

It is given one client's predictions (probabilities; where there are none, values) and targets, and returns one number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.extensions import added, find

Scores = dict[str, NDArray[np.float64]]  # metric -> [clients]
LARGEST = 1e30  # that a measured number may be: sums of many such numbers are still finite


@dataclass(frozen=True)
class Metric:
    """Which values of a metric are better, and between which it must be: a site that reports others is refused."""

    better: Callable[..., Any]  # max or min
    low: float = -LARGEST
    high: float = LARGEST
    function: Callable[[Tensor, Tensor], Any] | None = None  # of one client's predictions and targets; None: ours
    name: str = ""

    @property
    def path(self) -> str:
        """Where it is imported from or, if that is nowhere (a script, a notebook), its name."""
        module = getattr(self.function, "__module__", None)
        found = module != "__main__" and getattr(sys.modules.get(str(module)), self.name, None) is self
        return f"{module}:{self.name}" if found else self.name

    def __call__(self, predictions: Tensor, y: Tensor) -> Any:
        """Compute a metric of your own."""
        if self.function is None:
            raise TypeError("a metric of Coterie's own is computed by coterie.evaluation.score")
        return self.function(predictions, y)


def metric(
    *, better: Callable[..., Any], low: float = -LARGEST, high: float = LARGEST
) -> Callable[[Callable[[Tensor, Tensor], Any]], Metric]:
    """Make a metric of the function that is decorated.

    Args:
        better: `max` if larger values are better, `min` if smaller ones are.
        low: the smallest value that it can have.
        high: the largest.

    Examples:
        >>> import coterie
        >>> @coterie.metric(better=max, low=0, high=1)
        ... def top_two(outputs, y):  # one client's outputs, [examples, classes], and labels
        ...     return (outputs.topk(2).indices == y[:, None]).any(1).double().mean()
        >>> result = coterie.run("fedavg", "hospitals", model="linear", rounds=1, metric=top_two)
        >>> "test_top_two" in result.clients[0]
        True
    """
    if better not in (max, min) or not low < high:
        raise ConfigError(["a metric needs better=max or better=min, and a low end below its high end"])

    def decorate(function: Callable[[Tensor, Tensor], Any]) -> Metric:
        return Metric(better, max(low, -LARGEST), min(high, LARGEST), function, function.__name__)

    return decorate


_SHARE, _DISTANCE = Metric(max, 0.0, 1.0), Metric(min, 0.0)
KNOWN = {
    **dict.fromkeys(("balanced_accuracy", "accuracy", "macro_f1", "auroc", "f1", "concordance"), _SHARE),
    **{"ece": Metric(min, 0.0, 1.0), "rmse": _DISTANCE, "mae": _DISTANCE, "loss": Metric(min)},
    **{"r2": Metric(max, high=1.0), "kappa": Metric(max, -1.0, 1.0)},
}
AVERAGES = {"mean": "mean", "trimmed": "trimmed mean"}  # over clients, and what each is called
TRIMMED = 0.2
_added: dict[str, Metric] = {}  # the users' own in this process, by name


def about(name: str) -> Metric:
    """Return what is known of a metric; that of one of several targets is called `target.metric`.

    Raises:
        KeyError: there is no such metric.
    """
    return _added[name] if name in _added else KNOWN[name.rpartition(".")[2]]


def is_known(name: str) -> bool:
    """Return whether there is such a metric."""
    return name in _added or name.rpartition(".")[2] in KNOWN


def better(name: str) -> Callable[..., Any]:
    """Return `max` if larger values of a metric are better, and else `min`."""
    return about(name).better


def add(given: Sequence[str | Metric]) -> tuple[str, ...]:
    """Make metrics of your own known by their names, which are returned.

    Args:
        given: metrics, their import paths, or names of an installed package or of metrics that are known already.

    Raises:
        ConfigError: one cannot be found, is no metric, or is called like another one; it lists all problems.
    """
    names, problems = list[str](), list[str]()
    for each in given:
        if isinstance(each, str) and each in _added:
            names.append(each)
            continue
        if isinstance(each, str) and ":" not in each and each not in added("metric"):
            problems.append(
                f"metric = '{each}': give the import path of a metric of your own, package.module:name, or give it in "
                f"Python again (to coterie.resume, too), metric={each}"
            )
            continue
        try:
            found: Any = find("metric", each, {}) if isinstance(each, str) else each
        except ConfigError as error:
            problems += error.problems
            continue
        if not isinstance(found, Metric) or not found.name.isidentifier():
            problems.append(
                f"metric = {each!r}: it does not say which values are better: decorate the function with "
                "@coterie.metric(better=max), or better=min"
            )
        elif found.name in KNOWN:
            problems.append(f"metric = {each!r}: Coterie has a metric called '{found.name}': choose another name")
        else:
            _added[found.name] = found  # of two with one name, the later run's: runs measure by what they were given
            names.append(found.name)
    if problems:
        raise ConfigError(problems)
    return tuple(dict.fromkeys(names))


def with_one_nan(values: NDArray[np.float64]) -> list[float]:
    """Return a list in which every NaN is the same object, so that equal lists compare equal."""
    return [math.nan if value != value else value for value in values.tolist()]


def mean(values: NDArray[np.float64] | list[float], weights: NDArray[np.float64] | list[float] | None = None) -> float:
    """Average the values that are not NaN; return NaN if there are none."""
    array = np.asarray(values, dtype=float)
    there = ~np.isnan(array)
    if weights is None:
        return float(array[there].mean()) if there.any() else math.nan
    weight = np.asarray(weights, dtype=float)
    return float(np.average(array[there], weights=weight[there])) if weight[there].sum() > 0 else math.nan


def average(values: NDArray[np.float64] | list[float], how: str | None, weights: list[float] | None = None) -> float:
    """Average over clients: their `mean`, or as AVERAGES says; NaNs are left out.

    The trimmed mean leaves out a share TRIMMED of the lowest and of the highest values, and from three values on at
    least one each: so many clients cannot move it beyond the values of the others, whatever they report. Two values
    cannot be told apart.
    """
    if how != "trimmed":
        return mean(values, weights)
    array = np.asarray(values, dtype=float)
    known = np.flatnonzero(~np.isnan(array))
    out = max(1, int(TRIMMED * len(known))) if len(known) >= 3 else 0
    inner = known[np.argsort(array[known], kind="stable")][out : len(known) - out]
    return mean(array[inner], None if weights is None else [weights[i] for i in inner])
