"""A binary tree of classes, each leaf a class, so that a choice between classes is a few choices between two sides.

The tree of a client has its own classes only. It is balanced: its depth is ceil(log2 classes), and every level parts
the classes of each of its nodes into two halves (of unequal number where that is odd). A class is known by its leaf, a
number whose binary digits are the sides taken from the root, the first digit first:

    node of level d:   leaf >> (depth - d)            side taken there:   (leaf >> (depth - d - 1)) & 1

A class that the client does not have has the leaf ABSENT, and belongs to no node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core.tree import widest_float

ABSENT = -1


def depth(classes: int) -> int:
    """Return the number of levels of a tree with so many leaves, at least 1."""
    return max(1, (classes - 1).bit_length())


def balanced_tree(mean: Tensor, present: Tensor) -> Tensor:
    """Return a tree in which classes whose means are near each other part late.

    Each node is split between two seeds, the two class means that are farthest from each other. Its classes are sorted
    by how much nearer they are to the first seed (of lower number), and the first half takes side 0.

    Args:
        mean: [classes, dim], the mean feature of each class.
        present: [classes] bool, which of them there are.

    Returns:
        The leaves, [classes] int64.
    """
    mean = widest_float(torch.where(present[:, None], mean, 0.0))
    number = torch.arange(len(mean), device=mean.device)
    length = (mean**2).sum(1)
    distance = length[:, None] - 2 * mean @ mean.T + length  # squared, of each two classes
    later = number > number[:, None]
    node = torch.where(present, 0, ABSENT)
    for _ in range(depth(len(mean))):
        together = (node[:, None] == node) & present[:, None] & present  # [classes, classes]
        # Of each class the farthest one of higher number, and of a node the pair that is farthest.
        apart, partner = torch.where(together & later, distance, -torch.inf).max(1)
        one = torch.where(together, apart, -torch.inf).argmax(1)
        other = partner[one]
        nearer = distance[number, one] - distance[number, other]  # ascending: from the first seed to the other
        before = (nearer < nearer[:, None]) | ((nearer == nearer[:, None]) & later.T)
        rank = (together & before).sum(1)
        side = (rank >= (together.sum(1) + 1) // 2).to(node.dtype)
        node = torch.where(present, 2 * node + side, ABSENT)
    return node


def nodes(leaf: Tensor, levels: int) -> Tensor:
    """Return the node that each leaf belongs to on every level, [levels, ...]; ABSENT for ABSENT."""
    return torch.stack([leaf >> (levels - d) for d in range(levels)])


def sides(leaf: Tensor, levels: int) -> Tensor:
    """Return the side, 0 or 1, that each leaf takes on every level, [levels, ...]."""
    return torch.stack([(leaf >> (levels - d - 1)) & 1 for d in range(levels)])


def parted(leaf: Tensor, tree: Tensor, levels: int) -> Tensor:
    """Tell where a leaf's node has classes on both sides, [levels, ...] bool; elsewhere there is nothing to choose.

    Args:
        leaf: [...], any leaves.
        tree: [classes], the leaves of the tree.
        levels: its depth.
    """
    own, all_nodes = nodes(leaf, levels), nodes(tree, levels)
    together = (own[..., None] == all_nodes.reshape(levels, *[1] * leaf.ndim, -1)) & (own[..., None] != ABSENT)
    side = sides(tree, levels).reshape(levels, *[1] * leaf.ndim, -1)
    return (together & (side == 0)).any(-1) & (together & (side == 1)).any(-1)
