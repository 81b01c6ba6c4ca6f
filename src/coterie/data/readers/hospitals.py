"""Makes a federation of eight hospitals in which some gain by taking part and some cannot: what `coterie run` shows.

A patient has 20 measurements x and an outcome y. At hospital h, with sigmoid(z) = 1 / (1 + exp(-z)),

    x ~ N(m_h, I_20),   m_h ~ N(0, 0.3^2 I_20),   y = 1 with probability sigmoid(w_h . x + b_h),   b_h ~ N(-0.5, 0.5^2)

- Six hospitals, with 30 to 120 patients for training, share w: a vector of length 2.5 in a random direction. Their own
  patients are too few to find it, and together they have enough.
- The hospital "reversed", with 100, records half of the measurements with the opposite sign.
- The hospital "children", with 150, sees an illness that has nothing to do with the others': w has a random direction
  of its own.

So the truth is known: the first six can gain, for the last two a model of the others is of no use. Every hospital has
40 more patients for validation, and 1,000 for testing, so that verdicts are about more than chance; the shares
`validation` and `test` do not apply.
"""

from __future__ import annotations

import numpy as np
import torch

from coterie.core import rng
from coterie.data.federation import Federation, Split

MEASUREMENTS, STRENGTH = 20, 2.5
SHARING = {"north": 30, "east": 40, "south": 50, "west": 60, "coast": 80, "city": 120}  # patients for training
REVERSED, CHILDREN = {"reversed": 100}, {"children": 150}
VALIDATION, TEST = 40, 1000


def hospitals(name: str, seed: int, validation: float, test: float) -> Federation:
    """Make the federation; its splits are part of it."""
    shared = _direction(rng.generator(seed, name, "shared"))
    xs, ys, clients, start = [], [], {}, 0
    for client, train in {**SHARING, **REVERSED, **CHILDREN}.items():
        draw = rng.generator(seed, name, client)
        w = shared
        if client in REVERSED:
            w = shared * np.where(draw.permutation(MEASUREMENTS) < MEASUREMENTS // 2, -1, 1)
        elif client in CHILDREN:
            w = _direction(draw)
        size = train + VALIDATION + TEST
        x = 0.3 * draw.standard_normal(MEASUREMENTS) + draw.standard_normal((size, MEASUREMENTS))
        chance = 1 / (1 + np.exp(-(x @ w - 0.5 + 0.5 * draw.standard_normal())))
        y = (draw.random(size) < chance).astype(np.int64)
        clients[client] = Split(*np.split(start + np.arange(size), [train, train + VALIDATION]))
        xs.append(x.astype(np.float32))
        ys.append(y)
        start += size
    x_all, y_all = (torch.from_numpy(np.concatenate(part)) for part in (xs, ys))
    return Federation(name, x_all, y_all, clients, 2, ("well", "ill"))


def _direction(draw: np.random.Generator) -> np.ndarray:
    w = draw.standard_normal(MEASUREMENTS)
    return STRENGTH * w / np.linalg.norm(w)
