"""For methods in which clients use each other's models: whom to ask, what their models are worth, sending to owners,
predicting together. K models are in hand, of N clients' in all."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie import tree
from coterie.batches import Batches
from coterie.local import Optimizer, mean_gradient, train
from coterie.method import Newcomer
from coterie.rng import uniform
from coterie.task import Task
from coterie.tree import Params, Tree

Positive = Annotated[float, Field(gt=0)]


class Losses(NamedTuple):
    """Of everybody's models on one client's data; the server has them as rows."""

    tracked: Tensor  # [N]; Lhat_ij, over rounds
    last: Tensor  # [N]; l_ij, when it was last visited
    visited: Tensor  # [N]; bool


class Steps(NamedTuple):
    """One client's weighted contributions to the models in its hand."""

    owners: Tensor  # [K]
    weight: Tensor  # [K]; 0 where nothing is contributed
    trained: Params  # [K, ...]; weight times a gradient, or times a way gone downhill
    buffers: Params  # [K, ...]; weight times the change of each buffer


class Mixture(NamedTuple):
    """What a client deploys: models, and what each counts."""

    models: Params  # [K, ...]
    weight: Tensor  # [K]


def epsilon_greedy(losses: Losses, epsilon: float, rng: torch.Generator, ids: Tensor, keys: Tensor) -> Tensor:
    """[len(ids), N] float64: how much each client `ids` would like to ask each other one; `losses` are their rows.

    One coin a client: with probability `epsilon` the order is random, else those never visited come first (in random
    order), then those of the lowest loss. Draws are a hash of (one draw of `rng`, the clients' keys).
    """
    seed = torch.randint(2**62, (), generator=rng, device=rng.device).to(keys.device)  # the same draw on every device
    own, others = keys[ids][:, None], keys[None]
    coin, order, tie = uniform(seed, own), uniform(seed + 1, own, others), uniform(seed + 2, own, others)
    greedy = torch.where(losses.visited, -tree.wide(losses.tracked), 1e9 + tree.wide(tie))
    return torch.where(coin < epsilon, tree.wide(order), greedy)


def choose(score: Tensor, allowed: Tensor, ids: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """(owners, used), both [len(ids), number]: each client itself, then those `allowed` with the highest score.

    Where fewer are allowed than asked for, the rest are not `used`.
    """
    itself = ids[:, None] == torch.arange(score.shape[1])
    score = torch.where(allowed, score, -torch.inf).masked_fill(itself, torch.inf)
    top = score.topk(number, 1)
    return top.indices, top.values > -torch.inf


def track(old: Losses, whose: Tensor, loss: Tensor, beta: float | None) -> Losses:
    """After new losses [K] of the models of clients `whose` [K, N] (one-hot rows; the first is the client's own).

    An exponential moving average in which the new loss weighs `beta`, or (None) a sum over rounds. Losses not seen this
    round count again as they last were. A model seen for the first time starts level with the client's own: losses of
    early rounds, when all models were poor, then count neither for nor against it.
    """
    seen = whose.any(0)
    last = torch.where(seen, (whose * loss[:, None]).sum(0), old.last)
    before = torch.where(old.visited, old.tracked, (whose[0] * old.tracked).sum())
    tracked = before + last if beta is None else (1 - beta) * before + beta * last
    visited = old.visited | seen
    return Losses(torch.where(visited, tracked, 0.0), last, visited)


def posterior(tracked: Tensor, visited: Tensor) -> Tensor:
    """softmax(-tracked) over those visited, along the last axis."""
    return torch.softmax(torch.where(visited, -tracked, -torch.inf), -1)


def contribute(
    task: Task,
    optimizer: Optimizer | None,
    models: Params,
    owners: Tensor,
    weight: Tensor,
    times: Tensor,
    batches: Batches,
) -> Steps:
    """weight [K] times `times` [] times the gradient of the mean loss at `models` [K, ...] or, with an optimiser, times
    the way that it goes from there."""
    trained, rest = task.split(models)
    if optimizer is None:
        grads, left = vmap(lambda model: mean_gradient(task, model, batches.epoch(0)))(models)
    else:
        ends, left = task.split(vmap(lambda model: train(task, optimizer, model, batches)[0])(models))
        grads = tree.sub(trained, ends)
    scaled = vmap(lambda w, values: tree.map(lambda leaf: w * leaf, values))
    return Steps(owners, weight, scaled(weight * times, grads), scaled(weight, tree.sub(left, rest)))


def step_owners(
    optimizer: Optimizer | None, models: Params, states: Tree, steps: Steps, idle_below: float
) -> tuple[Params, Tree]:
    """All models [N, ...], and the states of their optimisers, after the contributions `steps` (rows, one a sender).

    Gradients are summed and given to the optimiser. Without one (ways gone), and for buffers, a model goes the sum over
    max(1, total weight). A model whose total weight is less than `idle_below` stays as it is.
    """
    owners, size = steps.owners.flatten(), len(next(iter(models.values())))

    def at_owner(values: Tensor) -> Tensor:
        rows = values.flatten(0, 1)
        return rows.new_zeros(size, *rows.shape[1:]).index_add(0, owners, rows)

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


def join(method: Any, task: Task, newcomer: Newcomer, ids: Tensor, ups: Any) -> Newcomer:
    """FedeRiCo's `onboard`. A newcomer finds its posterior weights over the existing models, by the E-step on its own
    data, and trains its own model, which begins at their mean; the others' models stay as they are."""
    server = newcomer.server
    if ups is None:
        rows = tree.broadcast(tree.mean(server.models, server.heard), 1)
        return newcomer._replace(server=server._replace(models=tree.put(server.models, ids, rows)))
    new = method.aggregate(server, ids, ups)
    models, states = tree.put((server.models, server.optimizer), ids, tree.rows((new.models, new.optimizer), ids))
    return newcomer._replace(server=new._replace(models=models, optimizer=states))


def implausible(method: Any, up: Any, examples: int) -> str | None:
    """FedeRiCo's `implausible`: owners are clients, weights are posterior weights, losses are not below 0."""
    owners, weight = up.steps.owners, up.steps.weight
    if int(owners.min()) < 0 or int(owners.max()) >= len(up.losses.tracked):
        return "steps for models that nobody owns"
    if float(weight.min()) < 0 or float(weight.sum()) > 1 + 1e-4:
        return f"posterior weights that add up to {float(weight.sum()):g}"
    return "losses below 0" if min(float(each.min()) for each in (up.losses.tracked, up.losses.last)) < 0 else None


def mixture(models: Params, tracked: Tensor, allowed: Tensor, prune_below: float) -> Mixture:
    """Of K models with the losses `tracked` [K]; those of less weight than `prune_below` become copies of the first."""
    weight = posterior(tracked, allowed)
    kept = weight >= weight.max().clamp_max(prune_below)
    models = vmap(tree.where, in_dims=(0, 0, None))(kept, models, tree.rows(models, 0))
    return Mixture(models, weight * kept / (weight * kept).sum())


def predict_together(task: Task, view: Mixture, x: Tensor) -> Tensor:
    """The weighted mean of what the models predict: of their softmax outputs, as its logarithm, or, in a
    regression, of the outputs themselves."""
    outputs = vmap(task.logits, in_dims=(0, None))(view.models, x)  # [K, examples, ...]
    weight = view.weight.reshape(-1, *[1] * (outputs.ndim - 1))
    if task.kind == "regression":
        return (weight * outputs).sum(0)
    return torch.logsumexp(F.log_softmax(outputs, 2) + weight.log(), 0)
