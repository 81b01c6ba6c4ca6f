"""Priors on the clients' models: R(theta, gamma) = -log rho_gamma(theta), without its normalising constant.

A prior is a frozen object of pure functions. All of them treat the parameters one by one and see a client's model only
through its squared distance t = (theta_i - mu_i)^2 from the centre, as `energy(t, v)` with a squared scale v:

    Gaussian          t / (2 v),                               v = sigma^2
    LearnedGaussian   t / (2 v) + epsilon (s_i^2 + mu_i^2),    v = s_i + c, that is alpha(s) = 1 / v
    Laplace           sqrt(2 t / v + tau^2) - tau,             v = sigma^2 = 2 b^2, about |theta_i - mu_i| / b
    StudentT          (nu + 1) / 2 log(1 + t / (nu v)),        v = sigma^2

Laplace's tip is rounded: a gradient step on gamma needs the slope of R where theta_i = mu_i, and that is where |.| puts
many parameters and has no slope (tau = 0). Its curvature is 2 / (tau sigma^2) there, so plain gradient descent settles
only for step sizes below tau sigma^2. All energies are concave in t, see `Prior.natural`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from coterie import tree
from coterie.tree import Params

SLACK = 0.01  # of a log-weight: the rounding of many small terms
PIECE_BYTES = 4 * 2**20  # of clients' parameters that take a step at once: what a processor's cache holds
FLOOR = 1e-3  # a learned variance stays above this share of c; the best s is never below 0, so it binds in passing only
Family = Literal["gaussian", "gaussian-learned", "laplace", "student-t"]
Rate = Literal["natural"] | Annotated[float, Field(gt=0)]


class Gamma(NamedTuple):
    """A prior's parameters; clients are sent this."""

    mu: Params
    s: Params  # names and shapes as in mu, trained parameters only; empty unless the variance is learned


@dataclass(frozen=True)
class Prior(ABC):
    sigma2: float

    @abstractmethod
    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        """-log density of each parameter, from its squared distance t to the centre."""

    def spread(self, params: Params) -> Params:
        """gamma's s at the start."""
        return {}

    def R(self, theta: Params, gamma: Gamma) -> Tensor:
        """The terms of R that depend on theta, which is all that clients need, [] (names as in theta)."""
        terms = [
            self.energy((value - gamma.mu[name]) ** 2, self._v(gamma, name)).sum() for name, value in theta.items()
        ]
        return torch.stack(terms).sum()

    def penalty(self, theta: Params, anchor: tuple[Gamma, Tensor]) -> Tensor:
        """strength * R, for `anchor = (gamma, strength)`."""
        gamma, strength = anchor
        return strength * self.R(theta, gamma)

    def descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        """`steps` gradient steps on gamma -> sum_k w_k R(theta_k, gamma); leaves of `theta` are [clients, ...].

        Parameters do not meet each other here, so they take their steps in pieces: what is held beside the clients'
        models does not grow with them.
        """
        width = max(1, PIECE_BYTES // (4 * len(weight)))
        found: dict[str, list[Gamma]] = {}
        for name, rows in theta.items():
            flat = [
                torch.split(part.flatten(), width) for part in (gamma.mu[name], gamma.s.get(name)) if part is not None
            ]
            for rows_piece, *own in zip(torch.split(rows.reshape(len(rows), -1), width, 1), *flat, strict=True):
                piece = Gamma(*({name: part} for part in own), *([{}] * (2 - len(own))))
                found.setdefault(name, []).append(self._descend(piece, {name: rows_piece}, weight, lr, steps))

        def whole(name: str, part: int) -> Tensor:
            return torch.cat([piece[part][name] for piece in found[name]]).reshape(gamma.mu[name].shape)

        return Gamma({name: whole(name, 0) for name in theta}, {name: whole(name, 1) for name in gamma.s})

    def _descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        def objective(gamma: Gamma) -> Tensor:
            each = vmap(self.R, in_dims=(0, None))(theta, gamma)
            return weight.to(each.dtype) @ each + self._own_terms(gamma)

        for _ in range(steps):
            slope = grad(objective)(gamma)
            if lr == "natural":
                move = tree.map(torch.mul, self.natural(gamma, theta, weight), slope)
            else:
                move = tree.scale(slope, lr)
            gamma = self._inside(tree.sub(gamma, move))
        return gamma

    def natural(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """A step size for each parameter of the prior that needs no tuning.

        For mu it is 1 / sum_k w_k q_k, q = 2 d energy / d t, which moves mu to the mean of theta_k weighted by w_k q_k.
        Since energies are concave in t, this minimises an upper bound of the objective that touches it, and so never
        increases it. It is eq. 9 for a Gaussian, expectation-maximisation for Student's t, Weiszfeld's for Laplace.
        """

        def size(name: str) -> Tensor:
            t, v = (theta[name] - gamma.mu[name]) ** 2, self._v(gamma, name)
            q = 2 * grad(lambda t: self.energy(t, v).sum())(t)
            return 1 / _average(weight, q)

        return Gamma({name: size(name) for name in gamma.mu}, {})

    def _v(self, gamma: Gamma, name: str) -> float | Tensor:
        return self.sigma2

    def _own_terms(self, gamma: Gamma) -> Tensor:
        """The terms of R that depend on gamma alone."""
        return torch.zeros(())

    def _inside(self, gamma: Gamma) -> Gamma:
        return gamma


@dataclass(frozen=True)
class Gaussian(Prior):
    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return t / (2 * v)

    def descend(self, gamma: Gamma, theta: Params, weight: Tensor, lr: Rate, steps: int) -> Gamma:
        if lr == "natural":  # the step of size sigma^2 in closed form, which no second one would move
            return Gamma(tree.mean(theta, weight), {})
        return super().descend(gamma, theta, weight, lr, steps)


@dataclass(frozen=True)
class LearnedGaussian(Prior):
    """Variance s + c of its own for each parameter, sigma2 at first; epsilon draws s and mu to 0."""

    c: float
    epsilon: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return t / (2 * v)

    def spread(self, params: Params) -> Params:
        floats = {name: value for name, value in params.items() if value.is_floating_point()}
        return tree.map(lambda value: torch.full_like(value, self.sigma2 - self.c), floats)

    def natural(self, gamma: Gamma, theta: Params, weight: Tensor) -> Gamma:
        """For mu and for s, 1 / second derivative: Newton's step in each, exact for mu."""

        def size(name: str) -> tuple[Tensor, Tensor]:
            t, v = (theta[name] - gamma.mu[name]) ** 2, self._v(gamma, name)
            return 1 / (1 / v + 2 * self.epsilon), 1 / (_average(weight, t) / v**3 + 2 * self.epsilon)

        sizes = {name: size(name) for name in gamma.mu}
        return Gamma({name: mu for name, (mu, _) in sizes.items()}, {name: s for name, (_, s) in sizes.items()})

    def _v(self, gamma: Gamma, name: str) -> Tensor:
        return gamma.s[name] + self.c

    def _own_terms(self, gamma: Gamma) -> Tensor:
        return self.epsilon * (tree.dot(gamma.mu, gamma.mu) + tree.dot(gamma.s, gamma.s))

    def _inside(self, gamma: Gamma) -> Gamma:
        return gamma._replace(s=tree.map(lambda s: s.clamp_min((FLOOR - 1) * self.c), gamma.s))


@dataclass(frozen=True)
class Laplace(Prior):
    tau: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return (2 * t / v + self.tau**2).sqrt() - self.tau


@dataclass(frozen=True)
class StudentT(Prior):
    nu: float

    def energy(self, t: Tensor, v: float | Tensor) -> Tensor:
        return (self.nu + 1) / 2 * torch.log1p(t / (self.nu * v))


def make(family: Family, sigma2: float, c: float, epsilon: float, tau: float, nu: float) -> Prior:
    priors: dict[str, Prior] = {
        "gaussian": Gaussian(sigma2),
        "gaussian-learned": LearnedGaussian(sigma2, c, epsilon),
        "laplace": Laplace(sigma2, tau),
        "student-t": StudentT(sigma2, nu),
    }
    return priors[family]


def _average(weight: Tensor, rows: Tensor) -> Tensor:
    mean: Tensor = torch.tensordot(weight.to(rows.dtype), rows, dims=1)
    return mean


def overweight(method: Any, up: Any, examples: int) -> str | None:
    """FedMAP's `implausible`: neither L nor R is below 0, so no omega is above 1 (but for rounding)."""
    most = math.log(examples) if method.weighting == "samples" else 0.0
    said = float(up.log_weight)
    return f"a log-weight of {said:g}, where at most {most:g} is possible" if said > most + SLACK else None
