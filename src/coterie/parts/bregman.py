"""Bregman divergences on named tensors (Bregman, 1967; as in pFedBreD, eqs 1 to 4).

A strictly convex generator phi, a sum over coordinates, gives

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

from coterie.tree import Params

Generator = Literal["squared-norm", "diagonal", "log-cosh"]


class Bregman(ABC):
    """A generator phi. Its functions are given for the coordinates of the tensor called `name`, element by element."""

    @abstractmethod
    def value(self, name: str, x: Tensor) -> Tensor:
        """phi of each coordinate."""

    @abstractmethod
    def gradient(self, name: str, x: Tensor) -> Tensor:
        """phi'."""

    @abstractmethod
    def curvature(self, name: str, x: Tensor) -> Tensor:
        """phi''."""

    @abstractmethod
    def conjugate(self, name: str, s: Tensor) -> Tensor:
        """phi* of each coordinate."""

    @abstractmethod
    def inverse(self, name: str, s: Tensor) -> Tensor:
        """phi*', the inverse of phi'."""

    def divergence(self, a: Params, b: Params) -> Tensor:
        """D_phi(a, b), []."""
        return torch.stack([self._term(name, a[name], b[name]).sum() for name in a]).sum()

    def dual(self, params: Params) -> Params:
        """grad phi: from mean to natural parameters."""
        return {name: self.gradient(name, x) for name, x in params.items()}

    def primal(self, params: Params) -> Params:
        """grad phi*: from natural to mean parameters."""
        return {name: self.inverse(name, s) for name, s in params.items()}

    def pull(self, strength: float, theta: Params, mu: Params) -> Params:
        """Gradient of strength * D_phi(theta, mu) in theta."""
        return {n: strength * (self.gradient(n, x) - self.gradient(n, mu[n])) for n, x in theta.items()}

    def metric(self, at: Params, direction: Params) -> Params:
        """(grad^2 phi)(at) applied to `direction`."""
        return {name: self.curvature(name, at[name]) * v for name, v in direction.items()}

    def _term(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return self.value(name, a) - self.value(name, b) - self.gradient(name, b) * (a - b)


@dataclass(frozen=True)
class Quadratic(Bregman):
    """phi(x) = sum_j c_j x_j^2 / 2, with c_j given by tensor name and 1 elsewhere: the squared norm by default."""

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
    """phi(x) = sum_j d^2 log cosh(x_j / d): the squared norm near 0, linear far away; d = `width`.

    Distances count for less between large parameters, so the prior is wide where they are large.
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


def make(generator: Generator, head: frozenset[str], head_weight: float, width: float) -> Bregman:
    """The generator of that name; `diagonal` gives the tensors in `head` their own weight, and 1 to the rest."""
    if generator == "log-cosh":
        return LogCosh(width)
    return Quadratic(tuple((name, head_weight) for name in sorted(head)) if generator == "diagonal" else ())
