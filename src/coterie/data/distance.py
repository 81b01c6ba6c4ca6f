"""Measures how different the clients' labels and inputs are.

Labels: the total variation between label distributions.

    TV(p, q) = 1/2 sum_c |p_c - q_c|

It is 0 for two clients with the same shares of all classes and 1 for two without a common class: the share of one
client's labels that would have to change to match the other's.

Inputs: how far a client's mean input is from that of all, in standard deviations (root mean square over features).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.federation import Federation, SplitName

Numbers = NDArray[np.float64]
PARTS: tuple[SplitName, ...] = ("train", "validation", "test")
MOST_EXAMPLES = 2000  # of a client, whose inputs are looked at


@dataclass(frozen=True)
class Distances:
    """Label distances.

    Attributes:
        between: [clients (clients - 1) / 2], between every two clients.
        from_all: [clients], from each client to all clients together.
    """

    between: Numbers
    from_all: Numbers


def client_examples(federation: Federation, parts: Sequence[SplitName] = PARTS) -> list[NDArray[np.int64]]:
    """Return each client's positions in the pool: training, validation and test examples, or those of some `parts`."""
    return [np.concatenate([split[part] for part in parts]) for split in federation.clients.values()]


def class_counts(federation: Federation, parts: Sequence[SplitName] = PARTS) -> NDArray[np.int64]:
    """Count the examples of each client and class, [clients, classes], over all splits or some `parts`."""
    classes, labels = int(federation.num_classes or 0), federation.y.cpu().numpy()
    return np.stack([np.bincount(labels[own].ravel(), minlength=classes) for own in client_examples(federation, parts)])


def label_distances(counts: NDArray[np.int64]) -> Distances:
    """Compute the distances from the counts [clients, classes]; every client has at least one example."""
    from scipy.spatial.distance import pdist  # here, since only pictures of the data need it

    shares = counts / counts.sum(1, keepdims=True)
    together = counts.sum(0) / counts.sum()
    return Distances(pdist(shares, "cityblock") / 2, np.abs(shares - together).sum(1) / 2)


def label_distances_by_chance(counts: NDArray[np.int64], draw: np.random.Generator, repeats: int = 20) -> Numbers:
    """Return `from_all`, [clients], as it would be on average if the same labels were dealt out at random."""
    sizes, everyone = counts.sum(1), counts.sum(0)
    found = np.zeros(len(counts))
    for _ in range(repeats):
        left, dealt = everyone.copy(), []
        for size in sizes:
            hand = draw.multivariate_hypergeometric(left, size)
            left = left - hand
            dealt.append(hand)
        found += label_distances(np.stack(dealt)).from_all
    return found / repeats


def input_distances(federation: Federation, parts: Sequence[SplitName] = PARTS) -> tuple[Numbers, Numbers]:
    """Compare each client's mean input with that of all.

    Returns:
        Each client's distance, [clients], in standard deviations of the inputs of all, and what chance would give with
        so many examples.
    """
    import torch

    means, squares, sizes = [], [], []
    for own in client_examples(federation, parts):
        x = federation.x[torch.from_numpy(own[:MOST_EXAMPLES])]
        values = (x if federation.decode is None else federation.decode(x)).double().flatten(1).cpu().numpy()
        means.append(values.mean(0))
        squares.append((values**2).mean(0))
        sizes.append(len(values))
    weight = np.array(sizes, dtype=float)[:, None]
    centre = (weight * means).sum(0) / weight.sum()
    spread = np.sqrt(np.maximum((weight * squares).sum(0) / weight.sum() - centre**2, 0))
    known = spread > 1e-9 * max(float(spread.max(initial=0.0)), 1e-30)
    if not known.any():
        return np.zeros(len(sizes)), np.zeros(len(sizes))
    away = (np.stack(means)[:, known] - centre[known]) / spread[known]
    chance = np.sqrt(np.maximum(1 / weight[:, 0] - 1 / weight.sum(), 0))
    return np.sqrt((away**2).mean(1)), chance
