"""t-SNE (van der Maaten and Hinton, 2008) of a few hundred points, exactly, without a tree.

For so few points this takes a fraction of a second, which is less than importing a library that scales to more. A
step has no matrix product that would start threads: they would wait for each other longer than they work. It begins at
the first two principal components and draws no random numbers, so the same features give the same picture.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

PERPLEXITY = 30.0  # how many neighbours a point has, about
STEPS, EARLY = 350, 100  # of descent, and those of them in which attraction is exaggerated
EXAGGERATION = 12.0
WIDEST = 50  # principal components that distances are measured in


def tsne(features: Array) -> Array:
    """Return a place in the plane for each row of `features`."""
    spread = features.std(0)
    scaled = (features - features.mean(0)) / np.where(spread > 0, spread, 1)
    points = principal_components(scaled, WIDEST)
    start = np.pad(points[:, :2], ((0, 0), (0, max(0, 2 - points.shape[1]))))
    return _descend(_affinities(points), 1e-4 * start / max(float(start[:, 0].std()), 1e-12))


def principal_components(centred: Array, number: int) -> Array:
    """Return the coordinates along the directions of largest variance, largest first; signs are fixed."""
    if centred.shape[1] <= len(centred):  # the directions of a small matrix are found ten times as fast
        first = np.linalg.eigh(centred.T.astype(np.float64) @ centred)[1].T[::-1][:number]
    else:
        first = np.linalg.svd(centred, full_matrices=False)[2][:number]
    largest = np.abs(first).argmax(1)
    first = first * np.sign(first[np.arange(len(first)), largest])[:, None]
    return np.asarray(centred @ first.T, dtype=np.float32)


def _affinities(points: Array) -> Array:
    """Return p_ij, symmetric and summing to 1: Gaussians whose widths give every point the same perplexity."""
    squares = (points.astype(np.float64) ** 2).sum(1)
    distance = np.maximum(squares[:, None] + squares - 2 * (points @ points.T), 0)
    count = len(points)
    target = np.log(min(PERPLEXITY, (count - 1) / 3))
    low, high = np.zeros((count, 1)), np.full((count, 1), np.inf)
    precision = 1 / np.maximum(distance.mean(1, keepdims=True), 1e-12)
    nearest = (distance + np.diag(np.full(count, np.inf))).min(1, keepdims=True)
    beyond = distance - nearest
    np.fill_diagonal(beyond, 0)
    for _ in range(50):  # halving, for all points at once
        p = np.exp(-precision * beyond)
        np.fill_diagonal(p, 0)
        total = p.sum(1, keepdims=True)
        entropy = np.log(total) + precision * (p * beyond).sum(1, keepdims=True) / total
        wide = entropy > target
        low, high = np.where(wide, precision, low), np.where(wide, high, precision)
        precision = np.where(np.isinf(high), 2 * precision, (low + high) / 2)
    p /= total
    return np.asarray((p + p.T) / (2 * count), dtype=np.float32)


def _descend(p: Array, at: Array) -> Array:
    """Gradient descent with momentum and a step size of each coordinate's own, as the authors do it."""
    at, moved, gain = at.astype(np.float32), np.zeros_like(at, np.float32), np.ones_like(at, np.float32)
    rate = max(len(at) / EXAGGERATION / 4, 50.0)
    for step in range(STEPS):
        across, along = (at[:, None, k] - at[:, k] for k in range(2))
        near = 1 / (1 + across**2 + along**2)
        np.fill_diagonal(near, 0)
        pull = (EXAGGERATION if step < EARLY else 1.0) * p - near / near.sum()
        pull *= near
        gradient = 4 * np.stack([(pull * across).sum(1), (pull * along).sum(1)], 1)
        gain = np.maximum(np.where(gradient * moved < 0, gain + np.float32(0.2), gain * np.float32(0.8)), 0.01)
        moved = (0.5 if step < EARLY else 0.8) * moved - rate * gain * gradient
        at = at + moved
        at -= at.mean(0)
    return at
