"""Differences between methods follow from each site's score and standard error, wherever these were computed."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from coterie.core.task import Task
from coterie.evaluation import Predictions
from coterie.experiment.tuning.evidence import Evidence, difference, evidence_of, joined

TASK = Task(nn.Linear(1, 2), num_classes=2)
NAMES = ["a", "b", "c", "d"]


def made(scores: list[float], local: list[float], errors: list[float]) -> Evidence:
    unknown = np.zeros(len(scores))
    both = {"local": np.array(local), "one": np.array(scores)}
    return Evidence(unknown, both, {("local", "one"): np.array(errors)}, {}, {})


def predicted(seed: int) -> Predictions:
    draw = torch.Generator().manual_seed(seed)
    owner = torch.arange(4).repeat_interleave(torch.tensor([30, 20, 40, 25]))
    return Predictions(torch.randn(115, 2, generator=draw), (torch.arange(115) % 2).long(), owner)


def test_a_mean_difference_and_its_interval_in_closed_form() -> None:
    found = difference("accuracy", made([0.8, 0.7], [0.6, 0.6], [0.03, 0.04]), "one", "local")
    assert found.mean == pytest.approx(0.15)
    assert found.error == pytest.approx(0.05 / 2)  # the root of the sum of squares, over the number of sites
    reach = 1.959964 * 0.025
    assert (found.low, found.high) == pytest.approx((0.15 - reach, 0.15 + reach))
    two = difference("accuracy", made([0.8, 0.7], [0.6, 0.6], [0.03, 0.04]), "one", "local", together=2)
    assert two.high == pytest.approx(0.15 + NormalDist().inv_cdf(1 - 0.0125) * 0.025)
    back = difference("accuracy", made([0.8, 0.7], [0.6, 0.6], [0.03, 0.04]), "local", "one")
    assert (back.mean, back.low) == pytest.approx((-found.mean, -found.high))


def test_a_trimmed_average_leaves_out_extremes_of_scores_and_errors() -> None:
    usual = made([0.7, 0.72, 0.71, 1.0], [0.6] * 4, [0.02, 0.03, 0.025, 1e-9])
    found = difference("accuracy", usual, "one", "local", how="trimmed")
    assert found.mean == pytest.approx((0.11 + 0.12) / 2)
    assert found.error == pytest.approx(np.sqrt((0.02**2 + 0.025**2) / 2 / 4))
    assert difference("accuracy", usual, "one", "local").mean > 0.18


def test_sites_without_a_score_are_left_out() -> None:
    found = difference("accuracy", made([0.7, np.nan], [0.6, 0.6], [0.02, 0.02]), "one", "local")
    assert (found.mean, found.error) == pytest.approx((0.1, 0.02))
    assert np.isnan(difference("accuracy", made([np.nan], [0.6], [0.1]), "one", "local").error)


def test_what_sites_know_together_is_what_is_known_of_all() -> None:
    methods = {label: predicted(seed) for seed, label in enumerate(["local", "one", "two"])}
    whole = evidence_of(TASK, "auroc", methods, NAMES, seed=5)
    parts = []
    for i, name in enumerate(NAMES):
        own = {label: each.of(i) for label, each in methods.items()}
        own = {label: each._replace(owner=torch.zeros_like(each.owner)) for label, each in own.items()}
        parts.append(evidence_of(TASK, "auroc", own, [name], seed=5))
    together = joined(parts)
    assert together.sizes.tolist() == [30, 20, 40, 25]
    for one, other in ((whole.scores, together.scores), (whole.errors, together.errors), (whole.ends, together.ends)):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_allclose(one[key], other[key], rtol=1e-6)  # type: ignore[index]
    assert whole.errors.keys() == {("local", "one"), ("local", "two"), ("one", "two")}
    assert whole.error("two", "one") is whole.error("one", "two")
