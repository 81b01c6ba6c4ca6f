from types import SimpleNamespace

import numpy as np
import pytest

from coterie import Benefit
from coterie.cli.tables import amount, counts_sentence, format_value, verdict_sentence
from coterie.methods import FedAvg


def outcome(gains, metric="accuracy", method="fedavg", reference=True):
    config = SimpleNamespace(method=method)
    return SimpleNamespace(
        config=config, metric=metric, method=FedAvg(), reference=reference, gains=lambda: np.array(gains)
    )


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        ([0.02, -0.01, 0.0], "FedAvg is better than training alone for 1 of 3 clients and worse for 1, and 0.3 points"),
        (
            [-0.02, 0.01, 0.0],
            "FedAvg does not help on average: it is 0.3 points worse. It is better than training alone",
        ),
        ([0.01, -0.01], "FedAvg does not help on average: it makes no difference. It is better than"),
        ([0.0001, 0.0], "and less than 0.1 points better on average"),
        ([float("nan")], "FedAvg cannot be compared: accuracy is undefined on every client's test examples."),
    ],
)
def test_the_verdict_is_honest(gains, words):
    assert words in verdict_sentence(outcome(gains))


def test_amounts():
    assert amount("rmse", -0.03123) == "0.0312 (rmse)"
    assert format_value("accuracy", 0.1234, "+") == "+12.3"
    assert format_value("accuracy", -0.0001, "+") == "0.0"
    assert format_value("rmse", 1.23456) == "1.235"
    assert format_value("auroc", float("nan"), "+") == "-"


def benefit_of(verdicts):
    rows = [{"client": f"c{i}", "verdict": verdict_sentence} for i, verdict_sentence in enumerate(verdicts)]
    return Benefit("accuracy", rows, {}, {})


def test_who_gains_in_words():
    told = counts_sentence(benefit_of(["gains", "loses", "undecided", "gains"]))
    assert told == "Of 4 clients, 2 gain (c0, c3), 1 loses (c1), 1 undecided (95 % intervals)."
    assert "10 gain (c0, c1, c2, c3, c4, c5, c6, c7 and 2 more), 0 lose, 0 undecided" in counts_sentence(
        benefit_of(["gains"] * 10)
    )
