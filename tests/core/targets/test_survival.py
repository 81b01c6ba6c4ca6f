"""Times until an event, against definitions and closed cases."""

import math

import numpy as np
import torch
from torch.func import grad

from coterie.core.targets import Cox, Survival
from coterie.core.targets.survival import usual_times
from tests.core.targets.test_target import examples


def survival_likelihood(hazard, times, time, event):
    """The likelihood of one example, interval by interval."""
    likelihood, start = 1.0, 0.0
    for h, end in zip(hazard, times, strict=True):
        if event and start < time <= end:
            return likelihood * h
        if time > end or (time == end and not event):
            likelihood *= 1 - h
        start = end
    return likelihood


def test_survival_is_the_likelihood_of_intervals_survived_and_of_the_event():
    times = (0.5, 1.0, 2.0)
    cases = torch.tensor([[t, e] for t in (0.2, 0.5, 0.7, 1.0, 1.7, 2.0, 2.5) for e in (0.0, 1.0)])
    outputs = torch.randn(len(cases), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hazard = torch.sigmoid(outputs)
    each = zip(hazard, cases.tolist(), strict=True)
    expected = [-math.log(survival_likelihood(h.tolist(), times, t, e)) for h, (t, e) in each]
    np.testing.assert_allclose(Survival(times).losses(outputs, cases), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(Survival(times).predictions(outputs), (1 - hazard).cumprod(1))


def test_the_best_hazards_are_those_of_the_life_table():
    """Deaths over those at risk, interval by interval: there the gradient is 0."""
    times = (1.0, 2.0)
    y = torch.tensor([[0.4, 1], [0.9, 1], [1.0, 0], [1.5, 1], [2.0, 0], [3.0, 1], [3.0, 0], [0.5, 0]])
    # 1st interval: 2 deaths, survived by the 5 from 1.0 on. 2nd: 1 death, survived by 2.0 (its end), 3.0 and 3.0.
    hazard = torch.tensor([2 / 7, 1 / 4], dtype=torch.float64)
    gradient = grad(lambda logit: Survival(times).losses(logit.expand(len(y), 2), y).sum())(torch.logit(hazard))
    torch.testing.assert_close(gradient, torch.zeros(2, dtype=torch.float64), atol=1e-7, rtol=0)


def test_risk_is_the_area_above_the_survival_curve():
    """S falls to 1/2, then to 1/4: the areas are those of trapezoids, 1 * (0 + 1/2) / 2 and 2 * (1/2 + 3/4) / 2."""
    np.testing.assert_allclose(Survival((1.0, 3.0)).risk(torch.zeros(1, 2)), 0.25 + 1.25)


def slow_cox(risk, y, weight):
    """By its definition, example by example."""
    losses = []
    for i, (time, event) in enumerate(y.tolist()):
        at_risk = [weight[j] * math.exp(risk[j]) for j in range(len(y)) if y[j, 0] >= time]
        losses.append(math.log(sum(at_risk)) - float(risk[i]) if event and weight[i] > 0 else 0.0)
    return losses


def test_cox_is_the_partial_likelihood_with_weights_and_ties():
    outputs, y = examples("cox")
    y[:, 0] = y[:, 0].round()  # ties
    weight = torch.tensor([1, 0, 2, 0.5, 1, 1, 0, 1, 1, 3, 1, 1.0])
    expected = slow_cox(outputs[:, 0].double(), y, weight)
    np.testing.assert_allclose(Cox().losses(outputs, y, weight), expected, rtol=1e-4, atol=1e-5)
    kept = weight > 0
    alone = Cox().losses(outputs[kept], y[kept], weight[kept])
    torch.testing.assert_close(Cox().losses(outputs, y, weight)[kept], alone)  # padding is in no risk set


def test_an_example_that_counts_twice_is_as_two():
    outputs, y = examples("cox")
    weight = torch.tensor([1.0, 2.0] * 6)
    twice = torch.arange(12).repeat_interleave(weight.long())
    one = (Cox().losses(outputs, y, weight) * weight).sum()
    torch.testing.assert_close(one, Cox().losses(outputs[twice], y[twice]).sum())


def test_cox_of_padding_only_is_zero_with_a_gradient_of_zero():
    outputs, y = examples("cox")
    found = grad(lambda out: Cox().losses(out, y, torch.zeros(12)).sum())(outputs)
    assert bool((found == 0).all())


def test_usual_times_have_as_many_events_each():
    time = torch.arange(1, 101).double().numpy()
    y = np.stack([time, np.ones(100)], 1)
    ends = usual_times(y)
    assert len(ends) == 10
    counts, _ = np.histogram(time, [0, *ends])
    assert counts.min() >= 9
    assert counts.max() <= 11
