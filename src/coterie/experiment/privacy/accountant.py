"""The accountant: what releases with Gaussian noise cost together, as epsilon at a given delta.

The composition is Google's `dp-accounting`: privacy loss distributions (Doroshenko et al. 2022), rounded up, so that
epsilon is an upper bound. This file says in its words what is composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.special import log_ndtr

from coterie.core.errors import ConfigError

STEP = 2e-3  # of the privacy loss; a smaller one takes longer, and epsilon becomes smaller in its third digit
OVERFLOW_SHARE = 0.01  # of delta, for minibatches that are too full
MAX_NOISE = 2.0**20
PRECISE = 5e-4  # of the noise that is found, relative


class Release(NamedTuple):
    """The same kind of release, several times: a sum over examples plus noise."""

    rate: float  # the chance that an example is in the sum
    noise: float  # standard deviation of the noise, relative to what an example can contribute
    times: int


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return the epsilon of all releases together, each of which may depend on those before."""
    releases = [each for each in releases if each.times]
    if not releases:
        return 0.0
    if any(each.noise == 0 for each in releases):
        return math.inf
    if all(each.rate == 1 for each in releases):
        return gaussian_epsilon(1 / math.sqrt(sum(each.times / each.noise**2 for each in releases)), delta)
    library = _library()
    accountant = library.pld.PLDAccountant(value_discretization_interval=STEP)
    for each in releases:
        event = library.GaussianDpEvent(each.noise)
        if each.rate < 1:
            event = library.PoissonSampledDpEvent(each.rate, event)
        accountant.compose(event, each.times)
    return float(accountant.get_epsilon(delta))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism, in closed form (Balle and Wang, 2018, Theorem 8).

    delta = Phi(1 / (2 sigma) - epsilon sigma) - exp(epsilon) Phi(-1 / (2 sigma) - epsilon sigma)
    """
    if gaussian_delta(noise, 0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(noise, high) > delta:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(noise, middle) <= delta else (middle, high)
    return high


def gaussian_delta(noise: float, epsilon: float) -> float:
    """Return the delta of a Gaussian mechanism at `epsilon`; see `gaussian_epsilon`."""
    half = 1 / (2 * noise)
    above = float(log_ndtr(half - epsilon * noise))
    return math.exp(above) * -math.expm1(epsilon + float(log_ndtr(-half - epsilon * noise)) - above)


def sampled_epsilon(size: int, sample: int, noise: float, times: int, delta: float) -> float:
    """Return the epsilon of Gaussian sums over `sample` of `size` that are chosen at random, without replacement.

    Neighbours replace one, so a sum may change by twice the clip. This is Renyi accounting (Wang et al. 2019).
    """
    if noise == 0:
        return math.inf
    library = _library()
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    event = library.SampledWithoutReplacementDpEvent(size, sample, library.GaussianDpEvent(noise / 2))
    accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def find_noise(cost: Callable[[float], float], target: float) -> float:
    """Return the smallest noise, but for rounding up, whose `cost(noise)` is at most `target`.

    Raises:
        ConfigError: no noise is enough.
    """
    low = high = 1.0
    while cost(high) > target:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            problem = f"epsilon = {target:g}: no noise is enough for so many rounds: ask for more, or train less"
            raise ConfigError([problem])
    while low == high or cost(low) <= target:
        low, high = low / 2, low

    def excess(place: float) -> float:
        return math.log(min(cost(math.exp(place)), 1e6) / target)

    found = math.exp(brentq(excess, math.log(low), math.log(high), xtol=PRECISE))
    while cost(found) > target:
        found *= 1 + PRECISE
    return min(found, high)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigError(["privacy needs an accountant: pip install 'coterie[privacy]'"]) from error
    return dp_accounting
