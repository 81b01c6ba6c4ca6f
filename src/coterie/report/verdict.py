"""Did it help? Two sentences, whichever way it went."""

from __future__ import annotations

import numpy as np

from coterie.report.read import Run, mean
from coterie.report.style import number, unit, words


def title_of(method: str) -> str:
    """A method's name as its paper writes it."""
    from coterie.methods import METHODS

    if method == "local":
        return "training alone"
    return METHODS[method].__name__ if method in METHODS else method


def verdict(run: Run) -> str:
    name, metric = title_of(run.method), words(run.metric)
    reached = f"{number(run.metric, mean(run.scores()))}{' %' if unit(run.metric) else ''}"
    if run.method == "local":
        return (
            f"This is training alone, which other methods are compared with. "
            f"Its mean test {metric} over {len(run.names)} clients is {reached}."
        )
    gains = run.gains()
    if gains is None:
        return (
            f"{name} reaches a mean test {metric} of {reached} over {len(run.names)} clients. Whether that is better "
            f"than training alone cannot be said, as no client was trained alone: run it again with --reference, "
            f"or report it together with a run of method local on the same data."
        )
    if run.benefit is not None:
        return f"{_counted(run, name)} {_average(run)}"
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    return (
        f"{name} is better than training alone for {better} of {len(gains)} clients and worse for {worse}. "
        f"On average it is {_amount(run.metric, mean(gains))}."
    )


def _counted(run: Run, name: str) -> str:
    over = (run.benefit or {})["overall"]
    gains, loses, unsure = over["gains"], over["loses"], over["cannot_tell"]
    total = gains + loses + unsure
    if unsure == total:
        return f"Whether {name} is better than training alone, the test data cannot tell for any of {total} clients."
    told = f"{name} is better than training alone for {gains} of {total} clients and worse for {loses}"
    return f"{told}; for the other {unsure} the test data cannot tell." if unsure else f"{told}."


def _average(run: Run) -> str:
    over = (run.benefit or {})["overall"]
    level = round(100 * (run.benefit or {}).get("level", 0.95))
    low, high = over.get("low"), over.get("high")
    told = f"On average it is {_amount(run.metric, over['mean_gain'])}"
    beside = []
    if low is not None and high is not None:
        ends = f"{number(run.metric, low, '+')} to {number(run.metric, high, '+')}"
        beside.append(f"{level} % interval {ends}")
    p = (over.get("wilcoxon") or {}).get("p")
    if p is not None and np.isfinite(p):
        beside.append(f"Wilcoxon signed-rank p\u00a0=\u00a0{p:.2g}")
    return f"{told} ({'; '.join(beside)})." if beside else f"{told}."


def _amount(metric: str, gain: float) -> str:
    size = number(metric, abs(gain))
    if not gain or gain != gain:
        return f"as good in {words(metric)}"
    return f"{size}{unit(metric)} {'better' if gain > 0 else 'worse'} in {words(metric)}"
