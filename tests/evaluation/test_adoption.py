import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from coterie.core.task import Task
from coterie.evaluation import Predictions
from coterie.evaluation.adoption import (
    AVERAGE,
    BELOW_ONE_ERROR,
    ERRORS,
    FEDERATED,
    LOCAL,
    MIN_EXAMPLES,
    at_threshold,
    average,
    choose,
    compared,
    quantile,
    sureness,
    temperature,
    threshold,
)

TASK = Task(nn.Linear(1, 2), num_classes=2)
REGRESSION = Task(nn.Linear(1, 1), "regression")


def site(examples=40, seed=0, noise=(1.0, 1.0)):
    """Predictions of two models whose logits are the truth's and noise, and the labels."""
    draw = torch.Generator().manual_seed(seed)
    truth = 2 * torch.randn(examples, generator=draw)
    y = (torch.rand(examples, generator=draw) < truth.sigmoid()).long()
    owner = torch.zeros(examples, dtype=torch.int64)
    logits = [truth + each * torch.randn(examples, generator=draw) for each in noise]
    return [Predictions(torch.stack([torch.zeros(examples), z], 1), y, owner) for z in logits]


def test_the_quantile_is_one_standard_error():
    assert quantile(10**7) == pytest.approx(1, abs=1e-6)
    assert quantile(7) == pytest.approx(stats.t.ppf(stats.norm.cdf(1), 7))


def test_the_difference_is_that_of_the_calibrated_losses_with_its_standard_error():
    pair = site(30)
    d = [F.cross_entropy(one.outputs / temperature(one), one.y, reduction="none").numpy() for one in pair]
    d = (d[1] - d[0]).astype(float)
    found = compared(TASK, *pair)
    assert found.mean == pytest.approx(d.mean(), rel=1e-5)
    assert found.error == pytest.approx(stats.sem(d), rel=1e-4)


def test_being_too_sure_is_no_reason_to_give_way():
    """The local model ranks better, and is far too sure; the other one is nearly random."""
    good, bad = site(60, noise=(0.5, 20.0))
    sure, random = good._replace(outputs=20 * good.outputs), bad._replace(outputs=bad.outputs / 20)
    assert F.cross_entropy(sure.outputs, sure.y) > F.cross_entropy(random.outputs, random.y)
    assert choose(TASK, random, sure).kept == LOCAL


def test_one_standard_error_is_the_limit():
    """Regressions whose squared errors differ by d_i."""
    n, owner, y = 16, torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.float64)
    alone = Predictions(torch.ones(n, 1, dtype=torch.float64), y, owner)
    noise = torch.tensor([0.1, -0.1] * (n // 2), dtype=torch.float64)
    limit = ERRORS * quantile(n - 1)
    for factor in (0.98, 1.02):
        d = noise + factor * limit * float(noise.std()) / 4
        ours = Predictions((1 - d).sqrt()[:, None], y, owner)
        assert sureness(compared(REGRESSION, ours, alone)) == pytest.approx(factor * limit)
        assert choose(REGRESSION, ours, alone).kept in ((AVERAGE, LOCAL) if factor < 1 else (AVERAGE, FEDERATED))


def test_a_regression_is_compared_by_squared_errors():
    y, owner = torch.randn(20), torch.zeros(20, dtype=torch.int64)
    near, far = (Predictions(y[:, None] + each, y, owner) for each in (0.1, 1.0))
    assert compared(REGRESSION, near, far).mean == pytest.approx(1 - 0.01, abs=1e-5)
    assert choose(REGRESSION, near, far).kept == FEDERATED
    assert choose(REGRESSION, far, near).kept == LOCAL


def test_the_average_is_of_probabilities_or_of_outputs():
    a, b = torch.randn(2, 5, 3)
    both = average(TASK.target, a, b).softmax(1)
    torch.testing.assert_close(both, (a.softmax(1) + b.softmax(1)) / 2)
    torch.testing.assert_close(average(REGRESSION.target, a, b), (a + b) / 2)
    y = torch.tensor([0, 1, 2, 0, 1])
    losses = [F.cross_entropy(each, y) for each in (average(TASK.target, a, b), a, b)]
    assert losses[0] <= (losses[1] + losses[2]) / 2


def test_the_better_model_is_kept():
    good, bad = site(60, noise=(0.2, 4.0))
    assert choose(TASK, good, bad).kept in (FEDERATED, AVERAGE)
    assert choose(TASK, bad, good).kept == LOCAL


def test_equal_models_are_no_reason_to_change():
    one, _ = site()
    found = choose(TASK, one, one)
    assert (found.kept, found.reason) == (LOCAL, "undecided")
    assert found.federated.mean == 0


def test_few_examples_decide_nothing():
    for examples, kept in ((MIN_EXAMPLES - 1, LOCAL), (MIN_EXAMPLES, FEDERATED)):
        y = torch.arange(examples) % 2
        good = Predictions(F.one_hot(y, 2) * 4.0, y, torch.zeros(examples, dtype=torch.int64))
        bad = good._replace(outputs=-good.outputs)
        assert choose(TASK, good, bad).kept == kept
    assert choose(TASK, *(each.of(0) for each in site(1))).kept == LOCAL


def test_one_class_is_enough_to_decide():
    y, owner = torch.ones(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    good, bad = (Predictions(torch.tensor([[0.0, z]]).expand(12, 2), y, owner) for z in (2.0, 0.0))
    assert choose(TASK, good, bad).kept == FEDERATED
    assert choose(TASK, bad, good).kept == LOCAL


def test_models_that_are_no_better_are_rarely_taken():
    equal, worse = (
        np.mean([sureness(compared(TASK, *site(30, seed, noise))) > quantile(29) for seed in range(300)])
        for noise in ((1, 1), (2, 1))
    )
    assert equal == pytest.approx(1 - BELOW_ONE_ERROR, abs=3 * np.sqrt(0.16 * 0.84 / 300))
    assert worse < 0.07


@pytest.mark.parametrize("true", [0.5, 1.0, 3.0])
def test_the_temperature_is_found(true):
    one, _ = site(4000, noise=(0.0, 0.0))
    assert temperature(one._replace(outputs=one.outputs * true)) == pytest.approx(true, rel=0.08)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("better", [-1.0, 0.0, 2.0])
def test_the_temperature_is_the_best_of_a_fine_grid(scale, better):
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(5, (50,), generator=draw)
    outputs = scale * (torch.randn(50, 5, generator=draw) + better * F.one_hot(y, 5))
    found = math.log(temperature(Predictions(outputs, y, torch.zeros_like(y))))

    def cost(u):
        return float(F.cross_entropy(outputs.double() / math.exp(u), y, reduction="sum")) + u**2 / 2

    assert cost(found) <= min(map(cost, np.linspace(-3, 3, 601).tolist())) * (1 + 1e-9)


def test_a_class_that_is_ruled_out_has_no_part_in_the_temperature():
    y = torch.tensor([0, 1, 1, 0])
    draw = torch.Generator().manual_seed(0)
    two = torch.randn(4, 2, generator=draw)
    three = torch.cat([two, torch.full((4, 1), -math.inf)], 1)
    alike = (temperature(Predictions(each, y, torch.zeros_like(y))) for each in (two, three))
    assert next(alike) == pytest.approx(next(alike), rel=1e-9)


def test_the_temperature_of_a_few_examples_stays_near_1():
    y = torch.tensor([0, 1, 1])
    one = Predictions(F.one_hot(y, 2) * 2.0, y, torch.zeros(3, dtype=torch.int64))
    assert 0.3 < temperature(one) < 1


def test_the_threshold_is_the_best_on_validation():
    one, _ = site(200)
    shifted = one._replace(outputs=at_threshold(one.outputs, 0.9).float())
    found = threshold(TASK, "accuracy", shifted)
    scores = {
        t: ((shifted.outputs.softmax(1)[:, 1] > t).long() == shifted.y).double().mean().item()
        for t in [*np.linspace(0.001, 0.999, 999).tolist(), found]
    }
    assert scores[found] == max(scores.values())
    assert found < 0.3


def test_a_threshold_needs_examples_of_both_classes():
    y = torch.ones(30, dtype=torch.int64)
    one = Predictions(torch.randn(30, 2), y, torch.zeros(30, dtype=torch.int64))
    assert threshold(TASK, "accuracy", one) == 0.5
    assert threshold(TASK, "accuracy", Predictions(*(each[:4] for each in site()[0]))) == 0.5


def test_outputs_at_a_threshold_predict_class_1_above_it():
    outputs = torch.randn(50, 2)
    found = at_threshold(outputs, 0.7).argmax(1)
    assert torch.equal(found, (outputs.softmax(1)[:, 1] > 0.7).long())
