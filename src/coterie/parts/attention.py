"""Attention between clients: how alike their models are, and sums of models weighted by it.

`rows` are models, a dict whose leaves are [rows, ...]. All pairs are compared through one Gram matrix X X', where X is
[rows, parameters]; it is summed in float64 over pieces of the parameters, so that memory stays bounded.

In this file and in `neighbours`, a client has been *heard* once it has sent a model to the server.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.optimizers import Optimizer
from coterie.core.tree import Params

PIECE_BYTES = 2**20  # size in float64 of the parameters that enter the Gram matrix at once: fits a core's own cache
MIN_PIECE_PARAMETERS = 1024  # no piece has fewer, since the whole Gram matrix is read and written for each piece
ROW_BLOCKS = 16  # blocks of rows in the Gram matrix; those below the diagonal are mirrored, not computed
# Products are padded to a multiple of ROW_MULTIPLE rows and to an even number of columns, at least MIN_COLUMNS. Their
# rows were seen to round alike in pairs on Intel's processors and in fours on AMD's; on AMD's, every other row rounds
# differently with 5 to 11 columns, and with an odd number of them in float64.
ROW_MULTIPLE = 8
MIN_COLUMNS = 16

# The automatic pull: how strong it is beside the loss when a round ends, and its largest value; see `gentle_pull`.
PULL_AT_END = 0.05
MAX_PULL = 1.0


def squared_distances(rows: Params) -> Tensor:
    """Return ||w_i - w_j||^2 for all i and j: [rows, rows], float64, symmetric, with zeros on the diagonal.

    The rows are centred first. Models that are close to each other are far from the origin, where ||w_i||^2 +
    ||w_j||^2 - 2 <w_i, w_j> would lose the digits in which they differ.
    """
    gram = _gram(rows, centre=True)
    lengths = gram.diagonal()
    # Both terms are exactly symmetric, and so is their difference. Rounding may leave it below 0.
    return torch.sub(lengths[:, None] + lengths[None, :], gram, alpha=2).clamp_min_(0)


def cosines(rows: Params) -> Tensor:
    """Return <w_i, w_j> / (||w_i|| ||w_j||) for all i and j: [rows, rows], float64, symmetric; 0 where a row is 0."""
    gram = _gram(rows, centre=False)
    lengths = gram.diagonal().sqrt()
    scale = lengths[:, None] * lengths[None, :]
    return torch.where(scale > 0, gram / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)


def attention_mask(heard: Tensor) -> Tensor:
    """Return whom each client may attend to: [clients, clients], true at (i, j) if j was heard and is not i.

    Args:
        heard: [clients] bool, who has sent a model so far.
    """
    off_diagonal = _off_diagonal(len(heard), heard.device)
    return off_diagonal if _all_true(heard) else heard[None, :] & off_diagonal


def heard_pairs(pairwise: Tensor, heard: Tensor) -> Tensor:
    """Keep the entries of a symmetric matrix that belong to pairs of clients that were both heard.

    Args:
        pairwise: [clients, clients], symmetric.
        heard: [clients] bool, who has sent a model so far.

    Returns:
        [clients, clients]: the entry of each pair once, above the diagonal, and NaN elsewhere. If only one client was
        heard, the entries of all clients with that one.
    """
    above = _above_diagonal(len(heard), heard.device)
    if len(heard) > 1 and _all_true(heard):
        return torch.where(above, pairwise, torch.nan)
    both = heard[:, None] & heard[None, :] & above
    return torch.where(torch.where(both.any(), both, heard[None, :].expand_as(both)), pairwise, torch.nan)


def _all_true(heard: Tensor) -> bool:
    """Tell whether all are known to be true; tensors on the meta device have no values."""
    return not heard.is_meta and bool(heard.all())


@functools.lru_cache(maxsize=8)
def _off_diagonal(size: int, device: torch.device) -> Tensor:
    """Return [size, size], true except on the diagonal. It is cached: do not modify it."""
    return ~torch.eye(size, dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=8)
def _above_diagonal(size: int, device: torch.device) -> Tensor:
    """Return [size, size], true above the diagonal. It is cached: do not modify it."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def typical_value(values: Tensor) -> Tensor:
    """Return the median of the nonnegative `values` that are not NaN, a scalar to divide by.

    It is the mean where the median is 0, because most models agree, and 1 where all values are 0 or there are none.
    """
    median, mean = values.flatten().nanmedian(), values.nanmean()  # NaN where there is none
    return torch.where(median > 0, median, torch.where(mean > 0, mean, 1.0))


def add_self_weights(weights: Tensor) -> Tensor:
    """Add the diagonal that makes every row of `weights` [clients, clients] sum to 1.

    xi_ii = 1 - sum_{j != i} xi_ij
    """
    return weights + torch.diag(1 - weights.sum(1))


def combine(xi: Tensor, rows: Params) -> Params:
    """Return u_i = sum_j xi_ij w_j for every row of `xi`.

    What a client gets does not depend, to the last bit, on which other clients are asked for together with it.

    Args:
        xi: [n, rows], the weights.
        rows: the models, leaves [rows, ...].

    Returns:
        Models with leaves [n, ...], of the types of those of `rows`.
    """

    def mixed(leaf: Tensor) -> Tensor:
        flat = leaf.reshape(len(leaf), -1)
        # Matrix products treat the rows left over after a multiple of some number differently, and these round
        # differently; with some numbers of columns, every other row does. Hence the padding of both.
        long = flat.shape[1]
        spare = max(MIN_COLUMNS - long, long % 2)
        flat = torch.nn.functional.pad(flat, (0, spare)) if spare else flat
        weights = torch.cat([xi, xi[:1].expand(-len(xi) % ROW_MULTIPLE, -1)])
        own = weights.to(leaf.dtype if leaf.is_floating_point() else weights.dtype)
        out = (own @ flat.to(own.dtype))[: len(xi), :long].reshape(len(xi), *leaf.shape[1:])
        return out if leaf.is_floating_point() else out.round().to(leaf.dtype)

    return tree.map(mixed, rows)


def gentle_pull(optimizer: Optimizer, batches: Batches) -> Tensor:
    """Return the strength p of a pull (p / 2) ||w - u||^2 that hardly slows a round of training down, a scalar.

    From u, n steps of size a down a gradient g that hardly changes end at distance (1 - (1 - a p)^n) / p |g| from u,
    instead of a n |g| without the pull: with a p n = s, this is s / 2 less. At the end the pull is s times as strong
    as the loss. So p = s / (a n), with s = `PULL_AT_END`: a round makes over 97 % of the progress that it would
    make alone, be it long or short. p is at most `MAX_PULL`, which very short rounds reach, and those of optimisers
    that do not move in proportion to the gradient.

    Args:
        optimizer: takes the steps; a is its `lr`. If it has none, p is `MAX_PULL`.
        batches: the client's minibatches of the round, of which n are no padding; with a schedule, n counts each by
            its pace.
    """
    steps = batches.total_pace().to(batches.mask.dtype)
    size = getattr(optimizer.at_full_pace, "lr", 0.0)
    return PULL_AT_END / (size * steps).clamp_min(PULL_AT_END / MAX_PULL)


def _gram(rows: Params, centre: bool) -> Tensor:
    """Return X X' for X [rows, parameters], centred if asked; [rows, rows], float64, exactly symmetric.

    Nearly half of it is not computed but mirrored.
    """
    leaves = [leaf.reshape(len(leaf), -1) for leaf in rows.values()]
    size = len(leaves[0])
    width = min(max(PIECE_BYTES // (8 * size), MIN_PIECE_PARAMETERS), max(leaf.shape[1] for leaf in leaves))
    total = tree.widest_float(leaves[0].new_zeros(size, size))
    room = total.new_empty(size * width)  # shared by all pieces, since mapping new memory takes time
    starts = range(0, size, max(64, -(-size // ROW_BLOCKS)))
    for piece in (piece for leaf in leaves for piece in torch.split(leaf, width, 1)):
        x = room[: piece.numel()].view(piece.shape).copy_(piece)
        if centre:
            x -= x.mean(0)
        for start in starts:
            rest, block = slice(start, size), slice(start, start + starts.step)
            total[block, rest].addmm_(x[block], x[rest].T)
    return total.triu() + total.triu(1).T
