"""What clients do with their data: they train with a penalty, take gradients and measure losses.

Every function here sees one client. `train`, `minimise`, `mean_loss` and `mean_gradient` go through the client's
minibatches with `coterie.core.scan.scan`, so engines can stack and compile them; `gradient` and `proximal_steps` see
one minibatch and are for use inside a step of your own scan.

"Trained parameters" are those that `task.split` returns first; the rest of a model are buffers and frozen parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from coterie.core import privacy, tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.optimizers import Optimizer
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.core.wrapped import with_lr, without_lr

EVALUATION_BATCH = 128  # examples in a minibatch where nothing is trained
TINY_STEP = 1e-12  # a step size that stands for 0 where it is divided by
Penalty = Callable[[Params, Any], Tensor]  # (trained parameters, anchor) -> scalar that is added to the loss
PenaltyGradient = Callable[[Params, Params], Params]  # (trained parameters, anchor) -> gradient of a penalty
FeaturePenalty = Callable[[Tensor, Batch, Any], Tensor]  # (features [batch, dim], batch, anchor) -> scalar, likewise
Objective = Callable[[Any, Any, Batch, Any], tuple[Tensor, tuple[Tensor, Any]]]  # see `minimise`


def no_penalty(params: Params, anchor: Any) -> Tensor:
    """Return 0: the penalty of plain training."""
    return torch.zeros(())


def quadratic_penalty(params: Params, anchor: tuple[Params, Tensor]) -> Tensor:
    """Return (strength / 2) ||params - centre||^2, a scalar.

    Args:
        params: trained parameters.
        anchor: `(centre, strength)`. `centre` is a model that has at least the names of `params`; buffers and other
            names are ignored. `strength` is a scalar tensor.
    """
    centre, strength = anchor
    return 0.5 * strength * tree.sqdist(params, {name: centre[name] for name in params})


def train(
    task: Task,
    optimizer: Optimizer,
    params: Params,
    batches: Batches,
    penalty: Penalty = no_penalty,
    anchor: Tree = (),
    *,
    only: frozenset[str] | None = None,
    feature_penalty: FeaturePenalty | None = None,
) -> tuple[Params, Tensor]:
    """Minimise f(theta) + penalty(theta, anchor) + feature_penalty(features, batch, anchor), one step per minibatch.

    Args:
        task: the model and its loss f.
        optimizer: takes the steps; its state begins anew with each call. If it is private, so are they
            (`coterie.core.privacy`); give its `unguarded` to train what never leaves the client.
        params: the model to start from, buffers included.
        batches: the client's minibatches, all epochs of which are used.
        penalty: added to the loss of every minibatch; it sees the trained parameters.
        anchor: a tree that the penalties are given. Penalties must read their tensors from it: a step that closes
            over a tensor is refused.
        only: the names that may change. Everything else stays as it is, buffers included. None trains all of
            `task.trainable` and lets all buffers follow.
        feature_penalty: added to the loss as well, if given; it sees what enters the model's head, [batch, dim].

    Returns:
        The trained model, buffers included, and the mean of f over the examples seen on the way (without penalties), a
        scalar.
    """

    def free(values: Params) -> Params:
        return values if only is None else {name: value for name, value in values.items() if name in only}

    def objective(trained: Params, rest: Params, batch: Batch, anchor: Any) -> tuple[Tensor, tuple[Tensor, Params]]:
        if feature_penalty is None:
            loss, left = task.loss({**rest, **trained}, batch)
            return loss + penalty(trained, anchor), (loss, {**rest, **free(left)})
        loss, features, left = task.loss_and_features({**rest, **trained}, batch)
        value = loss + penalty(trained, anchor) + feature_penalty(features, batch, anchor)
        return value, (loss, {**rest, **free(left)})

    trained = free(task.split(params)[0])
    rest = {name: value for name, value in params.items() if name not in trained}
    trained, rest, loss = minimise(optimizer, objective, trained, rest, batches, anchor)
    return {name: trained[name] if name in trained else rest[name] for name in params}, loss


def minimise(
    optimizer: Optimizer, objective: Objective, params: Tree, rest: Tree, batches: Batches, anchor: Tree = ()
) -> tuple[Any, Any, Tensor]:
    """Minimise an objective of your own, over parameters of a model and of whatever else, one step per minibatch.

    Args:
        optimizer: takes the steps; its state begins anew with each call. It sees `tree.pack(params)`.
        objective: `objective(params, rest, batch, anchor)` returns (what is minimised, (loss, rest)): a scalar that is
            differentiated by `params`; the loss to be told, which is a mean over the examples of the minibatch; and
            the `rest` as the step leaves it, such as the buffers after a forward pass.
        params: what is trained, any tree: the trained parameters of a model together with those of modules beside it.
        rest: what changes without being trained, or does not change: buffers and frozen parameters.
        batches: the client's minibatches, all epochs of which are used.
        anchor: a tree that the objective reads. It must read its tensors from there: a step that closes over a tensor
            is refused.

    Returns:
        `params` and `rest` after the last step, and the mean of the told losses over the examples, a scalar.
    """

    begin = tree.pack(params)
    guard, optimizer = optimizer.guard, optimizer.unguarded
    taker, step_size = without_lr(optimizer, begin)  # so that runs that differ in their step size only share the step

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        params, rest, state, total, seen, *taken = carry
        if guard is None:
            anchor, step_size = aux
            grads, (loss, rest) = grad(lambda params: objective(params, rest, batch, anchor), has_aux=True)(params)
        else:
            anchor, step_size, lot = aux
            grads, loss = privacy.gradient(guard, _told(objective, rest, anchor), params, batch, lot, *taken)
        flat, state = with_lr(taker, step_size).update(tree.pack(grads), state, tree.pack(params))
        count = batch.mask.sum()
        return tree.rebuild(flat, params), rest, state, total + loss * count, seen + count, *(n + 1 for n in taken)

    zero = torch.zeros((), device=batches.mask.device)
    start: tuple[Any, ...] = (params, rest, optimizer.init(begin), zero, zero)
    if guard is not None:  # a step's number tells its noise from that of others with the same minibatch
        start = (*start, torch.zeros_like(batches.key[0, 0]))
    aux = (anchor, step_size) if guard is None else (anchor, step_size, guard.lot(batches))
    params, rest, _, total, seen, *_ = scan(step, start, aux, batches)
    return params, rest, total / seen.clamp_min(MIN_TOTAL_WEIGHT)


def _told(objective: Objective, rest: Any, anchor: Any) -> Callable[[Any, Batch], tuple[Tensor, Tensor]]:
    """Return the objective without what it leaves of `rest`: under privacy, that does not change."""

    def told(params: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        value, (loss, _) = objective(params, rest, batch, anchor)
        return value, loss

    return told


def gradient(task: Task, params: Params, batch: Batch) -> tuple[Params, Tensor, Params]:
    """Differentiate the loss on one minibatch.

    Returns:
        The gradient at the trained parameters; the loss, a scalar; and the rest of the model after the forward pass,
        in which buffers have been updated.
    """
    trained, rest = task.split(params)

    def objective(trained: Params) -> tuple[Tensor, Params]:
        return task.loss({**trained, **rest}, batch)

    grads, (loss, rest) = grad_and_value(objective, has_aux=True)(trained)
    return grads, loss, rest


def private_gradient(
    guard: privacy.Guard, task: Task, params: Params, batch: Batch, lot: Tensor | tuple[()], draw: int = 0
) -> tuple[Params, Tensor]:
    """Differentiate the loss on one minibatch privately; see `privacy.gradient` for the arguments.

    Returns:
        The gradient at the trained parameters, and the loss, a scalar.
    """
    trained, rest = task.split(params)
    assert isinstance(lot, Tensor)

    def objective(trained: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = task.loss({**trained, **rest}, batch)[0]
        return loss, loss

    grads, loss = privacy.gradient(guard, objective, trained, batch, lot, draw)
    return grads, loss


def proximal_steps(
    task: Task,
    optimizer: Optimizer,
    params: Params,
    batch: Batch,
    penalty_gradient: PenaltyGradient,
    anchor: Params,
    steps: int,
    lot: Tensor | tuple[()] = (),
) -> tuple[Params, Tensor]:
    """Take `steps` optimiser steps on f_B(theta) + R(theta; anchor), all on the same minibatch B.

    Args:
        task: the model and its loss f.
        optimizer: takes the steps; its state begins anew with each call.
        params: the model to start from, buffers included.
        batch: the minibatch B.
        penalty_gradient: the gradient of R in theta, as a function of the trained parameters and `anchor`.
        anchor: what R pulls to.
        steps: the number of steps, at least 1.
        lot: `privacy.lot_of(optimizer, batches)`, which comes to a step through its `aux`.

    Returns:
        The model, buffers included, and f_B before the last step, a scalar.
    """
    trained, rest = task.split(params)
    state, loss = optimizer.init(trained), torch.zeros(())
    guard, optimizer = optimizer.guard, optimizer.unguarded
    for k in range(steps):
        if guard is None:
            grads, loss, rest = gradient(task, {**trained, **rest}, batch)
        else:
            grads, loss = private_gradient(guard, task, {**trained, **rest}, batch, lot, k)
        trained, state = optimizer.update(tree.add(grads, penalty_gradient(trained, anchor)), state, trained)
    return {**trained, **rest}, loss


def envelope_step(optimizer: Optimizer, lam: float, steps: int) -> float | Tensor:
    """Return the step size eta with which w <- w - eta lam (w - theta) moves w as far as one optimiser step would.

    theta are `steps` = K steps on f_B(theta) + (lam / 2) ||theta - w||^2 from w. With SGD of step size a, and g the
    gradient of f_B at w, to first order in g

        w - theta = (1 - (1 - a lam)^K) / lam g,    so    eta = a / (1 - (1 - a lam)^K)    makes w move by a g.

    This is 1 / (K lam) for small a lam, where w moves 1/K of the way to theta; and 1 / lam from a lam = 1 on, where w
    becomes theta: w never overshoots. Steps of other optimisers are not proportional to the gradient, and theta is
    about K of them away, so eta is 1 / (K lam).

    Args:
        optimizer: takes the K steps.
        lam: the strength of the pull to w.
        steps: K.
    """
    if optimizer.steady_step() is None:
        return 1 / (steps * lam)
    lr: Any = optimizer.lr
    if isinstance(lr, Tensor):  # it has a schedule, which may take it to 0
        lr = lr.clamp_min(TINY_STEP)
        gone = -torch.expm1(steps * torch.log1p(-(lr * lam).clamp_max(1)))  # of the distance to w, after K steps
        paced: Tensor = (lr / gone).clamp_max(1 / lam)
        return paced
    left = max(0.0, 1 - lr * lam)  # of the distance to w, after a step
    return float(min(lr / (1 - left**steps), 1 / lam))


def mean_loss(
    task: Task, params: Params, batches: Batches, guard: privacy.Guard | None = None, draw: int = 0
) -> Tensor:
    """Return the mean loss over all examples in `batches`, in evaluation mode, a scalar. Nothing is trained.

    With a `guard`, each loss is clipped to [0, `clip_loss`], and the sum noised; no example may then come twice
    (`Batches.once`). `draw` tells the noise of one such sum from that of another.
    """
    most = math.inf if guard is None else guard.clip_loss

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        total, seen = carry
        losses = task.losses(aux, batch.x, batch.y, batch.mask)
        if guard is not None:
            losses = torch.nan_to_num(losses, most).clamp(0, most)
        return total + (losses * batch.mask).sum(), seen + batch.mask.sum()

    zero = torch.zeros((), device=batches.mask.device)
    total, seen = scan(step, (zero, zero), params, batches.merged(EVALUATION_BATCH))
    if guard is not None:
        total = privacy.noisy_sum(guard, total, most, batches.key[0, 0], draw).clamp_min(0)
    mean: Tensor = total / seen.clamp_min(MIN_TOTAL_WEIGHT)
    return mean


def mean_gradient(task: Task, params: Params, batches: Batches) -> tuple[Params, Params]:
    """Differentiate the mean training loss over all minibatches, at fixed parameters.

    Returns:
        The gradient at the trained parameters, and the rest of the model, whose buffers have seen all minibatches.
    """

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        total, rest, seen = carry
        grads, rest = grad(lambda trained: task.loss({**trained, **rest}, batch), has_aux=True)(aux)
        count = batch.mask.sum()
        return tree.map(lambda t, g: t + g * count, total, grads), rest, seen + count

    trained, rest = task.split(params)
    start = (tree.map(torch.zeros_like, trained), rest, torch.zeros((), device=batches.mask.device))
    total, rest, seen = scan(step, start, trained, batches)
    return tree.scale(total, 1 / seen.clamp_min(MIN_TOTAL_WEIGHT)), rest
