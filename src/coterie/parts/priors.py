"""Priors on the clients' models: R(theta, gamma) = -log rho_gamma(theta), without its normalising constant.

A prior is a frozen dataclass with pure functions. All priors treat parameters one by one and see a client's model only
through the squared distance t = (theta_i - mu_i)^2 from the centre, as `energy(t, v)` with a squared scale v:

    Gaussian          t / (2 v),                               v = sigma^2
    LearnedGaussian   t / (2 v) + epsilon (s_i^2 + mu_i^2),    v = s_i + c, that is alpha(s) = 1 / v
    Laplace           sqrt(2 t / v + tau^2) - tau,             v = sigma^2 = 2 b^2, about |theta_i - mu_i| / b
    StudentT          (nu + 1) / 2 log(1 + t / (nu v)),        v = sigma^2

Laplace's tip is rounded. A gradient step on gamma needs the slope of R where theta_i = mu_i, which is where |.| puts
many parameters and where it has no slope (tau = 0). The curvature there is 2 / (tau sigma^2), so plain gradient descent
settles only for step sizes below tau sigma^2. All energies are concave in t; `Prior.natural_step_sizes` uses that.
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


class Gamma(NamedTuple):
    """The parameters gamma of a prior, which clients are sent."""

    mu: Params  # the centre
    s: Params  # the learned part of the variance, for trained parameters; empty unless the variance is learned


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
            gamma: the prior's parameters, which have at least the names of `theta`.
        """
        terms = []
        for name, value in theta.items():
            t = (value - gamma.mu[name]) ** 2
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
                starts = [Gamma({name: m}, {name: v}) for m, v in zip(mu_pieces, s_pieces, strict=True)]
            else:
                starts = [Gamma({name: m}, {}) for m in mu_pieces]
            ends = [
                self._descend(start, {name: piece}, weight, lr, steps)
                for start, piece in zip(starts, rows_pieces, strict=True)
            ]
            mu[name] = torch.cat([end.mu[name] for end in ends]).reshape(gamma.mu[name].shape)
            if name in gamma.s:
                s[name] = torch.cat([end.s[name] for end in ends]).reshape(gamma.mu[name].shape)
        return Gamma(mu, s)

    def _descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        def objective(gamma: Gamma) -> Tensor:
            each = vmap(self.R, in_dims=(0, None))(theta, gamma)
            return weight.to(each.dtype) @ each + self._terms_of_gamma(gamma)

        for _ in range(steps):
            slope = grad(objective)(gamma)
            if lr == "natural":
                move = tree.map(torch.mul, self.natural_step_sizes(gamma, theta, weight), slope)
            else:
                move = tree.scale(slope, lr)
            gamma = self._project(tree.sub(gamma, move))
        return gamma

    def natural_step_sizes(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """Return a step size for each parameter of the prior that needs no tuning, in the shape of `gamma`.

        For mu it is 1 / sum_k w_k q_k, q = 2 d energy / d t, which moves mu to the mean of theta_k weighted by w_k q_k.
        Since energies are concave in t, this minimises an upper bound of the objective that touches it, and so never
        increases it. It is FedMAP's eq. 9 for a Gaussian, expectation maximisation for Student's t, and Weiszfeld's
        algorithm for Laplace. Arguments are those of `descend`.
        """

        def size(name: str) -> Tensor:
            t, v = (theta[name] - gamma.mu[name]) ** 2, self._squared_scale(gamma, name)
            q = 2 * grad(lambda t: self.energy(t, v).sum())(t)
            return 1 / _weighted_sum(weight, q)

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
            return Gamma(tree.mean(theta, weight), {})
        return super().descend(gamma, theta, weight, lr, steps)


@dataclass(frozen=True)
class LearnedGaussian(Prior):
    """A Gaussian that learns a variance s + c for each parameter; `epsilon` draws s and mu to 0."""

    c: float
    epsilon: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return t / (2 * v)

    def initial_spread(self, params: Params) -> Params:
        floats = {name: value for name, value in params.items() if value.is_floating_point()}
        return tree.map(lambda value: torch.full_like(value, self.sigma2 - self.c), floats)

    def natural_step_sizes(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """Return 1 / second derivative in mu and in s: Newton's step in each, which is exact for mu."""
        mu, s = {}, {}
        for name in gamma.mu:
            t, v = (theta[name] - gamma.mu[name]) ** 2, self._squared_scale(gamma, name)
            mu[name] = 1 / (1 / v + 2 * self.epsilon)
            s[name] = 1 / (_weighted_sum(weight, t) / v**3 + 2 * self.epsilon)
        return Gamma(mu, s)

    def _squared_scale(self, gamma: Gamma, name: str) -> Tensor:
        return gamma.s[name] + self.c

    def _terms_of_gamma(self, gamma: Gamma) -> Tensor:
        return self.epsilon * (tree.dot(gamma.mu, gamma.mu) + tree.dot(gamma.s, gamma.s))

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


def make_prior(family: Family, sigma2: float, c: float, epsilon: float, tau: float, nu: float) -> Prior:
    """Return the prior of that family; options that it does not have are ignored."""
    if family == "gaussian-learned":
        return LearnedGaussian(sigma2, c, epsilon)
    if family == "laplace":
        return Laplace(sigma2, tau)
    if family == "student-t":
        return StudentT(sigma2, nu)
    return Gaussian(sigma2)


def _weighted_sum(weight: Tensor, rows: Tensor) -> Tensor:
    """Return sum_k w_k rows_k for `rows` [clients, ...]."""
    total: Tensor = torch.tensordot(weight.to(rows.dtype), rows, dims=1)
    return total
