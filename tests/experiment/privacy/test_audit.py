"""The audit proves less than is claimed, and less the smaller epsilon is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from coterie.experiment.privacy.audit import audit, judge, proven_epsilon


def test_what_right_guesses_prove():
    assert proven_epsilon(50, 100) == 0
    found = proven_epsilon(90, 100)
    assert binom.sf(89, 100, 1 / (1 + math.exp(-found))) == pytest.approx(0.05, rel=1e-3)
    assert found < math.log(9)  # 90 % right is what log 9 gives on average


def test_a_perfect_attacker_and_a_blind_one():
    member = np.arange(80) % 2 == 0
    perfect = judge(1.0, member.astype(float) + np.linspace(0, 0.1, 80), member)
    assert (perfect.advantage, perfect.auc, perfect.right, perfect.guesses) == (1.0, 1.0, 40, 40)
    blind = judge(1.0, np.random.default_rng(0).permutation(80).astype(float), member)
    assert blind.auc == pytest.approx(0.5, abs=0.15)
    assert blind.proven == 0


@pytest.mark.slow
def test_the_advantage_falls_with_epsilon_and_proves_less_than_is_claimed():
    found = [[audit(target, seed=seed) for seed in (0, 1)] for target in (math.inf, 8.0, 1.0)]
    auc = [np.mean([each.auc for each in some]) for some in found]
    advantage = [np.mean([each.advantage for each in some]) for some in found]
    assert auc[0] > auc[1] + 0.1 > auc[2] + 0.15
    assert advantage[0] > advantage[1] + 0.1 > advantage[2] + 0.15
    assert min(each.proven for each in found[0]) > 1.0  # without noise, the model does remember
    assert all(each.proven < each.claimed for some in found[1:] for each in some)
