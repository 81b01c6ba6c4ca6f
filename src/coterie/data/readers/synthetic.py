"""Makes FedMAP's synthetic federations (section 4.1, appendix B; details not in the text are from the authors' code).

In R^30, rotated by one random orthogonal matrix Q that all clients share:

    y = 0:  x = [N(0, 2 I_4), N(0, 9 I_26)] Q
    y = 1:  x = [r u, N(0, 9 I_26)] Q,   u uniform on the sphere S^3,  r ~ N(8, 2)

Client i (from 0) then sees x A_i + b_i with A_i i.i.d. N(0, 1), 30 x 30, and b_i = 5 (i + 1) N(0, I_30): clients do not
share an input space. Second arguments of N are variances. Each client scales its features by the mean and standard
deviation of its own training examples, which takes b_i away again.

- feature skew: 10 clients of 2,000 examples, half of each class;
- quantity skew: 5 clients of 2,000 and 5 of 500, half of each class;
- label skew: 10 clients of 2,000; 5 with half of each class, 5 with 85 % of class 0.

All three have the clients' own A_i and b_i. With `feature_skew=False` clients see x itself, so that quantity and label
skew can be had on their own.

The authors keep a constant column with the client's number as a 31st input; scaling makes it zero, so it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from coterie.core import rng
from coterie.data.federation import Federation, Split, split_client

DIM, SIGNAL = 30, 4
CLIENTS = 10


def synthetic(
    name: str,
    seed: int,
    *,
    sizes: Sequence[int] = (2000,) * CLIENTS,
    share_of_0: Sequence[float] = (0.5,) * CLIENTS,
    feature_skew: bool = True,
    validation: float = 0.1,
    test: float = 0.3,
) -> Federation:
    """Make a federation; `sizes` and `share_of_0` have one entry per client."""
    rotation, upper = np.linalg.qr(rng.generator(seed, "synthetic", "rotation").standard_normal((DIM, DIM)))
    rotation *= np.sign(np.diag(upper))  # makes the rotation uniformly distributed
    xs, ys, splits, start = [], [], {}, 0
    for i, (size, share) in enumerate(zip(sizes, share_of_0, strict=True)):
        client = f"client-{i + 1}"
        draw = rng.generator(seed, "synthetic", client)
        x, y = _points(draw, int(share * size), size, rotation)
        if feature_skew:
            x = x @ draw.standard_normal((DIM, DIM)) + 5 * (i + 1) * draw.standard_normal(DIM)
        split = split_client(client, size, y, validation, test, seed)
        x = (x - x[split.train].mean(0)) / x[split.train].std(0)
        xs.append(x.astype(np.float32))
        ys.append(y)
        splits[client] = Split(split.train + start, split.validation + start, split.test + start)
        start += size
    return Federation(name, torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys)), splits, 2)


def _points(draw: np.random.Generator, num_0: int, size: int, rotation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    signal = draw.standard_normal((size, SIGNAL))
    signal[:num_0] *= np.sqrt(2.0)
    radius = 8 + np.sqrt(2.0) * draw.standard_normal((size - num_0, 1))
    signal[num_0:] *= radius / np.linalg.norm(signal[num_0:], axis=1, keepdims=True)
    nuisance = 3.0 * draw.standard_normal((size, DIM - SIGNAL))
    y = (np.arange(size) >= num_0).astype(np.int64)
    order = draw.permutation(size)
    return (np.concatenate([signal, nuisance], axis=1) @ rotation)[order], y[order]
