"""Priors on the clients' models: R(theta, gamma) = -log rho_gamma(theta), without its normalising constant.

A prior is a frozen dataclass with pure functions. All priors treat parameters one by one and see a client's model only
through the squared distance t = (theta_i - mu_i)^2 / unit from the centre, as `energy(t, v)` with a squared scale v:

    Gaussian          t / (2 v),                               v = sigma^2
    LearnedGaussian   t / (2 v) + epsilon (s_i^2 + mu_i^2),    v = s_i + c, that is alpha(s) = 1 / v
    Laplace           sqrt(2 t / v + tau^2) - tau,             v = sigma^2 = 2 b^2, about |theta_i - mu_i| / b
    StudentT          (nu + 1) / 2 log(1 + t / (nu v)),        v = sigma^2

gamma = (mu, s, unit). The unit is 1, and then sigma^2, s and c are variances as the papers write them; or it is the
typical squared distance of the clients from the centre (`typical_distance`), and then they are relative to it: whatever
the network, a parameter with t = 1 lies where the shapes above begin to differ.

Laplace's tip is rounded. A gradient step on gamma needs the slope of R where theta_i = mu_i, which is where |.| puts
many parameters and where it has no slope (tau = 0). A tip narrower than the distances that clients go in a round pulls
with 1 / b at any distance; where that exceeds the gradients of the loss, no client leaves the centre, and the centre
never moves. The curvature at the centre is 2 / (tau sigma^2), so with tau = 2 (FedMAP's default) the pull begins as the
Gaussian's, and grows to 1 / b instead of without end. Plain gradient descent settles for step sizes below tau sigma^2
only. All energies are concave in t; `Prior.natural_step_sizes` uses that.

Learned variances: R has no normalising constant, so the best s_i solves t / (2 (s_i + c)^2) = 2 epsilon s_i, which is
never below 0: c is the smallest variance, and epsilon says at which t it grows. Numbers for both are right for one
scale of weights only (A.4's c = 1, epsilon = 1e-4 make 1 of any variance if weights are those of a network). By default
c = sigma^2 and epsilon = 1 / (16 sigma^4) for s: the variance is sigma^2 for t = 0, doubles for t = sigma^2, and is
eight times as large for t = 100 sigma^2 (`learned_scales`). On mu, which has another unit, epsilon is 1e-4 / sigma^2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from coterie.core import tree
from coterie.core.tree import Params

PIECE_BYTES = 4 * 2**20  # size of the clients' parameters that take a step at once: fits a processor's cache
# A learned variance stays above this share of c. The best s is never below 0, so the bound matters only on the way.
MIN_VARIANCE_SHARE = 1e-3
Family = Literal["gaussian", "gaussian-learned", "laplace", "student-t"]
Rate = Literal["natural"] | Annotated[float, Field(gt=0)]  # a step size
Scale = Literal["auto"] | Annotated[float, Field(gt=0)]
EPSILON_MU = 1e-4  # A.4's epsilon. It makes R strictly convex in mu, and moves mu by one part in 5,000


class Gamma(NamedTuple):
    """The parameters gamma of a prior, which clients are sent."""

    mu: Params  # the centre
    s: Params  # the learned part of the variance, for trained parameters; empty unless the variance is learned
    unit: Tensor | tuple[()] = ()  # []; what squared distances are measured in; 1 if there is none


@dataclass(frozen=True)
class Prior(ABC):
    """A family of priors; `sigma2` is its variance or squared scale, at first if it is learned."""

    sigma2: float

    @abstractmethod
    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        """Return -log density of each parameter, up to a constant.

        Args:
            t: squared distances of parameters from the centre, of any shape.
            v: the squared scale, a number or a tensor that broadcasts with `t`.
        """

    def initial_spread(self, params: Params) -> Params:
        """Return gamma's s before the first round, for the trained parameters `params`."""
        return {}

    def R(self, theta: Params, gamma: Gamma) -> Tensor:
        """Return R(theta, gamma) without the terms that do not depend on theta, a scalar.

        Args:
            theta: a client's trained parameters.
            gamma: the prior's parameters, which have at least the names of `theta`; t is in their unit.
        """
        terms = []
        for name, value in theta.items():
            t = squared_distance(value, gamma, name)
            terms.append(self.energy(t, self._squared_scale(gamma, name)).sum())
        return torch.stack(terms).sum()

    def penalty(self, theta: Params, anchor: tuple[Gamma, Tensor]) -> Tensor:
        """Return strength * R(theta, gamma) for `anchor = (gamma, strength)`: a penalty for `training.train`."""
        gamma, strength = anchor
        return strength * self.R(theta, gamma)

    def descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        """Take gradient steps on gamma to minimise sum_k w_k R(theta_k, gamma).

        No parameter depends on another here, so they take their steps in pieces, and memory beside that of the clients'
        models stays bounded.

        Args:
            gamma: the prior's parameters, with the names of `theta`.
            theta: the clients' trained parameters, leaves [clients, ...].
            weight: [clients], which adds up to 1.
            lr: the step size, or `natural` for `natural_step_sizes`.
            steps: the number of steps.
        """
        width = max(1, PIECE_BYTES // (4 * len(weight)))
        mu, s = {}, {}
        for name, rows in theta.items():
            rows_pieces = torch.split(rows.reshape(len(rows), -1), width, 1)
            mu_pieces = torch.split(gamma.mu[name].flatten(), width)
            if name in gamma.s:
                s_pieces = torch.split(gamma.s[name].flatten(), width)
                starts = [Gamma({name: m}, {name: v}, gamma.unit) for m, v in zip(mu_pieces, s_pieces, strict=True)]
            else:
                starts = [Gamma({name: m}, {}, gamma.unit) for m in mu_pieces]
            ends = [
                self._descend(start, {name: piece}, weight, lr, steps)
                for start, piece in zip(starts, rows_pieces, strict=True)
            ]
            mu[name] = torch.cat([end.mu[name] for end in ends]).reshape(gamma.mu[name].shape)
            if name in gamma.s:
                s[name] = torch.cat([end.s[name] for end in ends]).reshape(gamma.mu[name].shape)
        return Gamma(mu, s, gamma.unit)

    def _descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        unit = gamma.unit

        def objective(learned: tuple[Params, Params]) -> Tensor:
            gamma = Gamma(*learned, unit)
            each = vmap(lambda one: self.R(one, gamma))(theta)
            return weight.to(each.dtype) @ each + self._terms_of_gamma(gamma)

        for _ in range(steps):
            learned = (gamma.mu, gamma.s)
            slope = grad(objective)(learned)
            if lr == "natural":
                sizes = self.natural_step_sizes(gamma, theta, weight)
                move = tree.map(torch.mul, (sizes.mu, sizes.s), slope)
            else:
                move = tree.scale(slope, lr)
            gamma = self._project(Gamma(*tree.sub(learned, move), unit))
        return gamma

    def natural_step_sizes(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """Return a step size for each parameter of the prior that needs no tuning, in the shape of `gamma`.

        For mu it is 1 / sum_k w_k q_k, q = 2 d energy / d t, which moves mu to the mean of theta_k weighted by w_k q_k.
        Since energies are concave in t, this minimises an upper bound of the objective that touches it, and so never
        increases it. It is FedMAP's eq. 9 for a Gaussian, expectation maximisation for Student's t, and Weiszfeld's
        algorithm for Laplace. Arguments are those of `descend`.
        """

        def size(name: str) -> Tensor:
            t, v = squared_distance(theta[name], gamma, name), self._squared_scale(gamma, name)
            q = 2 * grad(lambda t: self.energy(t, v).sum())(t)
            return in_units(1 / _weighted_sum(weight, q), gamma)

        return Gamma({name: size(name) for name in gamma.mu}, {})

    def _squared_scale(self, gamma: Gamma, name: str) -> float | Tensor:
        """Return v of the tensor called `name`."""
        return self.sigma2

    def _terms_of_gamma(self, gamma: Gamma) -> Tensor:
        """Return the terms of R that depend on gamma alone, a scalar."""
        return torch.zeros(())

    def _project(self, gamma: Gamma) -> Gamma:
        """Return the nearest gamma that is allowed."""
        return gamma


@dataclass(frozen=True)
class Gaussian(Prior):
    """The spherical Gaussian N(mu, sigma2 I) of FedMAP's eq. 6."""

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return t / (2 * v)

    def descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        if lr == "natural":  # the step of size sigma^2 in closed form; a second step would not move it
            return Gamma(tree.mean(theta, weight), {}, gamma.unit)
        return super().descend(gamma, theta, weight, lr, steps)


@dataclass(frozen=True)
class LearnedGaussian(Prior):
    """A Gaussian that learns a variance s + c for each parameter; `epsilon` draws s to 0, and `epsilon_mu` mu."""

    c: float
    epsilon: float
    epsilon_mu: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return t / (2 * v)

    def initial_spread(self, params: Params) -> Params:
        floats = {name: value for name, value in params.items() if value.is_floating_point()}
        return tree.map(lambda value: torch.full_like(value, self.sigma2 - self.c), floats)

    def natural_step_sizes(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """Return 1 / second derivative in mu and in s: Newton's step in each, which is exact for mu."""
        mu, s = {}, {}
        for name in gamma.mu:
            t, v = squared_distance(theta[name], gamma, name), self._squared_scale(gamma, name)
            mu[name] = in_units(1 / (1 / v + 2 * self.epsilon_mu), gamma)
            s[name] = 1 / (_weighted_sum(weight, t) / v**3 + 2 * self.epsilon)
        return Gamma(mu, s)

    def _squared_scale(self, gamma: Gamma, name: str) -> Tensor:
        return gamma.s[name] + self.c

    def _terms_of_gamma(self, gamma: Gamma) -> Tensor:
        of_mu = tree.dot(gamma.mu, gamma.mu)
        if isinstance(gamma.unit, Tensor):
            of_mu = of_mu / gamma.unit
        return self.epsilon_mu * of_mu + self.epsilon * tree.dot(gamma.s, gamma.s)

    def _project(self, gamma: Gamma) -> Gamma:
        return gamma._replace(s=tree.map(lambda s: s.clamp_min((MIN_VARIANCE_SHARE - 1) * self.c), gamma.s))


@dataclass(frozen=True)
class Laplace(Prior):
    """Laplace's distribution with a tip that is rounded over `tau` times its scale."""

    tau: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return (2 * t / v + self.tau**2).sqrt() - self.tau


@dataclass(frozen=True)
class StudentT(Prior):
    """Student's t distribution with `nu` degrees of freedom."""

    nu: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return (self.nu + 1) / 2 * torch.log1p(t / (self.nu * v))


def make_prior(family: Family, sigma2: float, c: Scale, epsilon: Scale, tau: float, nu: float) -> Prior:
    """Return the prior of that family; options that it does not have are ignored."""
    if family == "gaussian-learned":
        return LearnedGaussian(sigma2, *learned_scales(sigma2, c, epsilon))
    if family == "laplace":
        return Laplace(sigma2, tau)
    if family == "student-t":
        return StudentT(sigma2, nu)
    return Gaussian(sigma2)


def learned_scales(sigma2: float, c: Scale, epsilon: Scale) -> tuple[float, float, float]:
    """Return c, epsilon for s, and epsilon for mu. By default the best s is sigma2 where t = sigma2.

    With t = s = sigma2, the slope t / (2 (s + c)^2) - 2 epsilon s is 0 for epsilon = 1 / (4 (sigma2 + c)^2). A number
    for epsilon is the paper's, for both s and mu.
    """
    smallest = sigma2 if isinstance(c, str) else c
    if isinstance(epsilon, str):
        return smallest, 1 / (4 * (sigma2 + smallest) ** 2), EPSILON_MU / sigma2
    return smallest, epsilon, epsilon


def typical_distance(mu: Params, theta: Params, weight: Tensor) -> Tensor:
    """Return sum t^2 / sum t over parameters and clients (by w_k), t = (theta_k - mu)^2; 0 if nothing moved.

    Most parameters of a network hardly move; this is the typical t of those that do, however few they are. It goes
    through the parameters in pieces, as `Prior.descend` does.

    Args:
        mu: the centre.
        theta: the clients' trained parameters, leaves [clients, ...] with the names of `mu`.
        weight: [clients], which adds up to 1.
    """
    width = max(1, PIECE_BYTES // (4 * len(weight)))
    first, second = torch.zeros(()), torch.zeros(())
    for name, rows in theta.items():
        pieces = torch.split(rows.reshape(len(rows), -1), width, 1)
        for piece, centre in zip(pieces, torch.split(mu[name].flatten(), width), strict=True):
            t = (piece - centre) ** 2
            first = first + _weighted_sum(weight, t).sum().float()
            second = second + _weighted_sum(weight, t * t).sum().float()
    return second / first.clamp_min(torch.finfo(first.dtype).tiny)


def squared_distance(theta: Tensor, gamma: Gamma, name: str) -> Tensor:
    """Return t of the tensor called `name`, in units."""
    t = (theta - gamma.mu[name]) ** 2
    return t / gamma.unit.to(t.dtype) if isinstance(gamma.unit, Tensor) else t


def in_units(value: Tensor, gamma: Gamma) -> Tensor:
    """Return a second power of a parameter that is in units, in the parameters' own."""
    return value * gamma.unit.to(value.dtype) if isinstance(gamma.unit, Tensor) else value


def _weighted_sum(weight: Tensor, rows: Tensor) -> Tensor:
    """Return sum_k w_k rows_k for `rows` [clients, ...]."""
    total: Tensor = torch.tensordot(weight.to(rows.dtype), rows, dims=1)
    return total
