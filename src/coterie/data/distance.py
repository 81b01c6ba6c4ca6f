"""How different the clients' labels are: total variation between label distributions.

    TV(p, q) = 1/2 sum_c |p_c - q_c|

is 0 for two clients with the same shares of all classes, and 1 for two that have no class in common: it is the share of
one's labels that would have to change to be the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from coterie.data.federation import Federation

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """`between`: [clients (clients - 1) / 2], every two clients; `from_all`: [clients], each to all together."""

    between: Numbers
    from_all: Numbers


def owned(federation: Federation) -> list[NDArray[np.int64]]:
    """Each client's positions in the pool, for whatever use."""
    return [np.concatenate([split.train, split.validation, split.test]) for split in federation.clients.values()]


def class_counts(federation: Federation) -> NDArray[np.int64]:
    """[clients, classes]: examples, whether to train, validate or test on. Each has at least one."""
    classes, labels = int(federation.num_classes or 0), federation.y.numpy()
    return np.stack([np.bincount(labels[own].ravel(), minlength=classes) for own in owned(federation)])


def label_distances(counts: NDArray[np.int64]) -> Distances:
    shares = counts / counts.sum(1, keepdims=True)
    together = counts.sum(0) / counts.sum()
    return Distances(pdist(shares, "cityblock") / 2, np.abs(shares - together).sum(1) / 2)
