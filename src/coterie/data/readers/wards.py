"""Makes federations of six small wards for tasks that are neither classes nor numbers, with a truth that is known.

A patient has 10 measurements x ~ N(m, I), m ~ N(0, 0.2^2 I) of the ward. All wards share directions u_1, u_2, .. of
length 2, which none of them has the patients to find alone (30 to 80 for training, beside 40 for validation and 400 for
testing; the shares `validation` and `test` do not apply), so that federation helps. With z_k = u_k . x,

    complications   three labels, each 1 with probability sigmoid(z_k - 1); 15 % of them were not recorded
    severity        four levels, P(y >= k) = sigmoid(z_1 - c_k) for c = (-1, 0.5, 2): proportional odds
    survival-times  time = -log(U) e^(-z_1), the hazard being e^z_1; observation ends at a time, uniform on 0 to 3
    wards           death (as a label), days in hospital (2 + z_2 + N(0, 0.5^2)) and severity (as above) at once, of
                    which 30 % were not recorded
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.core import rng
from coterie.core.targets import Classes, Labels, Numbers, Ordered, Part, Several, Survival, Target
from coterie.core.targets.survival import EVENT
from coterie.data.federation import Federation, Split

Array = NDArray[np.float64]
MEASUREMENTS, STRENGTH = 10, 2.0
SIZES = {"north": 30, "east": 40, "south": 50, "west": 60, "coast": 70, "city": 80}  # patients for training
VALIDATION, TEST = 40, 400
THRESHOLDS = (-1.0, 0.5, 2.0)
LEVELS = ("none", "mild", "moderate", "severe")
TIMES = (0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0)


def complications(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation with several labels."""
    return _made(name, seed, Labels(("infection", "bleeding", "fall")), _labels)


def severity(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation with ordered levels."""
    return _made(name, seed, Ordered(len(LEVELS)), lambda z, draw: _levels(z[:, 0], draw)[:, 0], LEVELS)


def survival_times(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation with times until an event."""
    return _made(name, seed, Survival(TIMES), _times)


def wards(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation with several targets."""
    parts = (
        Part("death", Classes(2), classes=("survived", "died")),
        Part("days", Numbers(()), 0.5),
        Part("severity", Ordered(len(LEVELS)), classes=LEVELS),
    )
    return _made(name, seed, Several(parts), _several)


def directions(name: str, seed: int) -> Array:
    """Return u_1, u_2, u_3 as columns, [measurements, 3]."""
    u = rng.generator(seed, name, "shared").standard_normal((MEASUREMENTS, 3))
    return np.asarray(STRENGTH * u / np.linalg.norm(u, axis=0))


def _made(
    name: str,
    seed: int,
    target: Target,
    outcome: Callable[[Array, np.random.Generator], Array],
    classes: tuple[str, ...] = (),
) -> Federation:
    shared = directions(name, seed)
    xs, ys, clients, start = [], [], {}, 0
    for client, train in SIZES.items():
        draw = rng.generator(seed, name, client)
        size = train + VALIDATION + TEST
        x = 0.2 * draw.standard_normal(MEASUREMENTS) + draw.standard_normal((size, MEASUREMENTS))
        clients[client] = Split(*np.split(start + np.arange(size), [train, train + VALIDATION]))
        xs.append(x)
        ys.append(outcome(x @ shared, draw))
        start += size
    x_all, y_all = (torch.from_numpy(np.concatenate(part)) for part in (xs, ys))
    whole = x_all.float(), y_all.to(target.dtype), clients, target.num_values
    return Federation(name, *whole, classes, declared=target)


def _chance(z: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-z)))


def _labels(z: Array, draw: np.random.Generator) -> Array:
    return _forgotten((draw.random(z.shape) < _chance(z - 1)).astype(float), 0.15, draw)


def _levels(z: Array, draw: np.random.Generator) -> Array:
    u = draw.random(len(z))  # y >= k if u < P(y >= k), which falls with k
    found: Array = np.sum([u < _chance(z - c) for c in THRESHOLDS], axis=0, dtype=float)[:, None]
    return found


def _times(z: Array, draw: np.random.Generator) -> Array:
    time, end = -np.log1p(-draw.random(len(z))) * np.exp(-z[:, 0]), 3 * draw.random(len(z))
    y = np.stack([np.minimum(time, end), time <= end], 1).astype(float)
    assert y[:, EVENT].any()
    return y


def _several(z: Array, draw: np.random.Generator) -> Array:
    death = (draw.random((len(z), 1)) < _chance(z[:, :1] - 1)).astype(float)
    days = 2 + z[:, 1:2] + 0.5 * draw.standard_normal((len(z), 1))
    return _forgotten(np.hstack([death, days, _levels(z[:, 0], draw)]), 0.3, draw)


def _forgotten(y: Array, share: float, draw: np.random.Generator) -> Array:
    """Return the targets with some missing, but never all of an example."""
    missing = draw.random(y.shape) < share
    missing[missing.all(1), 0] = False
    return np.asarray(np.where(missing, np.nan, y))
