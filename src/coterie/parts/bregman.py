"""Bregman divergences on named tensors (Bregman, 1967; as in pFedBreD, eqs 1 to 4).

A strictly convex generator phi that is a sum over coordinates gives

    D_phi(a, b) = phi(a) - phi(b) - <grad phi(b), a - b>  >= 0                                (`divergence`)
    s = grad phi(mu), mu = grad phi*(s)         natural and mean parameters of one prior      (`dual`, `primal`)

where phi*(s) = sup_x <s, x> - phi(x) is the Fenchel conjugate. Then D_phi(a, b) = D_phi*(grad phi(b), grad phi(a)).
A prior with density proportional to exp(-lambda D_phi(theta, mu)) is a member of the exponential family with mean
parameter mu; the squared norm gives the spherical Gaussian. pFedBreD writes g* for phi, and g for phi*.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.tree import Params

Generator = Literal["squared-norm", "diagonal", "log-cosh"]


class Bregman(ABC):
    """A generator phi.

    A subclass gives phi and its derivatives for single coordinates: each function takes the name of a tensor and its
    values, and returns a tensor of the same shape. The other functions here work on whole models.
    """

    @abstractmethod
    def value(self, name: str, x: Tensor) -> Tensor:
        """Return phi(x) of each coordinate."""

    @abstractmethod
    def gradient(self, name: str, x: Tensor) -> Tensor:
        """Return phi'(x)."""

    @abstractmethod
    def curvature(self, name: str, x: Tensor) -> Tensor:
        """Return phi''(x)."""

    @abstractmethod
    def conjugate(self, name: str, s: Tensor) -> Tensor:
        """Return the conjugate phi*(s) of each coordinate."""

    @abstractmethod
    def inverse(self, name: str, s: Tensor) -> Tensor:
        """Return phi*'(s), the inverse function of phi'."""

    def divergence(self, a: Params, b: Params) -> Tensor:
        """Return D_phi(a, b), a scalar, over the names of `a`."""
        return torch.stack([self._term(name, a[name], b[name]).sum() for name in a]).sum()

    def dual(self, params: Params) -> Params:
        """Return grad phi, which takes mean parameters to natural ones."""
        return {name: self.gradient(name, x) for name, x in params.items()}

    def primal(self, params: Params) -> Params:
        """Return grad phi*, which takes natural parameters to mean ones."""
        return {name: self.inverse(name, s) for name, s in params.items()}

    def divergence_gradient(self, strength: float, theta: Params, mu: Params) -> Params:
        """Return the gradient of strength * D_phi(theta, mu) in theta, with the names of `theta`."""
        return {name: strength * (self.gradient(name, x) - self.gradient(name, mu[name])) for name, x in theta.items()}

    def metric(self, at: Params, direction: Params) -> Params:
        """Return (grad^2 phi)(at) applied to `direction`, with the names of `direction`."""
        return {name: self.curvature(name, at[name]) * v for name, v in direction.items()}

    def _term(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """Return D_phi of each coordinate."""
        return self.value(name, a) - self.value(name, b) - self.gradient(name, b) * (a - b)


@dataclass(frozen=True)
class Quadratic(Bregman):
    """phi(x) = sum_j c_j x_j^2 / 2, where `weights` gives c_j by tensor name, and c_j is 1 for all other names."""

    weights: tuple[tuple[str, float], ...] = ()

    def value(self, name: str, x: Tensor) -> Tensor:
        return 0.5 * self._weight(name) * x**2

    def gradient(self, name: str, x: Tensor) -> Tensor:
        return self._weight(name) * x

    def curvature(self, name: str, x: Tensor) -> Tensor:
        return torch.full_like(x, self._weight(name))

    def conjugate(self, name: str, s: Tensor) -> Tensor:
        return 0.5 / self._weight(name) * s**2

    def inverse(self, name: str, s: Tensor) -> Tensor:
        return s / self._weight(name)

    def _term(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return self.value(name, a - b)  # the same number, without cancellation

    def _weight(self, name: str) -> float:
        return dict(self.weights).get(name, 1.0)


@dataclass(frozen=True)
class LogCosh(Bregman):
    """phi(x) = sum_j d^2 log cosh(x_j / d) with d = `width`, which is quadratic near 0 and linear far away.

    Distances between large parameters count for less, so the prior is wide where parameters are large.
    """

    width: float = 1.0

    def value(self, name: str, x: Tensor) -> Tensor:
        u = (x / self.width).abs()
        return self.width**2 * (u + F.softplus(-2 * u) - math.log(2))

    def gradient(self, name: str, x: Tensor) -> Tensor:
        return self.width * torch.tanh(x / self.width)

    def curvature(self, name: str, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x / self.width) ** 2

    def conjugate(self, name: str, s: Tensor) -> Tensor:
        u = s / self.width  # in (-1, 1)
        return 0.5 * self.width**2 * ((1 + u) * torch.log1p(u) + (1 - u) * torch.log1p(-u))

    def inverse(self, name: str, s: Tensor) -> Tensor:
        return self.width * torch.atanh(s / self.width)


def make_generator(generator: Generator, head: frozenset[str], head_weight: float, width: float) -> Bregman:
    """Return the generator of that name.

    Args:
        generator: its name.
        head: for `diagonal`, the tensors whose weight is `head_weight`; all others have weight 1.
        head_weight: see `head`.
        width: for `log-cosh`, where it turns from quadratic to linear.
    """
    if generator == "log-cosh":
        return LogCosh(width)
    if generator == "diagonal":
        return Quadratic(tuple((name, head_weight) for name in sorted(head)))
    return Quadratic()
