"""How alike the clients' models are, and combining them by it: the shared parts of attentive methods.

Rows are models: a dict whose leaves are [rows, ...]. All pairs come from one Gram matrix, sum over parameters of
X X' with X [rows, parameters], gathered in float64 over pieces of the parameters so that memory stays bounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie import native, paged, tree
from coterie.method import Newcomer
from coterie.processor import intel
from coterie.tree import Params

NEAR_BYTES = 2**20  # of parameters in float64 at once: what a core's own cache holds
WIDE = 1024  # but no piece has fewer parameters, since for each the whole matrix is read and written
BLOCKS = 16  # of rows; the products of a block with those before it are known by symmetry
ROWS = 8  # a multiple of what was seen to round alike: 2 on Intel's processors, 4 on AMD's
COLUMNS = 16  # at least, and even: of 5 to 11, or of an odd number in float64, rows round by turns on AMD's
FEW = 32  # rows, at most, that our own products mix: these read all rows side by side
MANY = 128  # rows, at least, that are laid out anew for a product: of few, that costs more than it saves
LANES, LANE = 8, 256  # at once, a core one of them; of 1,000 rows, so many parameters fill a core's own cache


def squared_distances(rows: Params) -> Tensor:
    """||w_i - w_j||^2 for all i, j: [rows, rows], float64, symmetric, with zeros on the diagonal.

    The rows are centred first: models that are close to each other are far from the origin, and ||w_i||^2 + ||w_j||^2 -
    2 <w_i, w_j> would lose the digits in which they differ.
    """
    gram = _gram(rows, centre=True)
    lengths = gram.diagonal()
    # The sum before it is symmetric, and so is the Gram matrix; what rounding leaves below 0 is 0.
    return torch.sub(lengths[:, None] + lengths[None, :], gram, alpha=2).clamp_min_(0)


def cosines(rows: Params) -> Tensor:
    """<w_i, w_j> / (||w_i|| ||w_j||) for all i, j: [rows, rows], float64, symmetric; 0 where a row is 0."""
    gram = _gram(rows, centre=False)
    lengths = gram.diagonal().sqrt()
    scale = lengths[:, None] * lengths[None, :]
    return torch.where(scale > 0, gram / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0.0)


def others(heard: Tensor) -> Tensor:
    """Whom each client attends to: [clients, clients], true at (i, j) if j has been heard and is not i."""
    apart = _apart(len(heard), heard.device)
    return apart if _all(heard) else heard[None, :] & apart


def pairs(pairwise: Tensor, heard: Tensor) -> Tensor:
    """A symmetric [clients, clients] matrix where i < j were both heard, NaN elsewhere; of one heard, all with it."""
    above = _above(len(heard), heard.device)
    if len(heard) > 1 and _all(heard):
        return torch.where(above, pairwise, torch.nan)
    both = heard[:, None] & heard[None, :] & above
    return torch.where(torch.where(both.any(), both, heard[None, :].expand_as(both)), pairwise, torch.nan)


def _all(heard: Tensor) -> bool:
    return not heard.is_meta and bool(heard.all())


@functools.lru_cache(maxsize=8)
def _apart(size: int, device: torch.device) -> Tensor:
    """[size, size], true but on the diagonal; not to be changed."""
    return ~torch.eye(size, dtype=torch.bool, device=device)


@functools.lru_cache(maxsize=8)
def _above(size: int, device: torch.device) -> Tensor:
    """The same, true above the diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def middle(values: Tensor) -> Tensor:
    """The median, [], of nonnegative values or NaN; where it is 0 (most agree) the mean, and 1 where all are 0."""
    median, mean = values.flatten().nanmedian(), values.nanmean()  # NaN where there is none
    return torch.where(median > 0, median, torch.where(mean > 0, mean, 1.0))


def with_self(weights: Tensor) -> Tensor:
    """The diagonal that makes every row sum to one, xi_ii = 1 - sum_{j != i} xi_ij."""
    return weights + torch.diag(1 - weights.sum(1))


def combine(xi: Tensor, rows: Params) -> Params:
    """u_i = sum_j xi_ij w_j for every row of `xi` [n, rows]; leaves [n, ...]."""

    def mixed(leaf: Tensor) -> Tensor:
        flat = leaf.reshape(len(leaf), -1)
        if len(flat) <= FEW and native.own(flat):
            own = native.mixed(xi.to(flat.dtype).contiguous(), flat.contiguous())
            return own.reshape(len(xi), *leaf.shape[1:])
        # What is left of rows after a multiple of some number is a product of another kind, which rounds differently,
        # and of some numbers of columns every other row does: whom else it is asked for must not change what a client
        # gets.
        long = flat.shape[1]
        spare = max(COLUMNS - long, long % 2)
        flat = torch.nn.functional.pad(flat, (0, spare)) if spare else flat
        weights = torch.cat([xi, xi[:1].expand(-len(xi) % ROWS, -1)])
        own = weights.to(leaf.dtype if leaf.is_floating_point() else weights.dtype)
        product = _plain if len(flat) < MANY or intel() else _in_lanes
        out = product(own, flat, len(xi))[:, :long].reshape(len(xi), *leaf.shape[1:])
        return out if leaf.is_floating_point() else out.round().to(leaf.dtype)

    return tree.map(mixed, rows)


class Heard(Protocol):
    @property
    def w(self) -> Any: ...  # rows of the population
    @property
    def heard(self) -> Tensor: ...  # [population]


def join(aggregate: Callable[[Any, Tensor, Params], Heard], newcomer: Newcomer, ids: Tensor, ups: Any) -> Newcomer:
    """A newcomer begins at the mean of the models heard, and whatever it says makes its own row, and no other.

    From the mean, all others are about equally near: its own data then decides whom it comes to attend to.
    """
    server: Heard = newcomer.server
    if ups is not None:
        return newcomer._replace(server=aggregate(server, ids, ups))
    start = paged.mean(server.w, server.heard)
    joined = aggregate(server, ids, tree.broadcast(start, 1))
    return newcomer._replace(server=joined, params={**newcomer.params, **start})


def _plain(weights: Tensor, flat: Tensor, count: int) -> Tensor:
    """The first `count` rows of weights @ flat."""
    return (weights @ flat.to(weights.dtype))[:count]


def _in_lanes(weights: Tensor, flat: Tensor, count: int) -> Tensor:
    """The same in about two thirds of the time where rows are many and MKL is not made for the processor.

    Rows that are megabytes apart are slow to read side by side, so some parameters of all rows are laid out next to
    each other, in lanes of which each is one core's work.
    """
    out = weights.new_empty(count, flat.shape[1])
    for piece, into in zip(*(torch.split(part, LANES * LANE, 1) for part in (flat, out)), strict=True):
        lanes = LANES if piece.shape[1] == LANES * LANE else 1
        laid = piece.unflatten(1, (lanes, -1)).transpose(0, 1).to(weights.dtype).contiguous()
        mixed = torch.bmm(weights.expand(lanes, -1, -1), laid)[:, :count]
        into.unflatten(1, (lanes, -1)).copy_(mixed.transpose(0, 1))
    return out


def _gram(rows: Params, centre: bool) -> Tensor:
    """sum over parameters of X X', exactly symmetric; nearly half of it is not computed but mirrored."""
    leaves = [leaf.reshape(len(leaf), -1) for leaf in rows.values()]
    size = len(leaves[0])
    if size < MANY and native.own(*leaves):
        return native.gram([leaf.contiguous() for leaf in leaves], centre)
    width = min(max(NEAR_BYTES // (8 * size), WIDE), max(leaf.shape[1] for leaf in leaves))
    total = tree.wide(leaves[0].new_zeros(size, size))
    room = total.new_empty(size * width)  # for all pieces: memory that is new has to be mapped first
    starts = range(0, size, max(64, -(-size // BLOCKS)))
    for piece in (piece for leaf in leaves for piece in torch.split(leaf, width, 1)):
        x = room[: piece.numel()].view(piece.shape).copy_(piece)
        if centre:
            x -= x.mean(0)
        for start in starts:
            rest, block = slice(start, size), slice(start, start + starts.step)
            total[block, rest].addmm_(x[block], x[rest].T)
    return total.triu() + total.triu(1).T
