import itertools

import numpy as np
import pytest
from scipy import stats

from coterie.evaluation.significance import _ranks, signed_rank


@pytest.mark.parametrize("number", [3, 6, 12, 30, 80])
def test_equals_scipy_without_ties(number):
    differences = np.random.default_rng(number).standard_normal(number) + 0.3
    expected = stats.wilcoxon(differences, method="exact" if number <= 50 else "approx")
    found = signed_rank(differences)
    assert found["statistic"] == expected.statistic
    assert found["p"] == pytest.approx(expected.pvalue)
    assert found["n"] == number


def test_ties_are_counted_exactly():
    differences = np.array([0.1, 0.1, -0.1, 0.2, 0.2, 0.3, -0.05])
    ranks = stats.rankdata(np.abs(differences))
    plus = ranks[differences > 0].sum()
    every = np.array([np.dot(ranks, signs) for signs in itertools.product((0, 1), repeat=len(ranks))])
    expected = min(1.0, 2 * min((every <= plus).mean(), (every >= plus).mean()))
    assert signed_rank(differences)["p"] == pytest.approx(expected)


def test_effect_size():
    assert signed_rank(np.array([0.1, 0.2, 0.3]))["effect"] == 1
    assert signed_rank(-np.array([0.1, 0.2, 0.3]))["effect"] == -1
    # Ranks 1, 2, 3 with signs +, -, +: (4 - 2) / 6
    assert signed_rank(np.array([0.1, -0.2, 0.3]))["effect"] == pytest.approx(1 / 3)


def test_few_clients_cannot_reach_significance():
    for number in range(1, 6):
        assert signed_rank(np.arange(1.0, number + 1))["p"] == pytest.approx(2.0 ** (1 - number))
    assert signed_rank(np.arange(1.0, 7))["p"] < 0.05


def test_zeros_and_undefined_are_left_out():
    assert signed_rank(np.zeros(5)) == {"statistic": 0.0, "p": 1.0, "effect": 0.0, "n": 0}
    assert signed_rank(np.array([np.nan, 0.0, 0.1, 0.2])) == signed_rank(np.array([0.1, 0.2]))
    # Differences that are equal but for rounding are ties.
    assert signed_rank(np.array([0.3 - 0.2, -0.1, 0.5]))["statistic"] == 1.5


def test_equal_values_share_their_ranks():
    values = np.array([3.0, 1.0, 3.0, 2.0, 3.0, 1.0])
    assert np.array_equal(_ranks(values), stats.rankdata(values))
