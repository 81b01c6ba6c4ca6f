"""Levels in an order, against their definition."""

import torch
import torch.nn.functional as F
from torch.func import grad

from coterie.core.targets import Ordered
from coterie.core.targets.ordered import cumulative
from tests.core.targets.test_target import examples


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
