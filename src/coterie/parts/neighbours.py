"""Whom a client attends to: everybody, as FedAMP's paper has it, or a few of very many.

With `neighbours` = `all`, xi is a matrix, and a round costs the square of the number m of clients. With a number k,
client i attends to N_i only, at most k clients, and a round costs what its sample S does, whatever m is:

    N_i  <- of S + N_i - {i}, the k whose models are most like w_i's, for i in S                       (`weigh`)
    xi_ij   by the method's formula over j in N_i; what it takes from all pairs (a median) is of the pairs of S
    u_i  =  (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j, over j in N_i, of the last uploads                  (`send`)

N_i and xi_i are kept until i takes part again. Who takes part meets |S| - 1 others, so that N_i becomes the nearest of
all over time; who is alone in a round is compared with all that were heard. If all take part and k >= m - 1, it is the
same as with `all`. The models are rows of the population's (`coterie.paged`), and need not be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie import paged, tree
from coterie.attention import combine, cosines, others, pairs, squared_distances, with_self
from coterie.method import Info, Population
from coterie.tree import Params

Neighbours = Literal["all"] | Annotated[int, Field(ge=1)]
SHOWN = 200  # clients of whom it is told each round who learns from whom, if each learns from a few
BLOCK = 64  # rows to read at once


class Few(NamedTuple):
    who: Tensor  # [population, k]; -1 is nobody
    xi: Tensor  # [population, k]


class Server(Protocol):
    @property
    def w(self) -> Any: ...  # rows of the population; last uploads, before them the initial model
    @property
    def heard(self) -> Tensor: ...  # [population]
    @property
    def xi(self) -> Any: ...  # [population, population], or Few


class Measure(NamedTuple):
    pairwise: Callable[[Params], Tensor]  # of rows: [rows, rows]
    pair: Callable[[Params, Params], Tensor]  # of two models
    sign: float  # -1: the more, the more alike


DISTANCE = Measure(squared_distances, tree.sqdist, 1.0)
COSINE = Measure(cosines, tree.cosine, -1.0)
# (measured [clients, others], whether to attend to them, measured over pairs of clients) -> (xi_ij, more)
Weights = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def begin(params: Params, population: Population, neighbours: str | int) -> tuple[Any, Tensor, Any]:
    """(w, heard, xi) of a server that has heard nobody."""
    trained = params if population.task is None else population.task.split(params)[0]
    m, nobody = population.size, torch.zeros(population.size, dtype=torch.bool)
    if isinstance(neighbours, str):
        return tree.broadcast(trained, m), nobody, tree.wide(torch.eye(m))
    few = Few(torch.full((m, neighbours), -1), tree.wide(torch.zeros(m, neighbours)))
    return population.rows(trained), nobody, few


def send(server: Server, ids: Tensor) -> Params:
    """u_i for the clients `ids`."""
    if not isinstance(server.xi, Few):
        return combine(server.xi[ids], server.w)
    who, xi = tree.rows(server.xi, ids)
    weights = torch.cat([1 - xi.sum(1, keepdim=True), xi], 1)
    # One client at a time, so that whom else it is asked for does not change what it gets.
    rows = _each(server.w, torch.cat([ids[:, None], who], 1))
    return tree.stack([tree.mean(near, each) for near, each in zip(rows, weights, strict=True)])


def weigh(server: Server, ids: Tensor, ups: Params, measure: Measure, weights: Weights) -> tuple[Any, ...]:
    """(w, heard, xi, more) after the clients `ids` said `ups`."""
    w, heard = paged.put(server.w, ids, ups), server.heard.index_fill(0, ids, True)
    if not isinstance(server.xi, Few):
        values = measure.pairwise(w)
        xi, *more = weights(values, others(heard), pairs(values, heard))
        return w, heard, with_self(xi), *more
    known = server.xi.who[ids] if len(ids) > 1 else heard.nonzero().T
    among, itself = measure.pairwise(ups), torch.eye(len(ids), dtype=torch.bool)
    last = _compared(measure.pair, ups, w, known).to(among.dtype)
    far = torch.inf * measure.sign
    twice = (known < 0) | (known[:, :, None] == ids).any(2)
    values = torch.cat([among.masked_fill(itself, far), last.masked_fill(twice, far)], 1)
    order = (measure.sign * values).argsort(dim=1, stable=True)[:, : server.xi.who.shape[1]]
    who, nearest = torch.cat([ids.expand(len(ids), -1), known], 1).gather(1, order), values.gather(1, order)
    seen = pairs(among, torch.ones_like(ids, dtype=torch.bool)) if len(ids) > 1 else last.masked_fill(twice, torch.nan)
    xi, *more = weights(nearest, nearest.isfinite(), seen)
    new = Few(who.masked_fill(nearest.isinf(), -1), xi)
    short = new.who.shape[1]  # alone among few, a client finds fewer than k
    padded = Few(*(torch.cat([part, old[ids][:, short:]], 1) for part, old in zip(new, server.xi, strict=True)))
    return w, heard, tree.put(server.xi, ids, padded), *more


def shown(xi: Any) -> Info:
    """Who learns from whom, [clients, clients]; of a few of more clients than a picture can show, nothing."""
    if not isinstance(xi, Few):
        return {"collaboration": xi}
    size = len(xi.who)
    if size > SHOWN:
        return {}
    wide = torch.zeros(size, size + 1, dtype=xi.xi.dtype).scatter_add(1, torch.where(xi.who < 0, size, xi.who), xi.xi)
    return {"collaboration": with_self(wide[:, :size])}


def _compared(pair: Callable[[Params, Params], Tensor], ups: Params, w: Any, known: Tensor) -> Tensor:
    """`pair` of each of `ups` and of the rows `known` [len(ups), any] of w."""
    with_each = vmap(pair, (None, 0))
    if len(known) == 1:
        return torch.cat([with_each(tree.rows(ups, 0), paged.take(w, some)) for some in torch.split(known[0], BLOCK)])[
            None
        ]
    return torch.stack([with_each(tree.rows(ups, i), near) for i, near in enumerate(_each(w, known))])


def _each(w: Any, ids: Tensor) -> Iterator[Params]:
    """For each row of `ids` [n, k], these rows of w. They are read some at a time, and used while they are at hand."""
    k = ids.shape[1]
    for some in torch.split(ids.clamp_min(0), max(1, BLOCK // k)):
        near = paged.take(w, some.flatten())
        yield from (tree.rows(near, slice(i * k, (i + 1) * k)) for i in range(len(some)))
