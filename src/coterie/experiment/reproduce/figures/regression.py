"""FedMAP's appendix A.4: five lines of one slope, by minimising F (eq. 20) and by minimising M (eq. 22).

F is the mean squared error of one line for all points, and has a closed form. M is the mean over clients, weighted by
their numbers of points, of the smallest value of their own mean squared error plus the quadratic regulariser with
strengths alpha(s) = 1 / (s + 1); its inner minimisation has a closed form, too, and the outer one, over (mu_a, mu_b,
s_a, s_b), is done numerically from mu = 0, s = 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers.embedded import A4_SIZES, A4_TEST, a4_points
from coterie.experiment.reproduce.figures.panels import Drawing, drawing, points
from coterie.experiment.reproduce.tables import Size

Array = NDArray[np.float64]
EPSILON = 1e-4  # eq. 21
DITTO = 0.1  # sigma_a = sigma_b of figure 3b
SEED = 0


class Client(NamedTuple):
    x: Array
    y: Array


class Prior(NamedTuple):
    mu: Array  # (mu_a, mu_b)
    strength: Array  # (alpha(s_a), alpha(s_b))


def clients(seed: int = SEED) -> tuple[list[Client], list[Client]]:
    """Draw training and test points of all five clients."""
    draw = np.random.default_rng(seed)
    train = [Client(*a4_points(k, size, draw)) for k, size in enumerate(A4_SIZES)]
    return train, [Client(*a4_points(k, A4_TEST, draw)) for k in range(len(A4_SIZES))]


def minimise_f(train: list[Client]) -> Array:
    """Return (a, b) of eq. 20: least squares over all points."""
    x, y = (np.concatenate(part) for part in zip(*train, strict=True))
    found: Array = np.linalg.lstsq(np.stack([x, np.ones_like(x)], 1), y, rcond=None)[0]
    return found


def own_line(client: Client, prior: Prior) -> Array:
    """Return the (a, b) that minimises a client's mean squared error plus its regulariser."""
    design = np.stack([client.x, np.ones_like(client.x)], 1)
    count = len(client.x)
    left = 2 * design.T @ design / count + np.diag(prior.strength)
    right = 2 * design.T @ client.y / count + prior.strength * prior.mu
    found: Array = np.linalg.solve(left, right).astype(np.float64)
    return found


def envelope(client: Client, prior: Prior) -> float:
    """Return M_k without its perturbation: the value of that minimum."""
    line = own_line(client, prior)
    error = np.mean((line[0] * client.x + line[1] - client.y) ** 2)
    return float(error + 0.5 * np.sum(prior.strength * (line - prior.mu) ** 2))


def minimise_m(train: list[Client]) -> Prior:
    """Return the prior that minimises eq. 22, with w_k = N_k / N."""
    from scipy.optimize import minimize  # here, since importing it takes a while

    weight = np.array([len(each.x) for each in train]) / sum(len(each.x) for each in train)

    def value(at: Array) -> float:
        prior = Prior(at[:2], 1 / (at[2:] + 1))
        each = [envelope(client, prior) for client in train]
        return float(weight @ each + EPSILON * np.sum(at**2))

    bounds = [(None, None), (None, None), (-0.999, None), (-0.999, None)]
    found = minimize(value, np.zeros(4), method="L-BFGS-B", bounds=bounds, options={"maxiter": 2000}).x
    return Prior(found[:2], 1 / (found[2:] + 1))


def figure(size: Size) -> Drawing:
    """Draw figures 2 and 3: training points with both lines for all, test points with each client's."""
    train, test = clients()
    for_all, prior = minimise_f(train), minimise_m(train)
    ditto = Prior(for_all, np.full(2, DITTO))
    label = [f"client {k + 1}: {len(each.x)} points" for k, each in enumerate(train)]
    dots = {name: (each.x.tolist(), each.y.tolist()) for name, each in zip(label, train, strict=True)}
    tested = {name: (each.x.tolist(), each.y.tolist()) for name, each in zip(label, test, strict=True)}
    panels = [
        points("2b: the minimum of F", "x", "y", dots, {"F": _line(for_all, train)}, legend=True),
        points("2c: the minimum of M", "x", "y", dots, {"M": _line(prior.mu, train)}, legend=True),
        points("3a: test points", "x", "y", tested),
    ]
    for words, chosen in (("3b: pulled to F's line (Ditto)", ditto), ("3c: pulled to M's (FedMAP)", prior)):
        lines_ = [own_line(each, chosen) for each in train]
        errors = [rmse(line, each) for line, each in zip(lines_, test, strict=True)]
        curves = {name: _line(line, [each]) for name, line, each in zip(label, lines_, test, strict=True)}
        panels.append(points(f"{words}, RMSE {np.mean(errors):.2f}", "x", "y", tested, curves))
    said = f"mu = ({prior.mu[0]:.2f}, {prior.mu[1]:.2f}), alpha = ({prior.strength[0]:.3f}, {prior.strength[1]:.3f})"
    return drawing(f"FedMAP, figures 2 and 3: a and b of F ({for_all[0]:.2f}, {for_all[1]:.2f}); of M {said}", panels)


def rmse(line: Array, client: Client) -> float:
    """Return the error of a line for a client's points."""
    return float(np.sqrt(np.mean((line[0] * client.x + line[1] - client.y) ** 2)))


def _line(line: Array, of: list[Client]) -> tuple[list[float], list[float]]:
    low, high = min(each.x.min() for each in of), max(each.x.max() for each in of)
    return [low, high], [line[0] * low + line[1], line[0] * high + line[1]]
