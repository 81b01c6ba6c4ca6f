"""Mixtures of clients' models, for methods in which clients use each other's models.

Here are the choice of whom to ask, what a model is worth to a client, contributions to other clients' models, and
predicting with several models. There are N clients; one client has K of their models at hand, its own first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.optimizers import Optimizer
from coterie.core.rng import uniform
from coterie.core.routes import NOBODY
from coterie.core.task import Task
from coterie.core.training import mean_gradient, train
from coterie.core.tree import Params, Tree
from coterie.parts import robust


class Losses(NamedTuple):
    """The losses of everybody's models on client i's data. The server keeps them as rows, [N, N]."""

    tracked: Tensor  # [N]; Lhat_ij, tracked over rounds
    last: Tensor  # [N]; l_ij, as it was when client i last had model j
    visited: Tensor  # [N] bool; whether client i ever had model j


class Contributions(NamedTuple):
    """One client's weighted contributions to the K models at hand."""

    weight: Tensor  # [K]; 0 where nothing is contributed
    trained: Params  # [K, ...]; the weight times a gradient, or times the way that training went downhill
    buffers: Params  # [K, ...]; the weight times the change of each buffer


class Mixture(NamedTuple):
    """What a client deploys: models and their weights."""

    models: Params  # [K, ...]
    weight: Tensor  # [K], which adds up to 1


class Draws(NamedTuple):
    """A round's random numbers for choosing whose models each client gets, float64 in [0, 1)."""

    coin: Tensor  # [clients of the round, 1]; below epsilon, the order is random
    order: Tensor  # [clients of the round, N]; that order
    ties: Tensor  # [clients of the round, N]; the order of models that are as good as each other


def draw_orders(rng: torch.Generator, ids: Tensor, keys: Tensor) -> Draws:
    """Draw them: each is a hash of one draw of `rng` and of the clients' `keys` [N]."""
    seed = torch.randint(2**62, (), generator=rng, device=rng.device).to(keys.device)  # the same draw on every device
    own, others = keys[ids][:, None], keys[None]
    return Draws(
        *map(tree.widest_float, (uniform(seed, own), uniform(seed + 1, own, others), uniform(seed + 2, own, others)))
    )


def epsilon_greedy(losses: Losses, epsilon: float, rng: torch.Generator, ids: Tensor, keys: Tensor) -> Tensor:
    """Score how much each client of a round would like to have each other client's model.

    With probability `epsilon`, drawn once per client, the order is random. Otherwise models that the client never had
    come first, in random order, and then those of the lowest loss. Random numbers are a hash of one draw of `rng` and
    the clients' keys.

    Args:
        losses: rows of the clients `ids`, [len(ids), N].
        epsilon: the probability of a random order.
        rng: the round's generator.
        ids: [clients of the round].
        keys: [N] int64, one for each client.

    Returns:
        Scores [len(ids), N], float64; higher is preferred.
    """
    draws = draw_orders(rng, ids, keys)
    greedy = torch.where(losses.visited, -tree.widest_float(losses.tracked), 1e9 + draws.ties)
    return torch.where(draws.coin < epsilon, draws.order, greedy)


def choose_owners(score: Tensor, allowed: Tensor, ids: Tensor, number: int) -> Tensor:
    """Choose whose models each client gets: its own first, then those with the highest scores.

    Args:
        score: [len(ids), N].
        allowed: [len(ids), N] bool, whose models may be chosen; a client's own always may.
        ids: [clients of the round].
        number: K, how many models each client gets.

    Returns:
        [len(ids), K] int64: their numbers, and NOBODY where fewer than K are allowed.
    """
    itself = ids[:, None] == torch.arange(score.shape[1])
    score = torch.where(allowed, score, -torch.inf).masked_fill(itself, torch.inf)
    top = score.topk(number, 1)
    return torch.where(top.values > -torch.inf, top.indices, NOBODY)


def track_losses(old: Losses, whose: Tensor, loss: Tensor, beta: float | None) -> Losses:
    """Update a client's losses after a round. Models that it did not have count again with their last loss.

    A model seen for the first time starts level with the client's own: losses of early rounds, when all models were
    poor, then count neither for nor against it.

    Args:
        old: the client's losses before the round.
        whose: [K, N], one-hot rows that say whose model each is; the first is the client's own. A row without a one is
            ignored.
        loss: [K], the losses of these models now.
        beta: the weight of the new loss in an exponential moving average; None adds up losses over rounds instead.
    """
    seen = whose.any(0)
    last = torch.where(seen, (whose * loss[:, None]).sum(0), old.last)
    before = torch.where(old.visited, old.tracked, (whose[0] * old.tracked).sum())
    tracked = before + last if beta is None else (1 - beta) * before + beta * last
    visited = old.visited | seen
    return Losses(torch.where(visited, tracked, 0.0), last, visited)


def posterior(tracked: Tensor, visited: Tensor) -> Tensor:
    """Return softmax(-tracked) along the last axis, over those models that were visited; the others get 0."""
    return torch.softmax(torch.where(visited, -tracked, -torch.inf), -1)


def contributions(
    task: Task, optimizer: Optimizer | None, models: Params, weight: Tensor, times: Tensor, batches: Batches
) -> Contributions:
    """Return what a client contributes to each of the K models at hand.

    Args:
        task: the model and its loss.
        optimizer: trains each model on all of `batches`, and the way it went is contributed; None contributes the
            gradient of the mean loss over the first epoch instead.
        models: leaves [K, ...].
        weight: [K], the client's posterior weights.
        times: a scalar by which trained parameters' contributions are multiplied besides.
        batches: the client's minibatches.
    """
    trained, rest = task.split(task.sent(models))
    if optimizer is None:
        grads, left = vmap(lambda model: mean_gradient(task, model, batches.epoch(0)))(models)
    else:
        ends, left = task.split(vmap(lambda model: train(task, optimizer, model, batches)[0])(models))
        grads = tree.sub(trained, ends)
    scaled = vmap(lambda w, values: tree.map(lambda leaf: w * leaf, values))
    return Contributions(weight, scaled(weight * times, grads), scaled(weight, tree.sub(task.sent(left), rest)))


def only_finite(steps: Contributions) -> Contributions:
    """Contribute nothing to others' models that cannot be trained here; what goes to the client's own model stays.

    A hostile client may offer a model whose gradients overflow. An honest one would otherwise send NaN, and be refused.
    """
    ways = [leaf.reshape(len(leaf), -1) for leaf in tree.leaves((steps.trained, steps.buffers))]
    fine = torch.stack([way.isfinite().all(1) for way in ways]).all(0)  # [K]
    fine = fine | (torch.arange(len(fine)) == 0)
    kept: Contributions = vmap(lambda ok, step: tree.map(lambda leaf: torch.where(ok, leaf, 0), step))(fine, steps)
    return kept


def capped_contributions(steps: Contributions, at: Tensor, own: Tensor, cap: float) -> Contributions:
    """Hold what others contribute to a model to the weight `cap`, and to a way as long as its owner's own.

    A client could otherwise claim all its weight for one model, and move it wherever it wants. With the way of client j
    to i's model g_j = c_j / w_j (its contribution over its weight),

        w_j  <-  min(w_j, cap),    g_j  <-  min(1, ||g_i|| / ||g_j||) g_j

    in trained parameters; ways of buffers are shortened alike. Where the owner took no part, the median way to its
    model stands for its own; a single one, which nothing would bound, is left out.

    Args:
        steps: the contributions, leaves [senders, K, ...].
        at: [senders, K] int64, the row of the model to which each contribution is made; -1 if it is not here.
        own: [senders, K] bool, which are to the sender's own model.
        cap: the most that another client's contribution may weigh.
    """
    shorter = torch.ones_like(steps.weight, dtype=torch.float64)
    for row in {*at.flatten().tolist()} - {-1}:
        here = at == row
        way = _ways(steps, steps.trained, here).norm(dim=1)
        mine = way[own[here]]
        most = mine[0] if len(mine) else way.median() * (len(way) > 1)
        shorter[here] = (most / way.clamp_min(torch.finfo(way.dtype).tiny)).clamp_max(1)
    weight = torch.where(own, steps.weight, steps.weight.clamp_max(cap))
    factor = torch.where(own, 1.0, shorter * cap / steps.weight.double().clamp_min(cap))
    return _scaled(steps, factor)._replace(weight=weight)


def agreeing_contributions(steps: Contributions, at: Tensor, own: Tensor, hostile: int) -> Contributions:
    """Leave out the contributions to each model that lie farthest from the others, as multi-Krum does with models.

    The ways g_j = c_j / w_j to one model are compared by their distances (`robust.krum_scores`), and the `hostile` ones
    that are farthest from their nearest count nothing; the owner's own always counts. What is left weighs no more than
    the heaviest but `hostile` do, since a client may claim all its weight for one model. A model with fewer than
    2 hostile + 3 contributions, among which nobody can tell who lies, takes its owner's own only.

    Args:
        steps: the contributions, leaves [senders, K, ...].
        at: [senders, K] int64, the row of the model to which each contribution is made; -1 if it is not here.
        own: [senders, K] bool, which are to the sender's own model.
        hostile: of how many senders to expect lies.
    """
    factor = own.double()
    for row in {*at.flatten().tolist()} - {-1}:
        here = at == row
        number = int(here.sum())
        if number < 2 * hostile + 3:
            continue
        way = _ways(steps, (steps.trained, steps.buffers), here)
        score = robust.krum_scores(way, hostile, "reject").masked_fill(own[here], -torch.inf)
        kept = torch.ones(number).double().index_fill(0, score.topk(hostile).indices, 0.0)
        weight = steps.weight[here].double()
        most = weight.topk(hostile + 1).values[-1]
        factor[here] = kept * (most / weight.clamp_min(torch.finfo(weight.dtype).tiny)).clamp_max(1)
    return _scaled(steps, factor)


def _ways(steps: Contributions, part: Tree, which: Tensor) -> Tensor:
    """Return how contributions would go with a weight of one, in this part of them: [so many, numbers].

    Args:
        steps: all contributions, leaves [senders, K, ...].
        part: some of their leaves.
        which: [senders, K] bool, the contributions meant; those to one model, since all together may be large.
    """
    weight = steps.weight[which].double().clamp_min(torch.finfo(torch.float64).tiny)
    leaves = [leaf[which].reshape(len(weight), -1).double() for leaf in tree.leaves(part)]
    return (torch.cat(leaves, 1) / weight[:, None]).nan_to_num()


def _scaled(steps: Contributions, factor: Tensor) -> Contributions:
    """Multiply contributions and their weights by the factors [senders, K]."""

    def times(leaf: Tensor) -> Tensor:
        return leaf * factor.reshape(*factor.shape, *[1] * (leaf.ndim - 2)).to(leaf.dtype)

    scaled: Contributions = tree.map(times, steps)
    return scaled


def apply_contributions(
    optimizer: Optimizer | None, models: Params, states: Tree, at: Tensor, steps: Contributions, idle_below: float
) -> tuple[Params, Tree]:
    """Step models by what all senders contributed to them.

    Args:
        optimizer: takes a step with the sum of contributed gradients. None: contributions are ways gone, and a model
            goes their sum over max(1, total weight), as buffers always do.
        models: leaves [R, ...].
        states: the optimiser's state for each model, leaves [R, ...]; () without an optimiser.
        at: [senders, K] int64, the row of the model to which each contribution is made; -1 if it is not here.
        steps: the contributions, leaves [senders, K, ...].
        idle_below: a model whose total weight is less than this stays as it is.

    Returns:
        The new models and the new states.
    """
    size = len(next(iter(models.values())))
    row = torch.where(at < 0, size, at).flatten()  # what is not for a model here goes to a row too many

    def at_owner(values: Tensor) -> Tensor:
        rows = values.flatten(0, 1)
        return rows.new_zeros(size + 1, *rows.shape[1:]).index_add(0, row, rows)[:size]

    total, sums, moved = tree.map(at_owner, (steps.weight, steps.trained, steps.buffers))
    trained, rest = ({name: models[name] for name in part} for part in (sums, moved))
    share = 1 / total.clamp_min(1.0)
    if optimizer is None:
        new, after = vmap(tree.mix)(trained, tree.sub(trained, sums), share), states
    else:
        new, after = vmap(optimizer.update)(sums, states, trained)
    new = models | new | vmap(tree.mix)(rest, tree.add(rest, moved), share)
    stepped: tuple[Params, Tree] = vmap(tree.where)(total >= idle_below, (new, after), (models, states))
    return stepped


def deployed_mass(tracked: Tensor, visited: Tensor, itself: Tensor, number: int, prune_below: float) -> Tensor:
    """Return how much of a client's posterior weight is in the models that it deploys; the rest is left out.

    Args:
        tracked: [N], the losses of all models.
        visited: [N] bool, which of them the client ever had.
        itself: [N] bool, which is its own.
        number: how many it deploys: its own and the best others.
        prune_below: as in `pruned_mixture`.
    """
    weight = posterior(tracked, visited | itself)
    own = (weight * itself).sum(0, keepdim=True)
    chosen = torch.cat([own, (weight * ~itself).topk(number - 1).values])  # [number]
    return (chosen * _kept(chosen / chosen.sum(), prune_below)).sum()


def capped(weight: Tensor, cap: float) -> Tensor:
    """Return the weights [K] with none of the others' above `cap`; the rest goes to the first, the client's own."""
    others = weight[1:].clamp_max(cap)
    return torch.cat([weight[:1] + (weight[1:] - others).sum(), others])


def pruned_mixture(models: Params, tracked: Tensor, allowed: Tensor, prune_below: float, cap: float) -> Mixture:
    """Weigh K models by their posterior, and prune those that count little.

    Args:
        models: leaves [K, ...].
        tracked: [K], their losses.
        allowed: [K] bool, which of them may count at all.
        prune_below: a model of less weight gets weight 0 and becomes a copy of the first, so that it need not be kept;
            the heaviest always stays.
        cap: the most that a model of another client may weigh.
    """
    weight = posterior(tracked, allowed)
    kept = _kept(weight, prune_below)
    models = vmap(tree.where, in_dims=(0, 0, None))(kept, models, tree.rows(models, 0))
    return Mixture(models, capped(weight * kept / (weight * kept).sum(), cap))


def _kept(weight: Tensor, prune_below: float) -> Tensor:
    return weight >= weight.max().clamp_max(prune_below)


def predict_mixture(task: Task, view: Mixture, x: Tensor) -> Tensor:
    """Return the weighted mean of the models' predictions for `x`.

    For classes it is the logarithm of the mean of their softmax outputs, [examples, classes]; in a regression it is the
    mean of the outputs themselves; for other targets, `Target.mix` says what it is.
    """
    outputs = vmap(task.logits, in_dims=(0, None))(view.models, x)  # [K, examples, ...]
    return task.target.mix(outputs, view.weight)
