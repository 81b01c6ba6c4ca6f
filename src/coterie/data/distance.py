"""Measures how different the clients' labels are, by the total variation between label distributions.

    TV(p, q) = 1/2 sum_c |p_c - q_c|

It is 0 for two clients with the same shares of all classes and 1 for two without a common class: the share of one
client's labels that would have to change to match the other's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.federation import Federation

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """Label distances.

    Attributes:
        between: [clients (clients - 1) / 2], between every two clients.
        from_all: [clients], from each client to all clients together.
    """

    between: Numbers
    from_all: Numbers


def client_examples(federation: Federation) -> list[NDArray[np.int64]]:
    """Return each client's positions in the pool: training, validation and test examples."""
    return [np.concatenate([split.train, split.validation, split.test]) for split in federation.clients.values()]


def class_counts(federation: Federation) -> NDArray[np.int64]:
    """Count the examples of each client and class, [clients, classes], over all splits."""
    classes, labels = int(federation.num_classes or 0), federation.y.numpy()
    return np.stack([np.bincount(labels[own].ravel(), minlength=classes) for own in client_examples(federation)])


def label_distances(counts: NDArray[np.int64]) -> Distances:
    """Compute the distances from the counts [clients, classes]; every client has at least one example."""
    from scipy.spatial.distance import pdist  # here, since only pictures of the data need it

    shares = counts / counts.sum(1, keepdims=True)
    together = counts.sum(0) / counts.sum()
    return Distances(pdist(shares, "cityblock") / 2, np.abs(shares - together).sum(1) / 2)
