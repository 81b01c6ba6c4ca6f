"""Classification by a tree of binary Gaussian processes, with Polya-Gamma variables, for one client.

A function f of every node says which side of it an example belongs to, with probability sigma(f) for side 0. In what
follows j are a node's own examples, w_j is what example j counts (its mask), and kappa_j = w_j / 2 on side 0 and
-w_j / 2 on side 1. Given omega_j, which the likelihood sigma(f) is augmented with, f is Gaussian:

    f ~ GP(0, k),   k(z, z') = s exp(-||z - z'||^2 / (2 l^2 u))                     (`kernel`)
    omega_j | f  ~  w_j PG(1, f_j)                                                 (`polya_gamma`)
    f | omega, y ~  N(Sigma kappa, Sigma),   Sigma = (K^-1 + Omega)^-1             (`gibbs`)
    f* | omega, y ~ N(k*' a, k** - k*' W k*),   a = W Omega^-1 kappa,   W = S B^-1 S  (`posterior`)
    d log p(y | omega) / d K = (a a' - W) / 2                                      (`evidence_slope`)
    p(side 0)    =  E sigma(f*), by quadrature                                     (`log_sides`)

with S = Omega^1/2 and B = I + S K S, whose eigenvalues are at least 1: no matrix is inverted that could be singular.
For predictions, f* is one Gaussian with its mean and variance over draws of omega, so that they need products of
matrices only.

**All nodes of a level are one Gaussian process**, whose K is 0 between examples of different nodes. So there are
ceil(log2 classes) matrices, however many nodes there are. Everything is in float64, as far as the device has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.dropout import uniform
from coterie.core.tree import widest_float
from coterie.parts import class_tree

TERMS = 16  # of the series that defines a Polya-Gamma variable; the rest of it is replaced by its mean
JITTER = 1e-5  # of a variance, added where a root of K is needed
SAME = 1e-8  # of the mean square: features that vary less are all the same, but for rounding
ABSCISSAE, WEIGHTS = np.polynomial.hermite.hermgauss(24)
# Between the keys of two steps of the chain, and of the three kinds of draws within one.
STEP_KEY, PRIOR_KEY, NOISE_KEY, OMEGA_KEY = 0x3C6EF372, 0x1B873593 << 20, 0x19D699A5 << 20, 0x27D4EB2F << 20


class Kernel(NamedTuple):
    log: Tensor  # [2]; log s and log l
    unit: Tensor  # []; u, in which squared distances are measured


class Nodes(NamedTuple):
    """The binary problems of a tree, level by level."""

    kappa: Tensor  # [levels, examples]; 0 for an example that counts in no node of the level
    weight: Tensor  # [levels, examples]; likewise
    together: Tensor  # [levels, examples, examples]; 1 for two examples of the same node, else 0


class Draw(NamedTuple):
    """One draw of omega, with what it makes of the mean of f: f* | omega has mean k*' a."""

    omega: Tensor  # [levels, examples]
    a: Tensor  # [levels, examples]


class Posterior(NamedTuple):
    """Mean and covariance of f given the examples, without K: f* ~ N(k*' a, k** - k*' W k*)."""

    a: Tensor  # [levels, examples]
    w: Tensor  # [levels, examples, examples]

    def padded(self, examples: int) -> Posterior:
        """Return the same with so many examples, of which the last say nothing."""
        free = examples - self.a.shape[-1]
        return Posterior(F.pad(self.a, (0, free)), F.pad(self.w, (0, free, 0, free)))


def unit_of(z: Tensor, mask: Tensor) -> Tensor:
    """Return the mean squared distance between two examples, 2 sum_j w_j ||z_j - mean||^2 / sum_j w_j; [], float64.

    A kernel that measures in it does not depend on the size of features [examples, dim], which count as `mask` says.
    """
    z, mask = widest_float(z), widest_float(mask)
    share = (mask / mask.sum().clamp_min(SAME))[:, None]
    spread = 2 * (share * (z - (share * z).sum(0)) ** 2).sum()
    return spread + SAME * (share * z**2).sum() + torch.finfo(torch.float32).tiny


def kernel(a: Tensor, b: Tensor, shape: Kernel) -> Tensor:
    """Return k for each two rows of `a` [m, dim] and `b` [n, dim], [m, n], of their type."""
    middle = b.detach().mean(0)  # only for rounding: distances do not depend on it
    a, b = a - middle, b - middle
    distance = ((a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)).clamp_min(0)
    scale, length = shape.log.to(a).exp()
    gram: Tensor = scale * torch.exp(-distance / (2 * length**2 * shape.unit.to(a)))
    return gram


def nodes_of(tree: Tensor, leaf: Tensor, mask: Tensor) -> Nodes:
    """Return the binary problems of a tree [classes] for examples with these leaves and masks, both [examples]."""
    levels, mask = class_tree.depth(len(tree)), widest_float(mask)
    node = class_tree.nodes(leaf, levels)
    weight = torch.where(class_tree.parted(leaf, tree, levels), mask, 0.0)
    kappa = weight * (0.5 - class_tree.sides(leaf, levels))
    return Nodes(kappa, weight, (node[:, :, None] == node[:, None]).to(mask))


def polya_gamma_mean(c: Tensor) -> Tensor:
    """Return the mean of PG(1, c): tanh(c / 2) / (2 c), and 1/4 at 0."""
    near = c.abs() < 1e-3
    safe = torch.where(near, 1.0, c)
    return torch.where(near, 0.25 - c**2 / 48, torch.tanh(safe / 2) / (2 * safe))


def polya_gamma(c: Tensor, key: Tensor) -> Tensor:
    """Draw from PG(1, c), for c of any shape [..., examples].

        omega = 1 / (2 pi^2)  sum_k  g_k / ((k - 1/2)^2 + c^2 / (4 pi^2)),      g_k exponential

    The first `TERMS` terms are drawn, and the rest is replaced by its mean, so that the mean is exact, and the variance
    lacks 2e-7 of 1/24. What an example draws does not depend on how many there are.
    """
    g = -torch.log1p(-_draws(key, c.shape, TERMS))
    k = torch.arange(TERMS, device=c.device) + 0.5
    share = 1 / (2 * math.pi**2 * (k**2 + c[..., None] ** 2 / (4 * math.pi**2)))
    return (share * g.to(c)).sum(-1) + (polya_gamma_mean(c) - share.sum(-1))


def gibbs(gram: Tensor, nodes: Nodes, key: Tensor, steps: int) -> list[Draw]:
    """Run a chain over f and omega given the labels; return its start and what each of its steps drew.

    It starts at the mean of PG(1, 0), as with f = 0. f is drawn as a draw f0 of the prior, corrected by how far it,
    with noise e / S, is from the pseudo-observations Omega^-1 kappa:

        f = f0 + K S B^-1 (S^-1 kappa - S f0 - e)

    Args:
        gram: K of all examples, [examples, examples].
        nodes: the binary problems.
        key: a scalar, of which all draws are hashes.
        steps: their number.
    """
    eye = torch.eye(len(gram)).to(gram)
    root = torch.linalg.cholesky_ex(gram + JITTER * gram.diagonal().mean() * eye).L
    within, counts = gram * nodes.together, nodes.weight > 0
    omega, chain = 0.25 * nodes.weight, list[Draw]()
    for number in range(steps + 1):
        own, s = key + number * STEP_KEY, omega.sqrt()
        seen = torch.where(counts, nodes.kappa / torch.where(counts, s, 1.0), 0.0)  # S^-1 kappa
        prior = _normal(own ^ PRIOR_KEY, omega.shape).to(gram) @ root.T
        missing = seen - s * prior - counts * _normal(own ^ NOISE_KEY, omega.shape).to(gram)
        solved = s[..., None] * torch.cholesky_solve(torch.stack([seen, missing], -1), _factor(within, s))
        chain.append(Draw(omega, solved[..., 0]))
        f = prior + (within @ solved[..., 1:])[..., 0]
        omega = nodes.weight * polya_gamma(f, own ^ OMEGA_KEY)
    return chain


def posterior(gram: Tensor, nodes: Nodes, draws: Sequence[Draw]) -> Posterior:
    """Return mean and covariance of f over draws of omega: W at their mean, less how far apart the a are."""
    a = torch.stack([draw.a for draw in draws])
    omega = torch.stack([draw.omega for draw in draws]).mean(0)
    s, away = omega.sqrt(), a - a.mean(0)
    inverse = torch.cholesky_inverse(_factor(gram * nodes.together, s))
    between = torch.einsum("dli,dlj->lij", away, away) / len(draws)
    return Posterior(a.mean(0), s[..., :, None] * inverse * s[..., None, :] - between * nodes.together)


def evidence_slope(found: Posterior, nodes: Nodes) -> Tensor:
    """Return the gradient of log p(y | omega) in K, (a a' - W) / 2, summed over levels; [examples, examples].

    With omega drawn given the labels, it is an unbiased gradient of log p(y), by Fisher's identity.

    Args:
        found: given one draw of omega.
        nodes: the binary problems.
    """
    both = found.a[..., :, None] * found.a[..., None, :] * nodes.together
    return 0.5 * (both - found.w).sum(0)


def training_loss(gram: Tensor, nodes: Nodes, found: Posterior) -> Tensor:
    """Return the log-loss of the training examples themselves, at the mean of f, summed over nodes; a scalar."""
    f = ((gram * nodes.together) @ found.a[..., None])[..., 0]
    return (nodes.weight * F.softplus(-torch.sign(nodes.kappa) * f)).sum()


def log_sides(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return log E sigma(f) and log E sigma(-f) for f ~ N(mean, variance), by Gauss-Hermite quadrature."""
    points = torch.tensor(ABSCISSAE.tolist(), dtype=mean.dtype, device=mean.device)
    weights = torch.tensor((WEIGHTS / WEIGHTS.sum()).tolist(), dtype=mean.dtype, device=mean.device).log()
    f = mean[..., None] + (2 * variance).sqrt()[..., None] * points
    return torch.logsumexp(F.logsigmoid(f) + weights, -1), torch.logsumexp(F.logsigmoid(-f) + weights, -1)


def log_classes(across: Tensor, variance: Tensor, found: Posterior, tree: Tensor, leaf: Tensor) -> Tensor:
    """Return the logarithms of the probabilities of all classes, [batch, classes]; 0 for a class that is ABSENT.

    That of a class is the product of its sides' on the way from the root; a node without a choice has none.

    Args:
        across: k between training examples and new ones, [examples, batch].
        variance: k** of a new example, a scalar.
        found: given the training examples.
        tree: [classes], the leaves.
        leaf: [examples], those of the training examples.
    """
    levels, total = class_tree.depth(len(tree)), across.new_zeros(across.shape[1], len(tree))
    choice = class_tree.parted(tree, tree, levels)
    of_class, of_example = class_tree.nodes(tree, levels), class_tree.nodes(leaf, levels)
    side = class_tree.sides(tree, levels)
    for d in range(levels):
        own = (of_class[d][:, None] == of_example[d]).to(across)  # [classes, examples]; those of the class's node
        mean = own @ (found.a[d][:, None] * across)  # [classes, batch]
        known = own @ (across * (found.w[d] @ across))
        zero, one = log_sides(mean, (variance - known).clamp_min(0))
        taken = torch.where(side[d][:, None] == 0, zero, one)
        total = total + torch.where(choice[d][:, None], taken, 0.0).T
    return total


def _factor(within: Tensor, s: Tensor) -> Tensor:
    """Return the lower Cholesky factor of B = I + S K S, [levels, examples, examples]."""
    eye = torch.eye(within.shape[-1]).to(within)
    lower: Tensor = torch.linalg.cholesky_ex(eye + s[..., :, None] * within * s[..., None, :]).L
    return lower


def _draws(key: Tensor, shape: torch.Size, each: int) -> Tensor:
    """Return uniform numbers, [..., examples, each], that depend on each example's own place, not on their number."""
    levels, examples = math.prod(shape[:-1]), shape[-1]
    return uniform(key, (examples, levels, each)).movedim(0, 1).reshape(*shape, each)


def _normal(key: Tensor, shape: torch.Size) -> Tensor:
    """Return normal numbers likewise, [..., examples] (Box and Muller)."""
    radius, angle = _draws(key, shape, 2).unbind(-1)
    return (-2 * torch.log1p(-radius)).sqrt() * (2 * math.pi * angle).cos()
