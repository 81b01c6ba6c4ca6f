import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    f1_score,
    log_loss,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from torch import nn

from coterie.core.task import Task
from coterie.evaluation import score
from coterie.evaluation.kinds.classes import BINS
from coterie.evaluation.metrics import KNOWN, average, mean, with_one_nan
from tests.evaluation.test_bootstrap import some


def calibration_error(probability, y):
    """By its definition, bin by bin."""
    confidence, right = probability.max(1), probability.argmax(1) == y
    total = 0.0
    for k in range(BINS):
        there = (confidence > k / BINS) & (confidence <= (k + 1) / BINS)
        if there.any():
            total += there.mean() * abs(right[there].mean() - confidence[there].mean())
    return total


def test_every_metric_has_a_range_that_its_values_keep():
    draw = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(400, 3, generator=draw) * 30, torch.randint(3, (400,), generator=draw)
    owner = torch.arange(40).repeat_interleave(10)
    found = score(Task(nn.Linear(2, 3), num_classes=3), outputs, y, owner, 40)
    found |= score(Task(nn.Linear(2, 1), kind="regression"), outputs[:, :1] * 1e6, outputs[:, 1:2], owner, 40)
    for kind in ("multilabel", "ordinal", "survival"):
        task, one = some(kind)
        found |= score(task, *one, 1)
    assert found.keys() == KNOWN.keys()
    for name, values in found.items():
        known = values[~np.isnan(values)]
        assert ((KNOWN[name].low <= known) & (known <= KNOWN[name].high)).all(), name


def test_one_client_cannot_move_the_trimmed_mean_beyond_the_others():
    draw = np.random.default_rng(0)
    for others in (2, 3, 4, 9, 30):
        honest = [*draw.random(others), math.nan]
        for liar in (-1e30, 0.5, 1e30, math.nan):
            found = average([*honest, liar], "trimmed", [1.0] * (others + 1) + [1e9])
            assert min(honest[:-1]) <= found <= max(honest[:-1])
    assert average([0.0, 1.0, math.nan], "trimmed") == 0.5, "of two, nobody can say which is wrong"
    assert average([5.0, 1.0, 2.0, 3.0, 100.0, math.nan], "trimmed") == pytest.approx(10 / 3)
    ten = [*range(8), -1e30, 1e30]
    assert average(ten, "trimmed") == np.mean([1, 2, 3, 4, 5, 6])
    assert average(ten, None) == average(ten, "mean") == mean(ten)
    assert math.isnan(average([math.nan], "trimmed"))


def test_auroc_with_ties_and_two_classes_equals_scikit_learn():
    draw = np.random.default_rng(1)
    owner = torch.arange(30).repeat_interleave(20)
    y = torch.from_numpy(draw.integers(2, size=600))
    logit = torch.from_numpy(draw.integers(4, size=600)).float()  # four scores: mostly ties
    outputs = torch.stack([-logit, logit], 1)
    found = score(Task(nn.Linear(2, 2), num_classes=2), outputs, y, owner, 30)["auroc"]
    expected = [roc_auc_score(y[owner == i], logit[owner == i]) for i in range(30)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_auroc_tells_apart_what_is_almost_certain():
    outputs = torch.tensor([[0.0, 18.0], [0.0, 22.0], [0.0, 26.0]])  # all have p = 1 in float32
    y, owner = torch.tensor([0, 1, 1]), torch.zeros(3, dtype=torch.long)
    assert score(Task(nn.Linear(2, 2), num_classes=2), outputs, y, owner, 1)["auroc"] == [1.0]


def test_auroc_of_one_class_is_undefined_and_left_out_of_means():
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [0.5, 0.0]])
    y, owner = torch.tensor([1, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    found = score(Task(nn.Linear(2, 2), num_classes=2), outputs, y, owner, 2)["auroc"]
    assert np.isnan(found[0])
    assert found[1] == 1.0
    assert mean(found) == 1.0
    assert np.isnan(mean(found[:1]))
    assert with_one_nan(found) == with_one_nan(found.copy())  # one NaN


def test_weighted_mean():
    assert mean([1.0, 2.0, np.nan], [1, 3, 5]) == pytest.approx(1.75)


def test_perfect_calibration_is_zero_and_false_certainty_is_one():
    task, owner = Task(nn.Linear(2, 2), num_classes=2), torch.zeros(4, dtype=torch.long)
    outputs = torch.zeros(4, 2)  # half and half, and right half of the time
    assert score(task, outputs, torch.tensor([0, 0, 1, 1]), owner, 1)["ece"] == pytest.approx([0.0])
    certain = torch.tensor([[100.0, 0.0]]).expand(4, 2)
    assert score(task, certain, torch.ones(4, dtype=torch.long), owner, 1)["ece"] == pytest.approx([1.0])


def test_a_label_a_pixel_counts_as_an_example_each():
    draw = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(6, 3, 2, 2, generator=draw), torch.randint(3, (6, 2, 2), generator=draw)
    owner = torch.tensor([0, 0, 1, 1, 1, 1])
    task = Task(nn.Linear(2, 3), num_classes=3)
    dense = score(task, outputs, y, owner, 2)
    flat = score(task, outputs.permute(0, 2, 3, 1).reshape(24, 3), y.flatten(), owner.repeat_interleave(4), 2)
    for name, value in flat.items():
        np.testing.assert_allclose(dense[name], value, err_msg=name)


def test_several_targets_equal_scikit_learn():
    draw = np.random.default_rng(0)
    y = draw.standard_normal((30, 3))
    outputs = y + draw.standard_normal((30, 3))
    args = (torch.from_numpy(outputs), torch.from_numpy(y), torch.zeros(30, dtype=torch.long))
    found = score(Task(nn.Linear(2, 3), "regression"), *args, 1)
    np.testing.assert_allclose(found["r2"], r2_score(y, outputs))
    np.testing.assert_allclose(found["rmse"], mean_squared_error(y, outputs) ** 0.5)


def test_classification_equals_scikit_learn_for_every_client():
    draw = np.random.default_rng(0)
    owner = np.repeat([0, 1, 2], [40, 7, 90])
    y = draw.integers(4, size=len(owner))
    y[owner == 1] %= 2  # this client lacks two classes
    logits = draw.standard_normal((len(owner), 4))
    task = Task(nn.Linear(2, 4), num_classes=4)
    scores = score(task, torch.from_numpy(logits), torch.from_numpy(y), torch.from_numpy(owner), 3)
    probability = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for i in range(3):
        own, found = y[owner == i], logits[owner == i].argmax(1)
        np.testing.assert_allclose(scores["accuracy"][i], accuracy_score(own, found))
        np.testing.assert_allclose(scores["loss"][i], log_loss(own, probability[owner == i], labels=range(4)))
        # scikit-learn ignores predictions of classes that do not occur, and so do we
        recall = [np.mean(found[own == label] == label) for label in np.unique(own)]
        np.testing.assert_allclose(scores["balanced_accuracy"][i], np.mean(recall))
        np.testing.assert_allclose(scores["macro_f1"][i], f1_score(own, found, average="macro"))
        rest = [roc_auc_score(own == label, probability[owner == i][:, label]) for label in np.unique(own)]
        np.testing.assert_allclose(scores["auroc"][i], np.mean(rest))
        np.testing.assert_allclose(scores["ece"][i], calibration_error(probability[owner == i], own))
    own = owner == 0
    whole = roc_auc_score(y[own], probability[own], multi_class="ovr", average="macro")
    np.testing.assert_allclose(scores["auroc"][0], whole)
    np.testing.assert_allclose(
        scores["balanced_accuracy"][0], balanced_accuracy_score(y[owner == 0], logits[owner == 0].argmax(1))
    )


def test_regression_equals_scikit_learn_for_every_client():
    draw = np.random.default_rng(0)
    owner = np.repeat([0, 1], [30, 12])
    y = draw.standard_normal(42)
    outputs = y[:, None] + 0.3 * draw.standard_normal((42, 1))
    task = Task(nn.Linear(2, 1), "regression")
    scores = score(task, torch.from_numpy(outputs), torch.from_numpy(y), torch.from_numpy(owner), 2)
    for i in range(2):
        own, found = y[owner == i], outputs[owner == i, 0]
        np.testing.assert_allclose(scores["rmse"][i], mean_squared_error(own, found) ** 0.5)
        np.testing.assert_allclose(scores["r2"][i], r2_score(own, found))
        np.testing.assert_allclose(scores["loss"][i], mean_squared_error(own, found))
