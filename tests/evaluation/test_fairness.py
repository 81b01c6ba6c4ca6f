import math

import numpy as np
import pytest

from coterie.evaluation.fairness import share_worse, spread


def test_closed_forms():
    values, sizes = np.arange(1.0, 21.0), np.ones(20)
    sizes[-1] = 21.0
    found = spread(values, sizes, "accuracy")
    assert found["mean"] == pytest.approx(10.5)
    assert found["weighted_mean"] == pytest.approx((210 + 20 * 20) / 40)
    assert found["std"] == pytest.approx(math.sqrt((20**2 - 1) / 12))
    assert found["cv"] == pytest.approx(found["std"] / 10.5)
    assert found["worst_decile"] == 1.5
    assert spread(values, sizes, "loss")["worst_decile"] == 19.5  # a high loss is the worst


def test_variation_is_that_of_the_papers_table():
    # pFedVMP, Table 3, FMNIST: coefficient 4.14e-2 beside a standard deviation of 3.96 %, so a mean of 95.65 %.
    values = np.array([95.65 - 3.96, 95.65 + 3.96])
    assert 100 * spread(values, np.ones(2), "accuracy")["cv"] == pytest.approx(4.14, abs=0.005)


def test_clients_without_a_value_are_left_out():
    found = spread(np.array([np.nan, 0.5, 0.7]), np.array([9.0, 1.0, 3.0]), "auroc")
    assert found["mean"] == pytest.approx(0.6)
    assert found["weighted_mean"] == pytest.approx(0.65)
    assert found["worst_decile"] == 0.5
    assert all(math.isnan(value) for value in spread(np.array([np.nan]), np.ones(1), "auroc").values())
    assert math.isnan(spread(np.zeros(2), np.ones(2), "accuracy")["cv"])


def test_share_worse_than_alone():
    assert share_worse(np.array([-1.0, 0.0, 1.0, np.nan, -0.1])) == 0.5
    assert math.isnan(share_worse(np.array([np.nan])))
