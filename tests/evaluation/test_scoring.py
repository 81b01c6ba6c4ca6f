"""Metrics of each kind of target against scikit-learn, slow definitions and closed cases."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import cohen_kappa_score, f1_score, mean_absolute_error, roc_auc_score
from torch import nn

from coterie.core.errors import ConfigError, CoterieError
from coterie.core.targets import Classes, Cox, Labels, Ordered, Survival
from coterie.core.task import Task
from coterie.evaluation import Predictions, score
from coterie.evaluation.kinds import several
from coterie.evaluation.kinds.survival import concordance
from coterie.evaluation.metrics import about, add, better, metric
from coterie.evaluation.scoring import default_metric, metrics_of, names_of, statistic
from tests.core.targets.test_target import SEVERAL, TARGETS, examples


def test_labels_are_scored_as_scikit_learn_scores_each():
    draw = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(90, 3, generator=draw), torch.randint(2, (90, 3), generator=draw).float()
    y = torch.where(torch.rand(90, 3, generator=draw) < 0.2, torch.nan, y)
    owner = torch.arange(90) % 3
    found = score(Task(nn.Linear(2, 3), Labels(("a", "b", "c"))), outputs, y, owner, 3)
    for i in range(3):
        areas, f1s, right = [], [], []
        for k in range(3):
            known = (owner == i) & ~y[:, k].isnan()
            truth, logit = y[known, k].numpy(), outputs[known, k].numpy()
            areas.append(roc_auc_score(truth, logit))
            f1s.append(f1_score(truth, logit > 0))
            right.append((truth == 1) == (logit > 0))
        np.testing.assert_allclose(found["auroc"][i], np.mean(areas))
        np.testing.assert_allclose(found["f1"][i], np.mean(f1s))
        np.testing.assert_allclose(found["accuracy"][i], np.concatenate(right).mean())


def test_a_label_without_both_values_does_not_count_for_the_auroc():
    y = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, torch.nan]])
    outputs = torch.tensor([[2.0, 0.0], [1.0, 1.0], [3.0, 2.0]])
    task = Task(nn.Linear(2, 2), Labels(("a", "b")))
    assert score(task, outputs, y, torch.zeros(3, dtype=torch.int64), 1)["auroc"] == 1
    assert np.isnan(score(task, outputs, torch.ones(3, 2), torch.zeros(3, dtype=torch.int64), 1)["auroc"])


def test_levels_are_scored_by_mean_absolute_error_and_weighted_kappa():
    outputs, y = examples("ordinal", 80)
    target, owner = Ordered(4), torch.arange(80) % 2
    found = score(Task(nn.Linear(2, 3), target), outputs, y, owner, 2)
    level = target.predicted(outputs)
    for i in range(2):
        mine = owner == i
        np.testing.assert_allclose(found["mae"][i], mean_absolute_error(y[mine], level[mine]))
        kappa = cohen_kappa_score(y[mine], level[mine], weights="quadratic", labels=range(4))
        np.testing.assert_allclose(found["kappa"][i], kappa)
        np.testing.assert_allclose(found["accuracy"][i], (y[mine] == level[mine]).double().mean())


def test_kappa_of_one_level_only_is_not_defined():
    task = Task(nn.Linear(2, 2), Ordered(3))
    outputs, y = torch.tensor([[-5.0, 0.0]] * 4), torch.zeros(4, dtype=torch.int64)
    found = score(task, outputs, y, torch.zeros(4, dtype=torch.int64), 1)
    assert np.isnan(found["kappa"][0])
    assert found["mae"][0] == 0


def slow_concordance(risk, y):
    """Pair by pair, as Harrell defines it."""
    agree = number = 0.0
    for (time, event), mine in zip(y.tolist(), risk, strict=True):
        for (later, other), theirs in zip(y.tolist(), risk, strict=True):
            if event and (time < later or (time == later and not other)):
                number += 1
                agree += 1.0 if mine > theirs else 0.5 if mine == theirs else 0.0
    return agree / number if number else math.nan


def test_concordance_is_that_of_all_pairs(monkeypatch):
    draw = np.random.default_rng(0)
    y = np.stack([draw.integers(1, 12, 60), draw.random(60) < 0.5], 1).astype(float)
    risk = draw.integers(0, 8, 60).astype(float)  # both with ties
    expected = slow_concordance(risk, y)
    assert concordance(risk, y) == pytest.approx(expected, abs=1e-15)
    monkeypatch.setattr("coterie.evaluation.kinds.survival.PAIRS_AT_ONCE", 200)  # a few rows at a time
    assert concordance(risk, y) == pytest.approx(expected, abs=1e-15)
    one = Predictions(torch.from_numpy(risk[:, None]), torch.from_numpy(y), torch.zeros(60, dtype=torch.int64))
    task = Task(nn.Linear(1, 1), Cox())
    assert statistic(task, "concordance", one)(np.ones((1, 60), np.float32))[0] == pytest.approx(expected)


@pytest.mark.parametrize("at_once", [10**6, 10])  # all pairs of all clients together, and one client after another
def test_concordance_of_many_clients_is_each_ones(at_once, monkeypatch):
    monkeypatch.setattr("coterie.evaluation.kinds.survival.PAIRS_AT_ONCE", at_once)
    draw = np.random.default_rng(1)
    y = np.stack([draw.integers(1, 9, 90), draw.random(90) < 0.4], 1).astype(float)
    risk, owner = draw.integers(0, 6, 90).astype(float), draw.integers(0, 12, 90)  # of 14; the last two have nothing
    task = Task(nn.Linear(1, 1), Cox())
    outputs = torch.from_numpy(risk[:, None])
    found = score(task, outputs, torch.from_numpy(y), torch.from_numpy(owner), 14)["concordance"]
    expected = [slow_concordance(risk[owner == i], y[owner == i]) for i in range(14)]
    np.testing.assert_array_equal(found, expected)


def test_concordance_in_closed_cases():
    y = np.array([[1.0, 1], [2, 1], [3, 0], [4, 1]])
    assert concordance(np.array([4.0, 3, 2, 1]), y) == 1
    assert concordance(np.array([1.0, 2, 3, 4]), y) == 0
    assert concordance(np.zeros(4), y) == 0.5
    assert math.isnan(concordance(np.zeros(4), np.array([[1.0, 0]] * 4)))  # nobody's event was seen
    assert math.isnan(concordance(np.zeros(2), np.array([[1.0, 1]] * 2)))  # at the same time
    assert concordance(np.array([1.0, 0]), np.array([[1.0, 1], [1, 0]])) == 1  # censored then: it was longer


def test_the_concordance_of_hazards_follows_the_expected_time():
    """One outlives the other in every interval."""
    outputs, y = torch.tensor([[2.0, 2.0], [-2.0, -2.0]]), torch.tensor([[0.5, 1.0], [1.5, 1.0]])
    found = score(Task(nn.Linear(1, 2), Survival((1.0, 2.0))), outputs, y, torch.zeros(2, dtype=torch.int64), 1)
    assert found["concordance"][0] == 1


def test_clients_are_not_compared_with_each_other():
    outputs, y = examples("cox", 20)
    task, owner = Task(nn.Linear(1, 1), Cox()), torch.arange(20) // 10
    both = score(task, outputs, y, owner, 2)
    for i in range(2):
        mine = owner == i
        alone = score(task, outputs[mine], y[mine], torch.zeros(10, dtype=torch.int64), 1)
        for name in ("concordance", "loss"):
            np.testing.assert_allclose(both[name][i], alone[name][0], rtol=1e-6)


def test_several_targets_are_scored_as_each_of_them_where_it_is_known():
    outputs, y = examples("multitask", 60)
    owner = torch.arange(60) % 2
    y[owner == 1, 1] = torch.nan  # the second client never records one
    found = score(Task(nn.Linear(2, SEVERAL.num_outputs), SEVERAL), outputs, y, owner, 2)
    assert list(found) == [*several.names(SEVERAL)]
    assert np.isnan(found["days.rmse"][1])
    out, columns = SEVERAL.outputs_of(outputs), SEVERAL.columns_of(y)
    for part, own, column in zip(SEVERAL.parts, out, columns, strict=True):
        known = part.known(column)
        task = Task(nn.Linear(2, 1), part.target)
        mine = score(task, own[known], part.own(column, known)[known], owner[known], 2)
        for name in names_of(part.target)[:-1]:
            np.testing.assert_allclose(found[f"{part.name}.{name}"], mine[name])


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_every_metric_has_a_direction_and_the_default_is_one_of_them(target):
    assert default_metric(target) in names_of(target)
    assert names_of(target)[-1] == "loss"
    for name in names_of(target):
        assert better(name) in (max, min)


@metric(better=min, low=0.0, high=1.0)
def brier(p, y):
    return ((p[:, 1] - y) ** 2).mean()


@metric(better=max, low=0.0, high=1.0)
def wrong_range(p, y):
    return 3.0


@metric(better=max)
def no_number(p, y):
    return "good"


def undirected(p, y):
    return 0.0


def test_a_metric_of_ones_own_is_scored_resampled_and_known_by_its_name():
    assert add(["tests.evaluation.test_scoring:brier", brier]) == ("brier",)
    assert (about("brier").low, better("brier")) == (0.0, min)
    task = Task(nn.Linear(2, 2), Classes(2), metrics=("brier",))
    assert metrics_of(task)[-1] == "brier"
    outputs, y = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [0.0, 0.0]]), torch.tensor([1, 1, 0])
    owner = torch.tensor([0, 0, 1])
    np.testing.assert_allclose(score(task, outputs, y, owner, 2)["brier"], [(0.25 + 0.0625) / 2, 0.25], rtol=1e-6)
    one = Predictions(outputs[:2], y[:2], owner[:2])
    found = statistic(task, "brier", one)(np.array([[1, 1], [2, 0], [0, 2]], np.float32))
    np.testing.assert_allclose(found, [0.15625, 0.25, 0.0625], rtol=1e-6)


@pytest.mark.parametrize(
    ("own", "words"), [(wrong_range, "says that it is 0 to 1"), (no_number, "instead of one number")]
)
def test_a_metric_that_breaks_its_word_is_stopped(own, words):
    (name,) = add([own])
    task = Task(nn.Linear(2, 2), Classes(2), metrics=(name,))
    with pytest.raises(CoterieError, match=words):
        score(task, torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), 1)


def test_what_is_no_metric_is_refused_with_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        add(["tests.evaluation.test_scoring:undirected", "tests.evaluation.test_scoring:nothing", "nobodys"])
    text = str(error.value)
    assert "which values are better" in text
    assert "cannot be imported" in text
    assert "give the import path" in text

    @metric(better=max)
    def auroc(p, y):
        return 0.0

    with pytest.raises(ConfigError, match="choose another name"):
        add([auroc])
    with pytest.raises(ConfigError, match="better=max or better=min"):
        metric(better=sorted)


def test_what_a_script_defines_is_not_written_down_as_a_path(monkeypatch):
    """`python study.py` is `__main__`, which another process that resumes the run cannot import from."""
    import sys

    from coterie.experiment.given import path_of

    assert brier.path == "tests.evaluation.test_scoring:brier"
    assert path_of(no_number.function) is None
    assert path_of(score) == "coterie.evaluation.scoring:score"
    in_script = metric(better=min)(lambda p, y: 0.0)
    object.__setattr__(in_script, "name", "in_script")
    in_script.function.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "in_script", in_script, raising=False)
    assert in_script.path == "in_script"

    def loss(outputs, y): ...

    loss.__module__, loss.__qualname__ = "__main__", "loss"
    monkeypatch.setattr(sys.modules["__main__"], "loss", loss, raising=False)
    assert path_of(loss) is None
