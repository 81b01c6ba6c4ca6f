"""Moments of the clients' features, class by class: means, low-rank precisions, and how servers combine them.

Features are what enters the model's head, [batch, dim]. A client with Z examples of a class has a covariance Sigma of
rank r < Z. So it does not send the [dim, dim] precision pinv(Sigma), but r rows V with

    pinv(Sigma) = V'V,      V = diag(e^-1/2) U',      Sigma = U diag(e) U' on its range,

and the server adds up V'V over clients; nothing is approximated. All classes share one block of rows, and each row says
which class it belongs to, because few clients have many classes. The messages of all clients need the same shape, so
that block has a fixed number of rows; unused rows are 0, belong to NOBODY, and would not be sent (`used_bytes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.batches import Batch, Batches
from coterie.core.errors import CoterieError
from coterie.core.privacy import ROUNDING as ROUNDED
from coterie.core.privacy import Guard, noisy_sum
from coterie.core.scan import scan
from coterie.core.task import Task
from coterie.core.tree import Params, Tree, widest_float

NOBODY = -1
MATRIX_BYTES = 64 * 2**20  # memory for the [dim, dim] matrices of clients that are multiplied out at once
EVALUATION_BATCH = 64  # examples in a minibatch of the passes below, which train nothing
# A standard deviation below this share of the largest feature is taken for rounding.
ROUNDING = 64 * torch.finfo(torch.float32).eps


class Factor(NamedTuple):
    """Low-rank precisions of all classes: that of class k is the sum of v'v over the rows v that k owns."""

    rows: Tensor  # [room, dim]
    owner: Tensor  # [room] int64; a class, or NOBODY


def dimensions(task: Task | None) -> tuple[int, int]:
    """Return (number of classes, number of features).

    Raises:
        CoterieError: if the task has no classes, or the model no linear head.
    """
    if task is None or task.num_classes is None:
        what = "data without classes" if task is None else task.target.words
        raise CoterieError(
            f"this method describes classes by their features, and this is {what}: it needs a classification, in which "
            "each example has one class. Methods for any task are fedavg-ft, ditto or fedmap, for instance"
        )
    try:
        return task.num_classes, task.feature_dim
    except ValueError as error:
        raise CoterieError(str(error)) from error


def zeros_for(params: Params, *shape: int) -> Tensor:
    """Return zeros of the given shape, of the model's floating-point type and on its device."""
    floating = next(value for value in params.values() if value.is_floating_point())
    return torch.zeros(shape, dtype=floating.dtype, device=floating.device)


def centroid_head(task: Task, centroid: Tensor, known: Tensor, strength: float) -> Params:
    """Return the linear head that classifies by the nearest centroid.

    Its logits are -strength mean (z - mu_k)^2, up to what all classes share:

        weight_k = (2 strength / dim) mu_k,    bias_k = -(strength / dim) ||mu_k||^2

    Args:
        task: the model whose head this is.
        centroid: [classes, dim], mu_k.
        known: [classes], 0 for a class without a centroid, which gets weight 0 and a bias below all others.
        strength: the scale of the logits.

    Returns:
        The head's weight and bias under their names; empty if the model's head is not one linear layer with a bias.
    """
    by_rank = {task.init()[name].ndim: name for name in task.head_names}
    if sorted(by_rank) != [1, 2] or task.init()[by_rank[2]].shape != centroid.shape:
        return {}
    scale = strength / centroid.shape[1]
    bias = -scale * (centroid**2).sum(1)
    bias = torch.where(known > 0, bias, bias.min() - 30.0)
    return {by_rank[2]: 2 * scale * centroid * (known[:, None] > 0), by_rank[1]: bias}


def class_sizes(task: Task, batches: Batches) -> Tensor:
    """Return [classes], how many of the examples in `batches` belong to each class; what they weigh does not matter."""
    classes, _ = dimensions(task)
    own = batches.y[batches.index][..., None] == torch.arange(classes, device=batches.y.device)
    return (own & (batches.mask[..., None] > 0)).flatten(0, -2).sum(0).to(batches.mask)


def class_means(
    task: Task, params: Params, batches: Batches, guard: Guard | None = None, draw: int = 0
) -> tuple[Tensor, Tensor]:
    """Return one client's number of examples [classes] and mean feature [classes, dim] of every class.

    Features are taken in evaluation mode. Both are 0 for a class that the client does not have.

    With a `guard`, each feature is clipped to the norm `clip_features`, and numbers and sums are noised: an example
    adds 1 to one of the numbers, and its feature to one of the sums. A class counts as absent if its noisy number is
    below twice the noise. No example may then come twice (`Batches.once`).
    """
    classes, dim = dimensions(task)

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        count, total = carry
        member = _class_membership(batch, classes).to(total.dtype)
        return count + member.sum(0), total + member.T @ clipped(task.features(aux, batch.x), guard)

    zeros = zeros_for(params, classes, dim)
    count, total = scan(step, (zeros[:, 0], zeros), params, batches.merged(EVALUATION_BATCH))
    if guard is not None:
        count = noisy_sum(guard, count, 1.0, batches.key[0, 0], draw)
        total = noisy_sum(guard, total, guard.clip_features, batches.key[0, 0], draw + 1)
        there = (count >= 2 * guard.sum_noise) | (
            count == count.max()
        )  # at least one, for a message that says something
        count = torch.where(there, count.clamp_min(1.0), 0.0)
        count = count * (batches.count / count.sum()).clamp_max(1.0)  # they cannot add up to more than there are
        count, total = torch.where(there, count, 0.0), torch.where(there[:, None], total, 0.0)
    return count, total / count.clamp_min(1.0)[:, None]


def class_variances(
    task: Task, params: Params, batches: Batches, count: Tensor, mean: Tensor, guard: Guard | None = None, draw: int = 2
) -> Tensor:
    """Return one client's variance of every feature within every class, [classes, dim].

    It is the biased one, about `mean`, in evaluation mode; 0 for a class that the client does not have. `count` and
    `mean` are those of `class_means`.

    With a `guard`, it is the noised mean square of clipped features, less the square of the mean. The squares of a
    feature of norm c have a norm of at most c^2.
    """
    classes, _ = dimensions(task)
    if guard is not None:
        squares = _squares(task, params, batches, guard, draw)
        spread = squares / count.clamp_min(1.0)[:, None] - mean**2
        return torch.where(count[:, None] > 0, spread.clamp_min(0), 0.0)

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        params, mean = aux
        offset = task.features(params, batch.x) - mean[batch.y]
        return carry + _class_membership(batch, classes).to(carry.dtype).T @ offset**2

    total: Tensor = scan(step, torch.zeros_like(mean), (params, mean), batches.merged(EVALUATION_BATCH))
    return total / count.clamp_min(1.0)[:, None]


def _squares(task: Task, params: Params, batches: Batches, guard: Guard, draw: int) -> Tensor:
    """Return the noised sum of the squares of clipped features of each class, [classes, dim]."""
    classes, dim = dimensions(task)

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        squares = clipped(task.features(aux, batch.x), guard) ** 2
        return carry + _class_membership(batch, classes).to(carry.dtype).T @ squares

    total: Tensor = scan(step, zeros_for(params, classes, dim), params, batches.merged(EVALUATION_BATCH))
    return noisy_sum(guard, total, guard.clip_features**2, batches.key[0, 0], draw)


def clipped(features: Tensor, guard: Guard | None) -> Tensor:
    """Return features [batch, dim], under a guard none longer than its clip; those that are not finite are 0."""
    if guard is None:
        return features
    features = torch.nan_to_num(features, 0.0, 0.0, 0.0)
    length = features.norm(dim=1, keepdim=True)
    shorter = (guard.clip_features * ROUNDED / length.clamp_min(1e-30)).clamp_max(1)
    return torch.where(torch.isfinite(length), features * shorter, 0.0)


def inverse_variances(variance: Tensor, mean: Tensor, rtol: float) -> Tensor:
    """Return the pseudo-inverse of diag(variance), [..., dim].

    A variance counts as 0 if it is below `rtol` times the largest one or no more than rounding of features as large as
    `mean`; both are [..., dim].
    """
    largest = variance.amax(-1, keepdim=True)
    noise = (ROUNDING * mean.abs().amax(-1, keepdim=True)) ** 2
    kept = (variance > rtol * largest) & (variance > noise)
    return torch.where(kept, 1 / torch.where(kept, variance, 1.0), 0.0)


def precision_factor(
    task: Task, params: Params, batches: Batches, room: int, rtol: float, pooled: bool = False
) -> Factor:
    """Return the pseudo-inverse of one client's feature covariance of every class, as rows.

    Args:
        task: the model, whose features are taken in evaluation mode.
        params: its parameters.
        batches: one epoch of the client's examples.
        room: covariances are those of the last `room` examples, which are all of them for most clients.
        rtol: eigenvalues below this share of a class's largest one count as 0.
        pooled: take one covariance within classes, over all classes together; class 0 then owns all rows.

    Returns:
        `room` rows, or fewer where ranks cannot add up to that: dim for each class, or dim if pooled.
    """
    classes, dim = dimensions(task)
    batches = batches.merged(EVALUATION_BATCH)
    width = batches.index.shape[-1]

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        z, y = carry  # the last features and labels, in a shift register: its shape depends on no client's size
        new = torch.where(batch.mask > 0, batch.y, NOBODY)
        return torch.cat([z[width:], task.features(aux, batch.x)]), torch.cat([y[width:], new])

    start = zeros_for(params, room + width, dim)
    z, y = scan(step, (start, torch.full_like(start[:, 0], NOBODY, dtype=torch.int64)), params, batches)
    most = min(room, dim if pooled else classes * dim)
    rows, owner = _FactorPerClient.apply(z, y, room, most, rtol, pooled)  # type: ignore[no-untyped-call]
    return Factor(rows, owner)


class _FactorPerClient(torch.autograd.Function):
    """`_factor` for use under `vmap`. Its inner shapes depend on the data, so clients are done one after the other."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return _factor(z, y, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, z: Tensor, y: Tensor, *options: Any) -> Any:
        clients_z, clients_y = z.movedim(in_dims[0], 0), y.movedim(in_dims[1], 0)
        each = [
            _FactorPerClient.apply(client_z, client_y, *options)  # type: ignore[no-untyped-call]
            for client_z, client_y in zip(clients_z, clients_y, strict=True)
        ]
        rows, owner = zip(*each, strict=True)
        return (torch.stack(rows), torch.stack(owner)), (0, 0)


@torch.no_grad()
def _factor(z: Tensor, y: Tensor, examples: int, room: int, rtol: float, pooled: bool) -> tuple[Tensor, Tensor]:
    """Return (rows, owner) of a `Factor` with `room` rows, from the last `examples` that are no padding."""
    known = (y != NOBODY).nonzero().flatten()[-examples:]
    z, y, dim, dtype = widest_float(z[known]), y[known], z.shape[1], z.dtype
    present = torch.bincount(y).nonzero().flatten().tolist()
    offsets = [z[y == label] - z[y == label].mean(0) for label in present]
    if pooled and offsets:
        offsets, present = [torch.cat(offsets)], [0]
    noise = (ROUNDING * float(z.abs().max())) ** 2 if len(z) else 0.0
    found = [_inverse_root(offset, rtol, noise) for offset in offsets]
    owner = [y.new_full((len(rows),), label) for rows, label in zip(found, present, strict=True)]
    free = room - sum(map(len, found))
    rows = torch.cat([*found, z.new_zeros(free, dim)]).to(dtype)
    return rows, torch.cat([*owner, y.new_full((free,), NOBODY)])


def _inverse_root(offset: Tensor, rtol: float, noise: float) -> Tensor:
    """Return V [rank, dim] with V'V = pinv(Sigma), Sigma = offset' offset / Z, for `offset` [Z, dim].

    Both offset' offset and offset offset' have the eigenvalues of Sigma (times Z); the smaller one is decomposed.
    """
    size, dim = offset.shape
    if not bool(offset.isfinite().all()):
        return offset.new_full((1, dim), torch.nan)  # training diverged, which the run says of this client
    few_examples = size <= dim
    values, vectors = torch.linalg.eigh((offset @ offset.T if few_examples else offset.T @ offset) / size)
    kept = values > max(rtol * float(values[-1]), noise)  # ascending; nothing is kept where examples do not differ
    e, u = values[kept], vectors[:, kept].T
    rows: Tensor = u @ offset / (e[:, None] * size**0.5) if few_examples else u / e[:, None].sqrt()
    return rows


def product_of_gaussians(count: Tensor, mean: Tensor, factor: Factor, alpha: float, pooled: bool = False) -> Tensor:
    """Return the class means of the product over clients n of N(mean_nk, Lambda_nk^-1), [classes, dim].

    Lambda_nk is V_nk'V_nk + alpha I, and 0 for a client that does not have class k. What stands at a class that nobody
    has is meaningless. With m_k the plain mean of the holders' means, d_n = mean_nk - m_k and a = alpha (number of
    holders),

        centroid_k = m_k + (a I + V'V)^-1 V't = m_k + V' (a I + VV')^-1 t,    V = all rows of the class,  t = V d

    where row by row d is that of the row's own client; the alpha d_n add up to 0. Both forms are exact, so the smaller
    matrix is solved. It is solved in float64, since the precision of directions in which examples hardly differ
    exceeds alpha by far.

    Args:
        count: [clients, classes], numbers of examples.
        mean: [clients, classes, dim].
        factor: rows [clients, room, dim] and their owners [clients, room].
        alpha: the precision added in every direction.
        pooled: whether a client's rows hold for all its classes, whoever owns them.
    """
    here = count > 0
    holders = here.sum(0)
    centre = torch.where(here[..., None], widest_float(mean), 0.0).sum(0) / holders.clamp_min(1)[:, None]
    away = torch.where(here[..., None], widest_float(mean) - centre, 0.0)  # [clients, classes, dim]
    ridge = alpha * widest_float(holders.clamp_min(1))
    shift = _pooled_shifts(factor, here, away, ridge) if pooled else _class_shifts(factor, here, away, ridge)
    return (centre + shift).to(mean.dtype)


def _class_shifts(factor: Factor, here: Tensor, away: Tensor, ridge: Tensor) -> Tensor:
    """Return centroid_k - m_k, [classes, dim], where each class has its own rows; one sort finds them."""
    room, classes = factor.owner.shape[1], here.shape[1]
    owner = factor.owner.flatten()
    sizes = torch.bincount(owner + 1, minlength=classes + 1).tolist()  # NOBODY first
    groups = torch.split(torch.argsort(owner, stable=True), sizes)[1:]
    flat, shifts = factor.rows.flatten(0, 1), []
    for k, group in enumerate(groups):
        client = group // room
        rows = widest_float(flat[group])
        t = (rows * away[client, k]).sum(1)
        few_rows = len(rows) < rows.shape[1]
        matrix = rows @ rows.T if few_rows else rows.T @ rows
        root = torch.linalg.cholesky(matrix + ridge[k] * torch.eye(len(matrix)).to(matrix))
        if few_rows:
            shifts.append(rows.T @ torch.cholesky_solve(t[:, None], root)[:, 0])
        else:
            shifts.append(torch.cholesky_solve((rows.T @ t)[:, None], root)[:, 0])
    return torch.stack(shifts)


def _pooled_shifts(factor: Factor, here: Tensor, away: Tensor, ridge: Tensor) -> Tensor:
    """Return the same where a client's rows hold for all its classes; its [dim, dim] precision is computed once."""
    dim = away.shape[2]
    total, pull = away.new_zeros(here.shape[1], dim * dim), torch.zeros_like(away[0])
    some = max(1, MATRIX_BYTES // (8 * dim * dim))
    for part in torch.split(torch.arange(len(here)), some):
        rows = widest_float(factor.rows[part])
        products = rows.mT @ rows  # [some, dim, dim]
        total = total + widest_float(here[part]).T @ products.flatten(1)
        pull = pull + (away[part] @ products).sum(0)
    matrix = total.reshape(-1, dim, dim) + ridge[:, None, None] * torch.eye(dim).to(total)
    return torch.cholesky_solve(pull[..., None], torch.linalg.cholesky(matrix))[..., 0]


def product_of_diagonals(count: Tensor, mean: Tensor, precision: Tensor, alpha: float) -> Tensor:
    """Return the same as `product_of_gaussians` for Lambda_nk = diag(precision_nk) + alpha I.

    `precision` is [clients, classes, dim], like `mean`.
    """
    weight = torch.where(count[..., None] > 0, widest_float(precision) + alpha, 0.0)
    return ((weight * mean).sum(0) / weight.sum(0).clamp_min(torch.finfo(mean.dtype).tiny)).to(mean.dtype)


def weighted_means(weight: Tensor, mean: Tensor) -> Tensor:
    """Return sum_n w_nk mean_nk / sum_n w_nk, [classes, dim].

    Args:
        weight: [clients, classes], 0 for a client that does not have the class.
        mean: [clients, classes, dim].
    """
    total = torch.einsum("nk,nkd->kd", widest_float(weight), widest_float(mean))
    return (total / widest_float(weight).sum(0).clamp_min(1e-12)[:, None]).to(mean.dtype)


def centroid_distance(features: Tensor, batch: Batch, anchor: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return strength * mean over examples and features of (z - centroid_y)^2: a penalty for `training.train`.

    An example of a class that has no centroid yet adds 0. Class weights are for the loss alone: here every example
    counts the same.

    Args:
        features: [batch, dim], z.
        batch: the minibatch.
        anchor: (centroid [classes, dim], known [classes] with 1 for a class that has a centroid and 0 for another,
            strength, a scalar).
    """
    centroid, known, strength = anchor
    here = (batch.mask > 0).to(batch.mask.dtype)
    weight = here * known[batch.y]
    distance = ((features - centroid[batch.y]) ** 2).flatten(1).mean(1)
    return strength * (distance * weight).sum() / here.sum().clamp_min(1.0)


def used_bytes(count: Tensor, mean: Tensor, factor: Tensor | Factor | tuple[()]) -> int:
    """Return the bytes of clients' moments without those of absent classes and of rows that nobody owns.

    Args:
        count: [clients, classes].
        mean: [clients, classes, dim].
        factor: a `Factor` of rows [clients, room, dim], variances [clients, classes, dim], or nothing.
    """
    here, dim = int((count > 0).sum()), mean.shape[-1]
    if isinstance(factor, Factor):
        ranks = int((factor.owner != NOBODY).sum())
        spread = ranks * (dim * factor.rows.element_size() + factor.owner.element_size())
    else:
        spread = here * dim * factor.element_size() if isinstance(factor, Tensor) else 0
    return count.nbytes + here * dim * mean.element_size() + spread


def _class_membership(batch: Batch, classes: int) -> Tensor:
    """Return [batch, classes] bool: true where the example is of the class and is no padding."""
    return (batch.y[:, None] == torch.arange(classes, device=batch.y.device)) & (batch.mask > 0)[:, None]
