"""What a site says of how good the methods were on what it held out, checked before it is believed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.deploy import messages
from coterie.deploy.refused import Refused
from coterie.evaluation.metrics import about
from coterie.experiment.tuning.evidence import LOCAL, Evidence


def evidence_of(judged: messages.Judged, methods: Sequence[str], metric: str, examples: int) -> Evidence:
    """Return what a site says of itself; raise `Refused` if it cannot be."""
    rivals, pairs = [name for name in methods if name != LOCAL], list(itertools.combinations(methods, 2))
    expected = len(methods), len(pairs), len(rivals), len(rivals)
    if (len(judged.scores), len(judged.errors), len(judged.ends), len(judged.differing)) != expected:
        raise Refused("bad-header", "numbers for other methods than were asked about")
    low, high = about(metric).low, about(metric).high
    if any(value is not None and not low <= value <= high for value in judged.scores):
        raise Refused("bad-header", "a score outside of its range")
    if any(value is not None and value < 0 for value in judged.errors):
        raise Refused("bad-header", "a negative standard error")
    if judged.examples > examples or any(number > judged.examples for number in judged.differing):
        raise Refused("bad-count", "more examples than declared")
    return Evidence(
        _row(judged.examples),
        {name: _row(value) for name, value in zip(methods, judged.scores, strict=True)},
        {pair: _row(value) for pair, value in zip(pairs, judged.errors, strict=True)},
        {name: np.stack([_row(end) for end in ends], 1) for name, ends in zip(rivals, judged.ends, strict=True)},
        {name: _row(value) for name, value in zip(rivals, judged.differing, strict=True)},
    )


def no_evidence(methods: Sequence[str]) -> Evidence:
    """Return what is known of a site that does not answer."""
    rivals, unknown = [name for name in methods if name != LOCAL], np.array([math.nan])
    return Evidence(
        np.array([0.0]),
        dict.fromkeys(methods, unknown),
        dict.fromkeys(itertools.combinations(methods, 2), unknown),
        dict.fromkeys(rivals, np.array([[math.nan, math.nan]])),
        dict.fromkeys(rivals, np.array([0.0])),
    )


def _row(value: float | None) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value], dtype=float)
