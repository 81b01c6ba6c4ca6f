"""The rule: the cheapest of those that are as good as the best, if it is known to beat training alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.task import Task
from coterie.evaluation import Predictions
from coterie.experiment.tuning.choice import Choice, choose_method

SITES, EACH = 6, 40
TASK = Task(nn.Linear(1, 2), num_classes=2)
NAMES = [f"site-{i}" for i in range(SITES)]
OWNER = torch.arange(SITES).repeat_interleave(EACH)
Y = (torch.arange(SITES * EACH) % 2).long()


def right(share: float, seed: int, draw: Tensor | None = None) -> Predictions:
    """Predictions of which exactly so many are right."""
    mixed = torch.randperm(len(Y), generator=torch.Generator().manual_seed(seed)) / len(Y)
    drawn = mixed if draw is None else draw
    found = torch.where(drawn < share, Y, 1 - Y)
    return Predictions(2.0 * nn.functional.one_hot(found, 2).float(), Y, OWNER)


def choose(cost: dict[str, float], **found: Any) -> Choice:
    return choose_method(TASK, "accuracy", found, NAMES, cost, seed=0)


def test_a_method_that_beats_local_clearly_is_chosen() -> None:
    found = choose({"local": 0, "a": 1, "b": 2}, local=right(0.6, 1), a=right(0.9, 2), b=right(0.75, 3))
    assert (found.chosen, found.second) == ("a", "b")
    assert found.over_local["a"].clear
    assert found.over_second is not None
    assert found.over_second.clear
    assert found.benefit is not None
    assert found.benefit.who("gains")


def test_of_methods_that_are_as_good_the_cheapest_is_chosen() -> None:
    both = {"a": right(0.89, 4), "b": right(0.9, 5)}
    assert choose({"local": 0, "a": 1, "b": 2}, local=right(0.6, 1), **both).chosen == "a"
    assert choose({"local": 0, "a": 2, "b": 1}, local=right(0.6, 1), **both).chosen == "b"
    assert choose({"local": 0, "a": 1, "b": 1}, local=right(0.6, 1), **both).chosen == "a"  # the first of the panel


def test_a_lead_over_local_that_chance_may_explain_is_not_enough() -> None:
    found = choose({"local": 0, "a": 1}, local=right(0.72, 1), a=right(0.78, 2))
    assert found.candidate == "a"
    assert found.over_local["a"].mean > 0
    assert found.chosen == "local"
    assert found.benefit is not None  # who would gain and lose is told all the same


def test_what_is_known_to_beat_local_goes_before_what_sends_less_or_scores_higher() -> None:
    mixed = torch.randperm(len(Y), generator=torch.Generator().manual_seed(3)) / len(Y)
    steady = right(0.66, 0, mixed)  # right where local is, and more: the gain's standard error is small
    for share, best in ((0.65, "steady"), (0.68, "erratic")):
        predicted = {"local": right(0.6, 0, mixed), "erratic": right(share, 7), "steady": steady}
        found = choose({"local": 0, "erratic": 1, "steady": 2}, **predicted)
        assert found.best == best
        assert not found.over_local["erratic"].clear
        assert found.over_local["steady"].clear
        assert found.chosen == found.candidate == "steady"


def test_local_is_chosen_where_it_is_best_or_as_good_as_the_best() -> None:
    found = choose({"local": 0, "a": 1}, local=right(0.9, 1), a=right(0.7, 2))
    assert (found.best, found.candidate, found.chosen, found.second) == ("local", "local", "local", "a")
    assert found.benefit is None
    drawn = torch.rand(len(Y), generator=torch.Generator().manual_seed(4))
    assert choose({"local": 0, "a": 1}, local=right(0.9, 0, drawn), a=right(0.9, 0, drawn)).chosen == "local"


def test_intervals_over_local_hold_for_all_methods_together() -> None:
    one = choose({"local": 0, "a": 1}, local=right(0.6, 1), a=right(0.7, 2)).over_local["a"]
    more = {f"m{k}": right(0.5, 10 + k) for k in range(5)}
    cost = {"local": 0.0, "a": 1.0, **dict.fromkeys(more, 1.0)}
    wide = choose(cost, local=right(0.6, 1), a=right(0.7, 2), **more).over_local["a"]
    assert wide.mean == one.mean
    assert wide.low < one.low < one.high < wide.high


def test_less_is_better_for_some_metrics() -> None:
    found = choose_method(
        TASK, "loss", {"local": right(0.6, 1), "a": right(0.9, 2)}, NAMES, {"local": 0, "a": 1}, seed=0
    )
    assert found.chosen == "a"
    assert found.over_local["a"].mean > 0
