import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from coterie.parts import simplex


def test_projection_is_the_nearest_point():
    v = torch.tensor([[0.2, 0.3, 0.5], [3.0, 0.0, 0.0], [0.6, 0.6, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    expected = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(simplex.project(v), expected)


@pytest.mark.parametrize("rank", [2, 6])
def test_the_quadratic_program_against_scipy(rank):
    draw = np.random.default_rng(rank)
    factor = draw.normal(size=(6, rank))
    q, linear = factor @ factor.T + np.diag(draw.uniform(0.05, 0.2, 6)), draw.normal(size=(4, 6))
    found = simplex.minimise_quadratic(torch.from_numpy(q), torch.from_numpy(linear)).numpy()
    assert np.allclose(found.sum(1), 1)
    assert (found >= 0).all()
    for a, b in zip(found, linear, strict=True):

        def value(x, b=b):
            return x @ q @ x - 2 * b @ x

        best = minimize(
            value,
            np.full(6, 1 / 6),
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert value(a) <= best.fun + 1e-9
        assert np.allclose(a, best.x, atol=1e-4)
