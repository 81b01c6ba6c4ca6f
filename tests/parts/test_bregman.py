import pytest
import torch
from torch.func import grad

from coterie.parts.bregman import LogCosh, Quadratic, make_generator

GENERATORS = [Quadratic(), Quadratic((("head", 0.3),)), LogCosh(1.0), LogCosh(0.4)]
SHAPES = {"body": (3, 2), "head": (5,)}  # a model's tensors differ in shape
NAMES = tuple(SHAPES)


def model(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def close(a, b, **tolerance):
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance)


@pytest.mark.parametrize("phi", GENERATORS, ids=str)
class TestGenerator:
    def test_derivatives_are_those_of_autograd(self, phi):
        for name, x in model(0).items():
            torch.testing.assert_close(phi.gradient(name, x), grad(lambda v, n=name: phi.value(n, v).sum())(x))
            torch.testing.assert_close(phi.curvature(name, x), grad(lambda v, n=name: phi.gradient(n, v).sum())(x))

    def test_pull_is_the_gradient_of_the_divergence(self, phi):
        a, b = model(0), model(1)
        close(phi.divergence_gradient(2.5, a, b), grad(lambda v: 2.5 * phi.divergence(v, b))(a))

    def test_divergence_is_the_definition_eq_1(self, phi):
        a, b = model(0), model(1)
        by_hand = sum(
            (phi.value(n, a[n]) - phi.value(n, b[n]) - phi.gradient(n, b[n]) * (a[n] - b[n])).sum() for n in NAMES
        )
        torch.testing.assert_close(phi.divergence(a, b), by_hand)
        assert phi.divergence(a, b) > 0
        assert phi.divergence(a, a).abs() < 1e-12

    def test_the_two_gradients_are_inverse_to_each_other(self, phi):
        a = model(0)
        close(phi.primal(phi.dual(a)), a, rtol=1e-6, atol=1e-8)

    def test_conjugate_is_the_supremum(self, phi):
        """phi*(s) = sup_x s x - phi(x): reached at grad phi*(s), and nowhere exceeded on a fine grid."""
        for name, s in phi.dual(model(0, 0.5)).items():
            best = phi.inverse(name, s)
            torch.testing.assert_close(phi.conjugate(name, s), s * best - phi.value(name, best))
            grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
            tried = (s[..., None] * grid - phi.value(name, grid)).amax(-1)
            assert (tried <= phi.conjugate(name, s) + 1e-12).all()
            torch.testing.assert_close(tried, phi.conjugate(name, s), rtol=1e-3, atol=1e-4)

    def test_duality_of_divergences(self, phi):
        """D_phi(a, b) = D_phi*(grad phi(b), grad phi(a))."""
        a, b = model(0, 0.5), model(1, 0.5)
        s, t = phi.dual(b), phi.dual(a)
        dual = sum(
            (phi.conjugate(n, s[n]) - phi.conjugate(n, t[n]) - phi.inverse(n, t[n]) * (s[n] - t[n])).sum()
            for n in NAMES
        )
        torch.testing.assert_close(phi.divergence(a, b), dual, rtol=1e-6, atol=1e-9)

    def test_gradient_of_the_envelope_eq_2(self, phi):
        """grad Denv f(x) = lambda grad^2 phi(x) (x - Dprox f(x)), against central differences of the envelope."""
        lam, target, steep = 1.7, model(2)["head"], 1.0 + model(3)["head"] ** 2

        def prox(x):
            low, high = torch.full_like(x, -50.0), torch.full_like(x, 50.0)
            for _ in range(100):  # the problem is one convex problem a coordinate: halve the sign change of its slope
                middle = (low + high) / 2
                slope = steep * (middle - target) + lam * (phi.gradient("head", middle) - phi.gradient("head", x))
                low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
            return (low + high) / 2

        def envelope(x):
            theta = prox(x)
            return (steep * (theta - target) ** 2 / 2).sum() + lam * phi.divergence({"head": theta}, {"head": x})

        x = model(1)["head"]
        expected = lam * phi.metric({"head": x}, {"head": x - prox(x)})["head"]
        for i in range(x.numel()):
            h = torch.zeros(x.numel(), dtype=x.dtype).index_fill(0, torch.tensor(i), 1e-5).reshape(x.shape)
            slope = (envelope(x + h) - envelope(x - h)) / 2e-5
            torch.testing.assert_close(slope, expected.flatten()[i], rtol=1e-5, atol=1e-7)


def test_log_cosh_is_finite_far_out_and_quadratic_near_zero():
    x = torch.tensor([-1e4, 1e4])
    assert torch.isfinite(LogCosh(1.0).value("w", x)).all()
    torch.testing.assert_close(LogCosh(1.0).value("w", x), x.abs() - torch.log(torch.tensor(2.0)))
    near = torch.linspace(-1, 1, 9, dtype=torch.float64)
    torch.testing.assert_close(LogCosh(1e3).value("w", near), near**2 / 2, rtol=1e-4, atol=1e-6)


def test_make_names_them():
    head = frozenset({"b", "a"})
    assert make_generator("squared-norm", head, 0.1, 2.0) == Quadratic()
    assert make_generator("diagonal", head, 0.1, 2.0) == Quadratic((("a", 0.1), ("b", 0.1)))
    assert make_generator("log-cosh", head, 0.1, 2.0) == LogCosh(2.0)
