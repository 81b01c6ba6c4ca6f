"""The processes against closed forms, exact numerical posteriors, and scikit-learn's Laplace approximation."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from coterie.parts import gaussian_process as gp
from coterie.parts.class_tree import ABSENT, balanced_tree

KEY = torch.tensor(20211117)
TWO = torch.tensor([0, 1])  # the tree of two classes


def plain_kernel(scale, length):
    """A kernel with the unit of distance 1."""
    return gp.Kernel(torch.tensor([scale, length], dtype=torch.float64).log(), torch.tensor(1.0, dtype=torch.float64))


def predicted(kernel, z, y, new, draws=200, tree=TWO, mask=None):
    """Probabilities of the classes of `new`, [new, classes]."""
    mask = torch.ones(len(z)) if mask is None else mask
    gram, nodes = gp.kernel(z, z, kernel), gp.nodes_of(tree, tree[y], mask)
    found = gp.posterior(gram, nodes, gp.gibbs(gram, nodes, KEY, draws + 5)[6:])
    return gp.log_classes(gp.kernel(z, new, kernel), kernel.log[0].exp(), found, tree, tree[y]).exp()


@pytest.mark.parametrize("c", [0.0, 1e-5, 0.5, 2.0, 8.0])
def test_polya_gamma_has_its_moments(c):
    """The variance of PG(1, c) is (sinh c - c) / (4 c^3 cosh^2(c / 2)), and 1/24 at 0."""
    mean = 0.25 if c == 0 else math.tanh(c / 2) / (2 * c)
    variance = 1 / 24 if c < 1e-3 else (math.sinh(c) - c) / (4 * c**3 * math.cosh(c / 2) ** 2)
    assert float(gp.polya_gamma_mean(torch.tensor(c, dtype=torch.float64))) == pytest.approx(mean, rel=1e-6)
    drawn = gp.polya_gamma(torch.full((200_000,), c, dtype=torch.float64), KEY)
    assert (drawn > 0).all()
    assert float(drawn.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / 200_000))
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)


def test_what_an_example_draws_does_not_depend_on_how_many_there_are():
    c = torch.linspace(-3, 3, 20, dtype=torch.float64).reshape(2, 10)
    assert torch.equal(gp.polya_gamma(c, KEY)[:, :4], gp.polya_gamma(c[:, :4], KEY))


def test_polya_gamma_makes_the_logistic_function_gaussian():
    """E exp(-omega f^2 / 2) over PG(1, 0) is 1 / cosh(f / 2)."""
    omega = gp.polya_gamma(torch.zeros(200_000, dtype=torch.float64), KEY)
    for f in (0.5, 1.0, 3.0):
        assert float((-omega * f**2 / 2).exp().mean()) == pytest.approx(1 / math.cosh(f / 2), abs=2e-3)


def test_the_kernel_is_scikit_learns():
    z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = (ConstantKernel(8.0) * RBF(1.7))(z.numpy())
    np.testing.assert_allclose(gp.kernel(z, z, plain_kernel(8.0, 1.7)), expected, rtol=1e-9)


def test_the_unit_is_the_mean_squared_distance_of_two_examples_and_removes_scale():
    z = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = torch.cdist(z, z) ** 2
    assert float(gp.unit_of(z, torch.ones(5))) == pytest.approx(float(pairs.mean()), rel=1e-6)
    part = torch.tensor([1.0, 0, 1, 1, 0])
    assert float(gp.unit_of(z, part)) == pytest.approx(float(gp.unit_of(z[part > 0], torch.ones(3))), rel=1e-9)
    log = torch.zeros(2)
    grams = [gp.kernel(own, own, gp.Kernel(log, gp.unit_of(own, torch.ones(5)))) for own in (z, 100 * z)]
    torch.testing.assert_close(*grams)


def test_features_that_are_all_the_same_have_a_unit_that_is_small_but_not_0():
    z = torch.tensor([[3.0, 4.0]], dtype=torch.float64).expand(6, 2)
    assert float(gp.unit_of(z, torch.ones(6))) == pytest.approx(gp.SAME * 25)
    assert float(gp.unit_of(0 * z, torch.ones(6))) > 0
    assert torch.equal(
        gp.kernel(z, z, gp.Kernel(torch.zeros(2), gp.unit_of(z, torch.ones(6)))), torch.ones(6, 6).double()
    )


def test_far_from_0_distances_are_not_rounded_away():
    z = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shape = plain_kernel(1.0, 1.0)
    torch.testing.assert_close(
        gp.kernel((1000 + z).float(), (1000 + z).float(), shape), gp.kernel(z, z, shape).float(), rtol=0, atol=1e-3
    )


def test_the_training_loss_is_that_of_the_mean():
    """f = K a within nodes; an example of side 0 costs log(1 + e^-f), one of side 1 log(1 + e^f), each its weight."""
    gram = torch.tensor([[2.0, 0.5, 0.1], [0.5, 2.0, 0.3], [0.1, 0.3, 2.0]], dtype=torch.float64)
    nodes = gp.nodes_of(TWO, TWO[torch.tensor([0, 1, 0])], torch.tensor([1.0, 3.0, 0.0]))
    a = torch.tensor([0.7, -0.4, 0.0], dtype=torch.float64)
    f = gram @ a
    expected = (1 + (-f[0]).exp()).log() + 3 * (1 + f[1].exp()).log()
    found = gp.training_loss(gram, nodes, gp.Posterior(a[None], torch.zeros(1, 3, 3).double()))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_mean_and_covariance_given_omega_are_those_of_gaussian_regression():
    """Of pseudo-observations kappa / omega with noise 1 / omega."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(7, 2, dtype=torch.float64, generator=draw)
    gram, nodes = gp.kernel(z, z, plain_kernel(4.0, 1.0)), gp.nodes_of(TWO, TWO[torch.arange(7) % 2], torch.ones(7))
    omega = torch.rand(1, 7, dtype=torch.float64, generator=draw) / 4 + 0.01
    inverse = torch.linalg.inv(gram + torch.diag(1 / omega[0]))
    a = inverse @ (nodes.kappa / omega)[0]
    found = gp.posterior(gram, nodes, [gp.Draw(omega, a[None])])
    torch.testing.assert_close(found.w[0], inverse)
    # The chain's own first step has the same a, for its omega of 1/4.
    start = gp.gibbs(gram, nodes, KEY, 0)[0]
    torch.testing.assert_close(start.a[0], torch.linalg.inv(gram + 4 * torch.eye(7)) @ (4 * nodes.kappa[0]))
    assert (start.omega == 0.25).all()
    # And the slope is autograd's, of the log density of the pseudo-observations.
    free = gram.clone().requires_grad_(True)
    normal = torch.distributions.MultivariateNormal(torch.zeros(7).double(), free + torch.diag(1 / omega[0]))
    normal.log_prob((nodes.kappa / omega)[0]).backward()
    torch.testing.assert_close(gp.evidence_slope(found, nodes), (free.grad + free.grad.T) / 2)


def test_fishers_identity_gives_the_gradient_of_the_evidence():
    """On two examples, where p(y) is an integral over a grid; one parameter, the scale of K."""
    z = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    base, y = gp.kernel(z, z, plain_kernel(1.0, 1.0)), torch.tensor([0, 1])
    nodes = gp.nodes_of(TWO, TWO[y], torch.ones(2))

    def log_evidence(scale):
        f = torch.cartesian_prod(*[torch.linspace(-25, 25, 801, dtype=torch.float64)] * 2)
        prior = torch.distributions.MultivariateNormal(torch.zeros(2).double(), scale * base)
        sign = torch.tensor([1.0, -1.0])
        return torch.logsumexp(prior.log_prob(f) + torch.nn.functional.logsigmoid(sign * f).sum(1), 0)

    exact = float(log_evidence(4.01) - log_evidence(3.99)) / 0.02
    chain = gp.gibbs(4 * base, nodes, KEY, 2_500)[10:]
    slopes = [gp.evidence_slope(gp.posterior(4 * base, nodes, [each]), nodes) for each in chain[::2]]
    found = float((torch.stack(slopes) * base).sum((1, 2)).mean())
    assert found == pytest.approx(exact, abs=0.1 * abs(exact))


def test_predictions_are_those_of_the_exact_posterior():
    """Three examples on a line, integrated by importance sampling from the prior."""
    z, y = torch.tensor([[-1.0], [0.2], [1.0]], dtype=torch.float64), torch.tensor([0, 1, 1])
    new, kernel = torch.tensor([[-2.0], [-0.4], [0.6], [3.0]], dtype=torch.float64), plain_kernel(9.0, 1.0)
    joint = torch.cat([z, new])
    root = torch.linalg.cholesky(gp.kernel(joint, joint, kernel) + 1e-9 * torch.eye(7))
    f = torch.randn(400_000, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) @ root.T
    weight = torch.sigmoid(f[:, :3] * torch.tensor([1.0, -1, -1])).prod(1)
    exact = (weight[:, None] * torch.sigmoid(f[:, 3:])).sum(0) / weight.sum()
    found = predicted(kernel, z, y, new, draws=800)[:, 0]
    assert float((found - exact).abs().max()) < 0.015
    assert float((predicted(kernel, z, y, new, draws=5)[:, 0] - exact).abs().max()) < 0.1  # as the method does


@pytest.mark.parametrize("dim", [1, 2])
def test_predictions_are_near_scikit_learns_laplace_approximation(dim):
    draw = torch.Generator().manual_seed(dim)
    z = torch.randn(40, dim, dtype=torch.float64, generator=draw)
    y = (z[:, 0] + 0.3 * torch.randn(40, dtype=torch.float64, generator=draw) > 0).long()
    new = 2 * torch.randn(50, dim, dtype=torch.float64, generator=draw)
    other = GaussianProcessClassifier(ConstantKernel(4.0) * RBF(1.0), optimizer=None).fit(z.numpy(), y.numpy())
    expected = torch.from_numpy(other.predict_proba(new.numpy()))
    found = predicted(plain_kernel(4.0, 1.0), z, y, new)
    # Laplace's approximation is known to be too little sure.
    assert float((found - expected).abs().max()) < 0.06
    assert ((found.argmax(1) == expected.argmax(1)) | ((expected[:, 0] - 0.5).abs() < 0.05)).all()


def test_quadrature():
    mean, variance = torch.tensor([0.0, 1.0, -20.0, 3.0]), torch.tensor([9.0, 0.0, 1.0, 4.0])
    zero, one = gp.log_sides(mean, variance)
    torch.testing.assert_close(zero.exp() + one.exp(), torch.ones(4))
    draws = mean + variance.sqrt() * torch.randn(400_000, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(zero.exp(), torch.sigmoid(draws).mean(0), atol=2e-3, rtol=0)
    assert float(zero[2]) == pytest.approx(-19.5, abs=0.1)


def test_probabilities_of_a_tree_add_up_to_one_and_its_nodes_are_apart():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 5
    z = torch.randn(40, 3, dtype=torch.float64, generator=draw) + 2 * torch.eye(5, 3, dtype=torch.float64)[y]
    mean = torch.stack([z[y == k].mean(0) for k in range(5)])
    tree, new = balanced_tree(mean, torch.ones(5, dtype=torch.bool)), torch.randn(9, 3, generator=draw).double()
    found = predicted(plain_kernel(4.0, 1.0), z, y, new, tree=tree)
    torch.testing.assert_close(found.sum(1), torch.ones(9).double())
    # The side taken at the root is a binary process of all examples; below it, only a node's own count.
    side = (tree[y] >> 2) & 1
    alone = predicted(plain_kernel(4.0, 1.0), z, side, new)
    torch.testing.assert_close(found[:, (tree >> 2) == 0].sum(1), alone[:, 0], atol=0.02, rtol=0)


def test_masked_examples_say_nothing_and_weights_count():
    z = torch.tensor([[-1.0], [1.0], [0.5], [0.5]], dtype=torch.float64)
    y, new, kernel = torch.tensor([0, 1, 0, 0]), torch.tensor([[0.4]], dtype=torch.float64), plain_kernel(4.0, 1.0)
    some = predicted(kernel, z, y, new, mask=torch.tensor([1.0, 1, 1, 0]))
    torch.testing.assert_close(some, predicted(kernel, z[:3], y[:3], new))
    twice = predicted(kernel, z[:3], y[:3], new, mask=torch.tensor([1.0, 1, 2]))
    assert float((twice - predicted(kernel, z, y, new)).abs().max()) < 0.02  # an example of weight 2 counts as two
    assert float(some[0, 0]) < float(twice[0, 0]) - 0.02


def test_a_node_without_a_choice_has_none():
    z, tree = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([ABSENT, 0, ABSENT])
    found = predicted(plain_kernel(1.0, 1.0), z, torch.tensor([1, 1, 1]), z, tree=tree)
    assert (found == 1).all()
