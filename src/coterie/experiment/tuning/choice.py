"""Choose a method from held-out predictions: the cheapest of those that are as good as the best, if it beats local.

All methods have predicted the same examples, each of which was held out once. Differences come with a paired bootstrap
over the examples inside each site (`evidence.py`). The rule has two steps:

1. If training alone is within one standard error of the best (of the paired difference), it is as good, and sends
   nothing.
2. Else, of all methods within one standard error of the best that are known to beat training alone, take the cheapest:
   the one that sends least, and of equal ones the first of the panel. If none of these is known to, but others are,
   take the cheapest of those. A method is known to if the interval of its gain lies above 0. As several are looked at,
   the intervals are Bonferroni's: 95 % for all methods together.
3. If none is, local it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from coterie.core.task import Task
from coterie.evaluation import Benefit, Predictions
from coterie.evaluation.benefit import benefit_of, sign_of
from coterie.evaluation.metrics import average
from coterie.experiment.tuning.evidence import LOCAL, Difference, Evidence, difference, evidence_of


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the panel says.

    Attributes:
        scores: the mean over sites of every method's metric on held-out examples.
        best: the method with the best score.
        chosen: the method to use; "local" if nothing is known to beat it.
        candidate: what was chosen; if that is local although another method scores clearly better, that one.
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
    return choose(metric, evidence_of(task, metric, found, names, seed=seed), names, cost)


def choose(
    metric: str, found: Evidence, names: Sequence[str], cost: Mapping[str, float], how: str | None = None
) -> Choice:
    """Choose a method by what is known of each site; `how` is the average over sites."""
    sign, order = sign_of(metric), list(found.scores)
    scores = {label: average(values, how) for label, values in found.scores.items()}
    best = max(scores, key=lambda label: sign * scores[label] if scores[label] == scores[label] else -math.inf)
    behind = {label: difference(metric, found, label, best, how=how) for label in order if label != best}
    near = [best, *(label for label, lead in behind.items() if -lead.mean <= lead.error)]
    rivals = [label for label in order if label != LOCAL]
    over_local = {label: difference(metric, found, label, LOCAL, together=len(rivals), how=how) for label in rivals}
    clear = [label for label in rivals if over_local[label].clear and LOCAL not in near]
    both = [label for label in clear if label in near]
    chosen = min(both or clear, key=lambda label: (cost[label], order.index(label)), default=LOCAL)
    candidate = best if chosen == LOCAL and LOCAL not in near else chosen
    rest = [label for label in order if label != chosen]
    second = max(rest, key=lambda label: sign * scores[label], default="")
    against = difference(metric, found, chosen, second, how=how) if second else None
    benefit = None if candidate == LOCAL else _benefit(metric, found, candidate, names, how)
    return Choice(scores, best, chosen, candidate, second, over_local, against, benefit)


def _benefit(metric: str, found: Evidence, label: str, names: Sequence[str], how: str | None) -> Benefit:
    lead = difference(metric, found, label, LOCAL, how=how)
    both = found.scores[label], found.scores[LOCAL]
    return benefit_of(
        metric, names, found.sizes, *both, found.ends[label], found.differing[label], (lead.low, lead.high)
    )
