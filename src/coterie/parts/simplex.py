"""Weights on the probability simplex: projections, and the quadratic programs of methods that combine by weights."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 500  # of the accelerated descent; what error is left depends on how well Q is conditioned


def project(v: Tensor) -> Tensor:
    """Return the nearest point of the simplex (nonnegative, sum 1) for each row of `v` [rows, n]."""
    ordered = v.sort(1, descending=True).values
    place = torch.arange(1, v.shape[1] + 1, device=v.device)
    excess = (ordered.cumsum(1) - 1) / place
    support = (ordered > excess).sum(1, keepdim=True)
    return (v - excess.gather(1, support - 1)).clamp_min(0)


def minimise_quadratic(q: Tensor, linear: Tensor) -> Tensor:
    """Return, for each row b of `linear`, the a on the simplex that minimises a'Qa - 2 b'a.

    All rows share Q, so that they are solved together, by accelerated projected gradient descent with restarts.

    Args:
        q: [n, n], positive semidefinite.
        linear: [rows, n].
    """
    step = 1 / torch.linalg.eigvalsh(q)[-1].clamp_min(torch.finfo(q.dtype).tiny)
    a = ahead = torch.full_like(linear, 1 / linear.shape[1])
    t = torch.ones(len(linear), 1, dtype=q.dtype, device=q.device)
    for _ in range(STEPS):
        new = project(ahead - step * (ahead @ q - linear))
        # Momentum that points uphill is dropped, row by row.
        restart = ((ahead - new) * (new - a)).sum(1, keepdim=True) > 0
        t = torch.where(restart, 1.0, t)
        grown = (1 + (1 + 4 * t * t).sqrt()) / 2
        ahead, a, t = new + torch.where(restart, 0.0, (t - 1) / grown) * (new - a), new, grown
    return a
