"""Each kind's loss against its definition, and closed cases."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch.func import grad

from coterie.core.targets import Classes, Cox, Labels, Numbers, Ordered, Part, Several, Survival
from coterie.core.targets.labels import log1mexp
from coterie.core.targets.ordered import cumulative
from coterie.core.targets.survival import usual_times
from tests.core.targets.test_targets import SEVERAL, examples


def test_the_loss_of_labels_is_the_log_loss_of_each():
    outputs, _ = examples("multilabel")
    y = torch.randint(2, (12, 3), generator=torch.Generator().manual_seed(3)).float()
    expected = np.mean([log_loss(y[:, k], torch.sigmoid(outputs[:, k].double()), labels=[0, 1]) for k in range(3)])
    np.testing.assert_allclose(Labels(("a", "b", "c")).losses(outputs, y).mean(), expected, rtol=1e-5)


def test_a_missing_label_adds_nothing():
    target, outputs = Labels(("a", "b")), torch.tensor([[0.3, -50.0]])
    y = torch.tensor([[1.0, torch.nan]])
    torch.testing.assert_close(target.losses(outputs, y), -F.logsigmoid(outputs[:, 0]) / 2)
    gradient = grad(lambda out: target.losses(out, y).sum())(outputs)
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0


def test_levels_have_probabilities_that_are_differences_of_cumulative_ones():
    outputs, y = examples("ordinal")
    target, outputs = Ordered(4), outputs.double()
    at_least = torch.cat([torch.ones(12, 1), torch.sigmoid(cumulative(outputs)), torch.zeros(12, 1)], 1)
    assert bool((at_least.diff(dim=1) < 0).all()), "thresholds are in order"
    p = -at_least.diff(dim=1)
    torch.testing.assert_close(target.predictions(outputs), p)
    torch.testing.assert_close(target.losses(outputs, y), -p.log().gather(1, y[:, None])[:, 0])
    torch.testing.assert_close(target.predicted(outputs), (p.cumsum(1) < 0.5).sum(1))


def test_two_levels_are_a_logistic_regression():
    outputs, y = torch.randn(20, 1), torch.randint(2, (20,))
    expected = F.binary_cross_entropy_with_logits(outputs[:, 0], y.float(), reduction="none")
    torch.testing.assert_close(Ordered(2).losses(outputs, y), expected)


def test_levels_that_are_all_but_impossible_have_finite_losses():
    y = torch.tensor([0, 1, 2, 3])
    for extreme in (-80.0, 80.0):
        outputs = torch.full((4, 3), extreme)
        losses = Ordered(4).losses(outputs, y)
        gradient = grad(lambda out: Ordered(4).losses(out, y).sum())(outputs)
        assert bool(losses.isfinite().all())
        assert bool(gradient.isfinite().all())


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


def test_several_losses_are_weighed_and_those_of_what_is_missing_left_out():
    outputs, y = examples("multitask")
    parts = dict(zip([part.name for part in SEVERAL.parts], SEVERAL.outputs_of(outputs), strict=True))
    expected = torch.zeros(12)
    for i in range(12):
        if not y[i, 0].isnan():
            expected[i] += 2 * F.cross_entropy(parts["ill"][i], y[i, 0].long())
        if not y[i, 1].isnan():
            expected[i] += 0.5 * (parts["days"][i, 0] - y[i, 1]) ** 2
        if not y[i, 2:4].isnan().all():
            expected[i] += Labels(("u", "v")).losses(parts["marks"][i, None], y[i, None, 2:4])[0]
        if not y[i, 4].isnan():
            expected[i] += Ordered(4).losses(parts["grade"][i, None], y[i, 4, None].long())[0]
        if not y[i, 5:].isnan().any():
            expected[i] += Survival((1.0, 2.0)).losses(parts["death"][i, None], y[i, None, 5:])[0]
    torch.testing.assert_close(SEVERAL.losses(outputs, y), expected / 5.5)


def test_one_of_several_may_compare_examples():
    target = Several((Part("days", Numbers(())), Part("death", Cox())))
    assert target.joint
    _, y = examples("cox")
    both = torch.cat([torch.ones(12, 1), y], 1)
    both[3, 1:] = torch.nan  # in no risk set
    outputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    known = torch.arange(12) != 3
    theirs = Cox().losses(outputs[known, 1:], y[known])
    expected = ((outputs[known, 0] - 1) ** 2 + theirs) / 2
    torch.testing.assert_close(target.losses(outputs, both)[known], expected)


def test_usual_times_have_as_many_events_each():
    time = torch.arange(1, 101).double().numpy()
    y = np.stack([time, np.ones(100)], 1)
    ends = usual_times(y)
    assert len(ends) == 10
    counts, _ = np.histogram(time, [0, *ends])
    assert counts.min() >= 9
    assert counts.max() <= 11


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-8, -1e-3, -0.69, -0.7, -5.0, -40.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) if v > -0.1 else math.log1p(-math.exp(v)) for v in x.tolist()]
    np.testing.assert_allclose(log1mexp(x), expected, rtol=1e-12)


def test_classes_are_left_as_they_were():
    outputs, y = examples("classification")
    torch.testing.assert_close(Classes(3).losses(outputs, y), F.cross_entropy(outputs, y, reduction="none"))
