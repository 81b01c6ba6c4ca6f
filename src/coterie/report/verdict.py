"""Says in two sentences whether the federation helped."""

from __future__ import annotations

import numpy as np

from coterie.report.read import RunData
from coterie.report.style import metric_words, number, unit


def method_title(method: str) -> str:
    """Return the name of a method as its paper writes it."""
    from coterie.methods import METHODS

    if method == "local":
        return "training alone"
    return METHODS[method].__name__ if method in METHODS else method


def verdict(run: RunData) -> str:
    """Say whether the run's method is better than training alone."""
    name, metric = method_title(run.method), metric_words(run.metric)
    reached = f"{number(run.metric, run.average(run.scores()))}{' %' if unit(run.metric) else ''}"
    if run.method == "local":
        return (
            f"This is training alone, the baseline for other methods. "
            f"Its {run.average_name} test {metric} over {len(run.names)} clients is {reached}."
        )
    gains = run.gains()
    if gains is None:
        return (
            f"{name} reaches a {run.average_name} test {metric} of {reached} over {len(run.names)} clients. "
            f"No client was trained alone for comparison: run it again with --reference, or report it together with a "
            f"run of method local on the same data."
        )
    if run.benefit is not None:
        return f"{_counted(run, name)} {_average(run)}"
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    return (
        f"{name} is better than training alone for {better} of {len(gains)} clients and worse for {worse}. "
        f"On average it is {_amount(run.metric, run.average(gains))}."
    )


def _counted(run: RunData, name: str) -> str:
    over = (run.benefit or {})["overall"]
    gains, loses, undecided = over["gains"], over["loses"], over["undecided"]
    total = gains + loses + undecided
    if undecided == total:
        return f"The test data do not show for any of {total} clients whether {name} is better than training alone."
    counts = f"{name} is better than training alone for {gains} of {total} clients and worse for {loses}"
    return f"{counts}; {undecided} {'is' if undecided == 1 else 'are'} undecided." if undecided else f"{counts}."


def _average(run: RunData) -> str:
    over = (run.benefit or {})["overall"]
    level = round(100 * (run.benefit or {}).get("level", 0.95))
    low, high = over.get("low"), over.get("high")
    sentence = f"On average it is {_amount(run.metric, over['mean_gain'])}"
    beside = []
    if low is not None and high is not None:
        ends = f"{number(run.metric, low, '+')} to {number(run.metric, high, '+')}"
        beside.append(f"{level} % interval {ends}")
    p = (over.get("wilcoxon") or {}).get("p")
    if p is not None and np.isfinite(p):
        beside.append(f"Wilcoxon signed-rank p\u00a0=\u00a0{p:.2g}")
    return f"{sentence} ({'; '.join(beside)})." if beside else f"{sentence}."


def _amount(metric: str, gain: float) -> str:
    size = number(metric, abs(gain))
    if not gain or gain != gain:
        return f"as good in {metric_words(metric)}"
    return f"{size}{unit(metric)} {'better' if gain > 0 else 'worse'} in {metric_words(metric)}"
