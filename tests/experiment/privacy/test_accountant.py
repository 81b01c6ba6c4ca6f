"""The accountant against published values, and against what is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import comb, logsumexp
from scipy.stats import norm

from coterie.core.errors import ConfigError
from coterie.experiment.privacy.accountant import (
    Release,
    epsilon,
    find_noise,
    gaussian_delta,
    gaussian_epsilon,
    sampled_epsilon,
)


def test_abadis_moments_accountant_is_an_upper_bound_and_near():
    """Abadi et al. (2016), section 3.2 and figure 2: q = 0.01, sigma = 4, delta = 1e-5, 10,000 steps: epsilon 1.26.

    Their accountant takes moments of the privacy loss, which bounds epsilon from above; ours takes all of it.
    """
    found = epsilon([Release(0.01, 4.0, 10_000)], 1e-5)
    assert 0.9 < found < 1.26


PUBLISHED = [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)]  # TensorFlow Privacy's tutorials: "Select Parameters"


def renyi(rate, noise, steps, delta):
    """Abadi et al. (2016): moments of the privacy loss of a sampled Gaussian, for whole orders, and the tail bound."""

    def of(order):
        k = np.arange(order + 1)
        terms = np.log(comb(order, k)) + (order - k) * np.log1p(-rate) + k * np.log(rate) + k * (k - 1) / (2 * noise**2)
        return (steps * logsumexp(terms) + math.log(1 / delta)) / (order - 1)

    return min(of(order) for order in range(2, 200))


@pytest.mark.parametrize(("noise", "epochs", "published"), PUBLISHED)
def test_mnist_as_published(noise, epochs, published):
    """60,000 examples in minibatches of 256, delta = 1e-5.

    Published are upper bounds by moments, which we find again for the same rate and steps; ours is tighter.
    """
    rate, steps = 256 / 60_000, epochs * 60_000 // 256
    assert renyi(rate, noise, steps, 1e-5) == pytest.approx(published, rel=0.01)
    assert 0.5 * published < epsilon([Release(rate, noise, steps)], 1e-5) < published


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 40.0])
def test_the_gaussian_mechanism_is_the_closed_form(noise):
    """Balle and Wang (2018), theorem 8, integrated numerically: delta = int max(0, p(x) - e^eps q(x)) dx."""
    found = gaussian_epsilon(noise, 1e-5)
    x = np.linspace(-40 * noise, 1 + 40 * noise, 200_001)
    loss = np.maximum(0, norm.pdf(x, 1, noise) - math.exp(found) * norm.pdf(x, 0, noise))
    assert np.trapezoid(loss, x) == pytest.approx(1e-5, rel=1e-3)
    assert gaussian_delta(noise, found) == pytest.approx(1e-5, rel=1e-6)


def test_composition_of_gaussians_is_one_with_less_noise():
    assert epsilon([Release(1.0, 6.0, 9), Release(1.0, 4.0, 0)], 1e-5) == pytest.approx(gaussian_epsilon(2.0, 1e-5))
    both = epsilon([Release(1.0, 3.0, 1), Release(1.0, 4.0, 1)], 1e-5)
    assert both == pytest.approx(gaussian_epsilon(1 / math.hypot(1 / 3, 1 / 4), 1e-5))


def test_sampling_nearly_everybody_is_nearly_the_closed_form_and_rarer_is_cheaper():
    all_of_them = gaussian_epsilon(2.0 / math.sqrt(10), 1e-5)
    nearly = epsilon([Release(0.999, 2.0, 10)], 1e-5)
    assert nearly == pytest.approx(all_of_them, rel=0.02)
    assert epsilon([Release(0.1, 2.0, 10)], 1e-5) < 0.5 * nearly


def test_nothing_costs_nothing_and_no_noise_everything():
    assert epsilon([], 1e-5) == epsilon([Release(0.5, 1.0, 0)], 1e-5) == 0
    assert epsilon([Release(0.5, 0.0, 1)], 1e-5) == math.inf
    assert sampled_epsilon(10, 2, 0.0, 3, 1e-5) == math.inf


def test_sampling_without_replacement_is_cheaper_than_everybody_if_few_are_sampled():
    few, more = (sampled_epsilon(1000, k, 4.0, 100, 1e-5) for k in (10, 100))
    assert few < more < gaussian_epsilon(4.0 / 2 / math.sqrt(100), 1e-5)


def test_the_noise_that_is_found_costs_what_was_asked_for():
    def cost(noise):
        return gaussian_epsilon(noise, 1e-5)

    found = find_noise(cost, 2.0)
    assert cost(found) <= 2.0 < cost(found * 0.997)
    # Dong, Roth and Su (2022): 1/noise is mu, and epsilon(delta = 1e-5) of mu = 1 is 4.38.
    assert gaussian_epsilon(1.0, 1e-5) == pytest.approx(4.38, abs=0.01)
    with pytest.raises(ConfigError, match="no noise is enough"):
        find_noise(lambda noise: 5.0, 2.0)
