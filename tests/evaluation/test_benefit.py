import math

import numpy as np
import pytest
import torch
from torch import nn

from coterie.core.errors import DataError
from coterie.core.task import Task
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import (
    Trial,
    interval,
    intervals,
    judge,
    measure,
    measure_each,
    min_differing,
    verdict_of,
    with_current_verdicts,
)
from coterie.evaluation.predictions import check_same_data
from coterie.evaluation.scoring import statistic

TASK = Task(nn.Linear(2, 2), num_classes=2)


def said(right, owner=None):
    """Predictions of class 0 examples, right where told."""
    right = torch.as_tensor(right)
    outputs = torch.stack([right.float(), 1 - right.float()], 1)
    owner = torch.zeros(len(right), dtype=torch.long) if owner is None else owner
    return Predictions(outputs, torch.zeros(len(right), dtype=torch.long), owner)


def benefit(ours, alone, metric="accuracy", names=("a",), seed=0, **options):
    return judge(metric, names, [measure(TASK, metric, ours, alone, names, seed=seed, **options)], seed=seed)


def test_a_clear_gain_and_a_clear_loss():
    better, worse = said([1] * 90 + [0] * 10), said([1] * 60 + [0] * 40)
    (row,) = benefit(better, worse).clients
    assert (row["federated"], row["local"], row["test"]) == pytest.approx((0.9, 0.6, 100))
    assert row["gain"] == pytest.approx(0.3)
    # 30 of 100 pairs differ, all in favour: the standard error of the mean difference is sqrt(0.3 * 0.7 / 100).
    se = math.sqrt(0.3 * 0.7 / 100)
    assert row["low"] == pytest.approx(0.3 - 1.96 * se, abs=0.015)
    assert row["high"] == pytest.approx(0.3 + 1.96 * se, abs=0.015)
    assert row["verdict"] == "gains"
    (row,) = benefit(worse, better).clients
    assert row["gain"] == pytest.approx(-0.3)
    assert row["verdict"] == "loses"
    assert benefit(better, worse, "loss").clients[0]["gain"] > 0  # a lower loss is a gain
    assert benefit(better, worse, "loss").clients[0]["verdict"] == "gains"


def test_pairing_is_used():
    """Two models of equal accuracy and independent errors: unpaired, the interval would be as wide; a model that errs
    wherever the other does, and once more in ten, is told apart."""
    alone = said([1] * 100 + [0] * 100)
    ours = said([1] * 110 + [0] * 90)
    (row,) = benefit(ours, alone).clients
    assert row["high"] - row["low"] < 0.07  # unpaired: about 4 * sqrt(2 * 0.25 / 200) = 0.2
    assert row["verdict"] == "gains"


def test_identical_predictions_are_undecided():
    same = said([1] * 50 + [0] * 50)
    found = benefit(same, same)
    assert [found.clients[0][key] for key in ("gain", "low", "high")] == [0, 0, 0]
    assert found.clients[0]["verdict"] == "undecided"
    assert found.overall["wilcoxon"] == {"statistic": 0.0, "p": 1.0, "effect": 0.0, "n": 0}


@pytest.mark.parametrize(("differ", "verdict"), [(5, "undecided"), (6, "gains")])
def test_fewer_than_six_examples_that_differ_are_undecided(differ, verdict):
    # Percentiles alone would call five of five in favour a gain, which no exact test does.
    (row,) = benefit(said([1] * differ), said([0] * differ)).clients
    assert row["verdict"] == verdict
    assert row["low"] == (0 if differ < 6 else 1)
    assert min_differing(0.95) == 6
    assert min_differing(0.99) == 8


def test_a_metric_that_is_not_defined_is_undecided():
    found = benefit(said([1] * 20), said([0] * 20), "auroc")  # one class
    (row,) = found.clients
    assert math.isnan(row["gain"])
    assert math.isnan(row["low"])
    assert row["verdict"] == "undecided"
    assert math.isnan(found.overall["mean_gain"])


def test_verdicts_are_counted_and_averaged_over_clients():
    owner = torch.arange(3).repeat_interleave(torch.tensor([40, 40, 80]))
    ours = said([1] * 40 + [0] * 40 + [1] * 40 + [0] * 40, owner)
    alone = said([0] * 20 + [1] * 20 + [0] * 20 + [1] * 20 + [1] * 38 + [0] * 40 + [1] * 2, owner)
    found = benefit(ours, alone, names=("a", "b", "c"))
    assert (found.who("gains"), found.who("loses"), found.who("undecided")) == (["a"], ["b"], ["c"])
    assert [found.overall[key] for key in ("gains", "loses", "undecided")] == [1, 1, 1]
    assert found.overall["mean_gain"] == pytest.approx(0.0)
    assert found.overall["low"] < 0 < found.overall["high"]
    assert found.fairness["share_worse_than_alone"] == pytest.approx(1 / 3)
    assert found.fairness["federated"]["mean"] == pytest.approx(0.5)
    assert found.fairness["federated"]["weighted_mean"] == pytest.approx(80 / 160)
    assert found.to_json()["clients"][0].keys() == {
        *("client", "test", "federated", "local", "gain", "low", "high", "verdict"),
    }


def test_a_clients_interval_is_its_own_whatever_its_place_and_the_seed_fixes_it():
    draw = torch.Generator().manual_seed(0)
    first, second = torch.rand(60, generator=draw) > 0.3, torch.rand(60, generator=draw) > 0.5
    owner = torch.arange(2).repeat_interleave(30)
    rows = benefit(said(first, owner), said(second, owner), names=("a", "b")).clients
    swapped = [torch.cat([each[30:], each[:30]]) for each in (first, second)]
    again = benefit(said(swapped[0], owner), said(swapped[1], owner), names=("b", "a")).clients
    assert rows == again[::-1]
    other = benefit(said(first, owner), said(second, owner), names=("a", "b"), seed=1).clients
    assert [row["low"] for row in rows] != [row["low"] for row in other]


def test_coverage():
    """In simulated test sets of 100, where the federated model is right with probability 0.8 and the local one with
    0.7 independently, 95 % intervals hold the true gain of 0.1 in 95 % of clients, up to the error of 600 trials."""
    draw, clients, size = torch.Generator().manual_seed(0), 600, 100
    owner = torch.arange(clients).repeat_interleave(size)
    ours = said(torch.rand(clients * size, generator=draw) < 0.8, owner)
    alone = said(torch.rand(clients * size, generator=draw) < 0.7, owner)
    names = [str(i) for i in range(clients)]
    found = benefit(ours, alone, names=names, resamples=500)
    low, high = (np.array([row[key] for row in found.clients]) for key in ("low", "high"))
    covered = ((low <= 0.1) & (high >= 0.1)).mean()
    assert 0.92 < covered < 0.98
    assert (low > 0.1).mean() < 0.05
    assert (high < 0.1).mean() < 0.05


def trial(gain, spread, resamples=2000, differing=50.0):
    samples = gain + spread * np.random.default_rng(int(1000 * gain)).standard_normal((1, resamples))
    return Trial(np.array([10.0]), np.array([0.5 + gain]), np.array([0.5]), samples, np.array([differing]))


def test_over_seeds_the_interval_holds_the_variation_of_both():
    steady = judge("accuracy", ["a"], [trial(0.2, 0.05), trial(0.2001, 0.05), trial(0.2002, 0.05)], seed=0).clients[0]
    shaky = judge("accuracy", ["a"], [trial(0.05, 0.05), trial(0.2, 0.05), trial(0.35, 0.05)], seed=0).clients[0]
    assert steady["gain"] == pytest.approx(0.2, abs=0.001)
    assert shaky["gain"] == pytest.approx(0.2)
    half = 1.96 * 0.05 / math.sqrt(3)
    assert steady["high"] - steady["low"] == pytest.approx(2 * half, rel=0.1)
    between = np.var([0.05, 0.2, 0.35]) / 3
    wide = 1.96 * math.sqrt(between + 0.05**2 / 3)
    assert shaky["high"] - shaky["low"] == pytest.approx(2 * wide, rel=0.1)


def test_over_seeds_the_examples_that_differ_are_not_added_up():
    few = [trial(0.2, 0.01, differing=4.0), trial(0.2001, 0.01, differing=4.0)]
    assert judge("accuracy", ["a"], few, seed=0).clients[0]["verdict"] == "undecided"


def test_verdicts():
    assert [verdict_of(*pair) for pair in ((0.1, 0.2), (-0.2, -0.1), (0.0, 0.1), (math.nan, math.nan))] == [
        *("gains", "loses", "undecided", "undecided"),
    ]


def test_different_data_is_refused_in_words():
    first, longer = said([1, 0, 1]), said([1, 0, 1, 1])
    other = first._replace(y=torch.tensor([0, 1, 0]))
    check_same_data({"x": (["a"], first), "y": (["a"], first)})
    for label, names, found, words in (
        ("clients", ["b"], first, r"x and clients do not use the same data: the clients differ \(a, b\)"),
        ("longer", ["a"], longer, "client 'a' has a different number of test examples"),
        ("other", ["a"], other, "the labels of the test examples differ"),
    ):
        with pytest.raises(DataError, match=words):
            check_same_data({"x": (["a"], first), label: (names, found)})


def test_intervals_of_several_are_those_of_each():
    samples = np.random.default_rng(0).normal(size=(4, 101))
    samples[1, :30] = np.nan
    samples[2, :60] = np.nan  # defined in fewer than half
    for row, found in zip(samples, intervals(samples), strict=True):
        there = row[~np.isnan(row)]
        expected = np.quantile(there, [0.025, 0.975]) if len(there) > 50 else (np.nan, np.nan)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        np.testing.assert_equal(interval(row), found)


def test_the_verdicts_of_older_versions_are_translated():
    old = {
        "clients": [{"client": "a", "verdict": "cannot tell"}, {"client": "b", "verdict": "gains"}],
        "overall": {"mean_gain": 0.1, "gains": 1, "loses": 0, "cannot_tell": 1},
        "level": 0.95,
    }
    new = with_current_verdicts(old)
    assert [row["verdict"] for row in new["clients"]] == ["undecided", "gains"]
    assert new["overall"] == {"mean_gain": 0.1, "gains": 1, "loses": 0, "undecided": 1}
    assert new["level"] == 0.95
    assert with_current_verdicts(new) == new


def test_several_methods_are_measured_as_each_alone_is(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    owner = torch.arange(60) % 3
    alone, *others = (said(torch.rand(60, generator=draw) < 0.7, owner.sort().values) for _ in range(3))
    names = ("a", "b", "c")
    together = measure_each(TASK, "macro_f1", dict(zip("xy", others, strict=True)), alone, names, seed=1)
    for ours, trial in zip(others, together.values(), strict=True):
        expected = measure(TASK, "macro_f1", ours, alone, names, seed=1)
        for found, wanted in zip(vars(trial).values(), vars(expected).values(), strict=True):
            assert np.array_equal(found, wanted)
    monkeypatch.setattr("coterie.evaluation.bootstrap.MAX_WEIGHT_CELLS", 100)  # a few resamples at a time
    again = measure(TASK, "macro_f1", others[0], alone, names, seed=1)
    assert np.array_equal(again.samples, together["x"].samples)


def test_models_that_say_the_same_are_scored_once(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    owner = (torch.arange(60) % 3).sort().values
    alone, ours = (said(torch.rand(60, generator=draw) < 0.7, owner) for _ in range(2))
    mixed = ours._replace(outputs=torch.where((owner == 1)[:, None], alone.outputs, ours.outputs))
    several, names = {"ours": ours, "mixed": mixed}, ("a", "b", "c")
    expected = {label: measure(TASK, "accuracy", each, alone, names, seed=1) for label, each in several.items()}
    scored = []
    monkeypatch.setattr("coterie.evaluation.benefit.statistic", lambda *about: scored.append(0) or statistic(*about))
    found = measure_each(TASK, "accuracy", several, alone, names, seed=1)
    assert len(scored) == 2 * 3  # of each client, its model trained alone and one other
    assert not found["mixed"].samples[1].any()
    for label, trial in found.items():
        assert np.array_equal(trial.samples, expected[label].samples)
        assert np.array_equal(trial.differing, expected[label].differing)
