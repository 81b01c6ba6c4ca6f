"""Whom a client attends to: everybody, as FedAMP's paper has it, or a few of very many.

With `neighbours` = `all`, xi is a matrix, and a round costs the square of the number m of clients. With a number k,
client i attends to at most k clients N_i, and a round costs what its sample S of clients costs, whatever m is:

    N_i  <- the k clients of S + N_i - {i} whose models are most like w_i's, for i in S        (`update_attention`)
    xi_ij <- the method's formula over j in N_i                                                (`update_attention`)
    u_i  =  (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j, over j in N_i, of the last uploads        (`combined_models`)

Where a method's formula needs a statistic over all pairs of clients (a median), it is taken over the pairs of S. N_i
and xi_i are kept until client i takes part again. Each time, client i meets |S| - 1 others, so that N_i becomes the
nearest of all over time; a client that is alone in a round is compared with all that were heard. If all take part and
k >= m - 1, the result is the same as with `all`. The models are rows of the population, which may be kept in files
(`coterie.storage.paged_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie.core import client_rows, tree
from coterie.core.method import Info, Population
from coterie.core.tree import Params
from coterie.parts.attention import (
    add_self_weights,
    attention_mask,
    combine,
    cosines,
    heard_pairs,
    squared_distances,
)

Neighbours = Literal["all"] | Annotated[int, Field(ge=1)]
NOBODY = -1
MAX_SHOWN_CLIENTS = 200  # with more clients, who learns from whom is not logged if each learns from a few
ROWS_PER_READ = 64


class NearestClients(NamedTuple):
    """N_i and xi_i of every client i."""

    who: Tensor  # [population, k] int64; numbers of clients, or NOBODY
    xi: Tensor  # [population, k]; 0 for NOBODY


class AttentionServer(Protocol):
    """What a server with attention holds; a method may add to it."""

    @property
    def w(self) -> Any: ...  # rows of the population; each client's last upload, and before it the initial model
    @property
    def heard(self) -> Tensor: ...  # [population] bool; who has sent a model so far
    @property
    def xi(self) -> Any: ...  # [population, population], or NearestClients


class Measure(NamedTuple):
    """A measure of how alike two models are."""

    pairwise: Callable[[Params], Tensor]  # rows of models -> [rows, rows]
    pair: Callable[[Params, Params], Tensor]  # two models -> a scalar
    sign: float  # 1: models are more alike the smaller it is; -1: the larger


DISTANCE = Measure(squared_distances, tree.sqdist, 1.0)
COSINE = Measure(cosines, tree.cosine, -1.0)

# A method's formula for xi, without the diagonal. It is given the measure between clients and others, whether each
# client attends to each of these others (both [clients, others]), and the measure over pairs of clients, with NaN for
# what is no pair. It returns xi_ij [clients, others] and whatever else the method's server keeps.
WeightFormula = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def initial_state(params: Params, population: Population, neighbours: str | int) -> tuple[Any, Tensor, Any]:
    """Return (w, heard, xi) of an `AttentionServer` that has heard nobody.

    Args:
        params: the initial model; of its parameters, the trained ones are kept.
        population: the clients.
        neighbours: "all", or the number k.
    """
    trained = params if population.task is None else population.task.split(params)[0]
    size = population.size
    heard = torch.zeros(size, dtype=torch.bool)
    if isinstance(neighbours, str):
        return tree.broadcast(trained, size), heard, tree.widest_float(torch.eye(size))
    nobody = torch.full((size, neighbours), NOBODY)
    return population.rows(trained), heard, NearestClients(nobody, tree.widest_float(torch.zeros(size, neighbours)))


def combined_models(server: AttentionServer, ids: Tensor) -> Params:
    """Return u_i for the clients `ids`, leaves [len(ids), ...]."""
    if not isinstance(server.xi, NearestClients):
        return combine(server.xi[ids], server.w)
    who, xi = tree.rows(server.xi, ids)
    weights = torch.cat([1 - xi.sum(1, keepdim=True), xi], 1)
    # The mean is taken for one client at a time, so that it does not depend on who else is asked for.
    models = _rows_of_each(server.w, torch.cat([ids[:, None], who], 1))
    return tree.stack([tree.mean(near, weight) for near, weight in zip(models, weights, strict=True)])


def update_attention(
    server: AttentionServer, ids: Tensor, ups: Params, measure: Measure, formula: WeightFormula
) -> tuple[Any, ...]:
    """Return (w, heard, xi, and what else `formula` returned) after a round.

    Args:
        server: the server before the round.
        ids: [clients of the round].
        ups: their models, leaves [len(ids), ...].
        measure: how models are compared.
        formula: the method's weights.
    """
    w = client_rows.put(server.w, ids, ups)
    heard = server.heard.index_fill(0, ids, True)
    if not isinstance(server.xi, NearestClients):
        values = measure.pairwise(w)
        weights, *more = formula(values, attention_mask(heard), heard_pairs(values, heard))
        return w, heard, add_self_weights(weights), *more
    nearest, more = _update_nearest(server.xi, w, heard, ids, ups, measure, formula)
    return w, heard, nearest, *more


def _update_nearest(
    old: NearestClients,
    w: Any,
    heard: Tensor,
    ids: Tensor,
    ups: Params,
    measure: Measure,
    formula: WeightFormula,
) -> tuple[NearestClients, list[Tensor]]:
    """Choose N_i anew for the clients `ids`, among each other and among those each had; weigh them by `formula`."""
    alone = len(ids) == 1
    known = heard.nonzero().T if alone else old.who[ids]  # [len(ids), any]
    among_ids = measure.pairwise(ups)
    with_known = _compare_with_rows(measure.pair, ups, w, known).to(among_ids.dtype)

    # Those that are nobody, the client itself, or already compared as one of `ids` count as infinitely far away.
    far = torch.inf * measure.sign
    itself = torch.eye(len(ids), dtype=torch.bool)
    surplus = (known < 0) | (known[:, :, None] == ids).any(2)
    candidates = torch.cat([ids.expand(len(ids), -1), known], 1)
    values = torch.cat([among_ids.masked_fill(itself, far), with_known.masked_fill(surplus, far)], 1)

    k = old.who.shape[1]
    order = (measure.sign * values).argsort(dim=1, stable=True)[:, :k]
    who, nearest = candidates.gather(1, order), values.gather(1, order)
    if alone:
        pairs = with_known.masked_fill(surplus, torch.nan)
    else:
        pairs = heard_pairs(among_ids, torch.ones_like(ids, dtype=torch.bool))
    xi, *more = formula(nearest, nearest.isfinite(), pairs)
    found = NearestClients(who.masked_fill(nearest.isinf(), NOBODY), xi)

    # A client that is alone among few finds fewer than k others; the rest of its row stays as it was.
    width = found.who.shape[1]
    filled = NearestClients(
        *(torch.cat([part, kept[ids][:, width:]], 1) for part, kept in zip(found, old, strict=True))
    )
    return tree.put(old, ids, filled), more


def collaboration_info(xi: Any) -> Info:
    """Return who learns from whom as {"collaboration": [clients, clients]}, for `Method.server_info`.

    If each of more clients than a picture can show learns from a few, return nothing.
    """
    if not isinstance(xi, NearestClients):
        return {"collaboration": xi}
    size = len(xi.who)
    if size > MAX_SHOWN_CLIENTS:
        return {}
    column = torch.where(xi.who < 0, size, xi.who)  # nobody has a column of its own, which is cut off
    weights = torch.zeros(size, size + 1, dtype=xi.xi.dtype).scatter_add(1, column, xi.xi)
    return {"collaboration": add_self_weights(weights[:, :size])}


def _compare_with_rows(pair: Callable[[Params, Params], Tensor], ups: Params, w: Any, known: Tensor) -> Tensor:
    """Return `pair` of each model in `ups` and each of its rows `known` [len(ups), any] of w: [len(ups), any]."""
    with_each = vmap(pair, (None, 0))
    if len(known) == 1:
        model = tree.rows(ups, 0)
        parts = [with_each(model, client_rows.take(w, ids)) for ids in torch.split(known[0], ROWS_PER_READ)]
        return torch.cat(parts)[None]
    return torch.stack([with_each(tree.rows(ups, i), near) for i, near in enumerate(_rows_of_each(w, known))])


def _rows_of_each(w: Any, ids: Tensor) -> Iterator[Params]:
    """Yield, for each row of `ids` [n, k], these k rows of w. They are read for a few clients at a time."""
    k = ids.shape[1]
    for some in torch.split(ids.clamp_min(0), max(1, ROWS_PER_READ // k)):
        near = client_rows.take(w, some.flatten())
        yield from (tree.rows(near, slice(i * k, (i + 1) * k)) for i in range(len(some)))
