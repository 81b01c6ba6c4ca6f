"""What clients say of their features, class by class, and how it is combined: means, low-rank precisions, prototypes.

Client functions see one client. A client with Z examples of a class has a covariance Sigma of rank r < Z, so it never
sends the [dim, dim] precision pinv(Sigma), but r rows V with

    pinv(Sigma) = V'V,      V = diag(e^-1/2) U',      Sigma = U diag(e) U' on its range,

and the server adds up V'V over clients: nothing is approximated. All classes share one block of rows, each row with the
class it belongs to, because few clients have many classes. All clients' messages need the same shape, so that block has
a fixed number of rows; the unused ones are 0 and owned by nobody (-1), and would not be sent (`used_bytes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.batches import Batch, Batches
from coterie.scan import scan
from coterie.task import Task
from coterie.tree import Params, Tree, wide

NOBODY = -1
AT_ONCE = 64 * 2**20  # bytes of clients' [dim, dim] matrices
NOISE = 64 * torch.finfo(torch.float32).eps  # spread below this share of the largest feature is rounding, not spread


class Factor(NamedTuple):
    """Rows V of low-rank precisions: that of class k is the sum of v'v over the rows that k owns."""

    rows: Tensor  # [room, dim]
    owner: Tensor  # [room]; a class, or NOBODY


def sizes(task: Task | None) -> tuple[int, int]:
    """(classes, width of the features), which everything here needs; complains in words where there are none."""
    if task is None or task.num_classes is None:
        raise ValueError("this method describes each class by its features: it needs a classification task")
    return task.num_classes, task.feature_dim


def empty(params: Params, *shape: int) -> Tensor:
    """Zeros of the model's own floating-point type, on its device."""
    floating = next(value for value in params.values() if value.is_floating_point())
    return torch.zeros(shape, dtype=floating.dtype, device=floating.device)


def centroid_head(task: Task, centroid: Tensor, known: Tensor, strength: float) -> Params:
    """The linear head whose logits are -strength mean (z - mu_k)^2, up to what all classes share: the nearest centroid.

        weight_k = (2 strength / dim) mu_k,    bias_k = -(strength / dim) ||mu_k||^2

    A class without a centroid gets weight 0 and a bias below all others. Empty where the head is not such a layer.
    """
    found = {len(task.init()[name].shape): name for name in task.head_names}
    if sorted(found) != [1, 2] or task.init()[found[2]].shape != centroid.shape:
        return {}
    scale = strength / centroid.shape[1]
    bias = -scale * (centroid**2).sum(1)
    bias = torch.where(known > 0, bias, bias.min() - 30.0)
    return {found[2]: 2 * scale * centroid * (known[:, None] > 0), found[1]: bias}


def class_means(task: Task, params: Params, batches: Batches) -> tuple[Tensor, Tensor]:
    """(examples, mean feature) of every class, [classes] and [classes, dim], in evaluation mode; 0 where absent."""
    classes, dim = sizes(task)

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        count, total = carry
        member = _members(batch, classes).to(total.dtype)
        return count + member.sum(0), total + member.T @ task.features(aux, batch.x)

    zeros = empty(params, classes, dim)
    count, total = scan(step, (zeros[:, 0], zeros), params, _widened(batches))
    return count, total / count.clamp_min(1.0)[:, None]


def class_variances(task: Task, params: Params, batches: Batches, count: Tensor, mean: Tensor) -> Tensor:
    """Variance of every feature within every class, [classes, dim] (biased, about `mean`); 0 where absent."""
    classes, _ = sizes(task)

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        params, mean = aux
        offset = task.features(params, batch.x) - mean[batch.y]
        return carry + _members(batch, classes).to(carry.dtype).T @ offset**2

    total: Tensor = scan(step, torch.zeros_like(mean), (params, mean), _widened(batches))
    return total / count.clamp_min(1.0)[:, None]


def inverse_variances(variance: Tensor, mean: Tensor, rtol: float) -> Tensor:
    """The pseudo-inverse of diag(variance), [..., dim]: 0 for what is below rtol times the largest, or rounding."""
    largest, noise = variance.amax(-1, keepdim=True), (NOISE * mean.abs().amax(-1, keepdim=True)) ** 2
    kept = (variance > rtol * largest) & (variance > noise)
    return torch.where(kept, 1 / torch.where(kept, variance, 1.0), 0.0)


def precision_factor(
    task: Task, params: Params, batches: Batches, room: int, rtol: float, pooled: bool = False
) -> Factor:
    """The pseudo-inverse of every class's feature covariance, as rows; with `pooled`, of the covariance within classes.

    `batches` is one epoch. Exact for a client with up to `room` examples in it; for a larger one, covariances are those
    of the last `room` of them. With `pooled` all rows are owned by class 0. There are `room` rows, or fewer where ranks
    cannot add up to that: dim for each class, or dim if pooled.
    """
    classes, dim = sizes(task)
    batches = _widened(batches)
    width = batches.index.shape[-1]

    def step(carry: Any, aux: Any, batch: Batch) -> Tree:
        z, y = carry  # a shift register, so that its shape depends on no client's size
        new = torch.where(batch.mask > 0, batch.y, NOBODY)
        return torch.cat([z[width:], task.features(aux, batch.x)]), torch.cat([y[width:], new])

    start = empty(params, room + width, dim)
    z, y = scan(step, (start, torch.full_like(start[:, 0], NOBODY, dtype=torch.int64)), params, batches)
    rows, owner = _Factor.apply(z, y, room, min(room, dim if pooled else classes * dim), rtol, pooled)  # type: ignore[no-untyped-call]
    return Factor(rows, owner)


class _Factor(torch.autograd.Function):
    """`_factor`, whose inner shapes depend on the data; under `vmap`, one client after the other."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return _factor(z, y, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, z: Tensor, y: Tensor, *options: Any) -> Any:
        at = [value.movedim(dim, 0) for value, dim in zip((z, y), in_dims, strict=False)]
        each = [_Factor.apply(*client, *options) for client in zip(*at, strict=True)]  # type: ignore[no-untyped-call]
        return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)


@torch.no_grad()
def _factor(z: Tensor, y: Tensor, examples: int, room: int, rtol: float, pooled: bool) -> tuple[Tensor, Tensor]:
    known = (y != NOBODY).nonzero().flatten()[-examples:]
    z, y, dim, dtype = wide(z[known]), y[known], z.shape[1], z.dtype
    present = torch.bincount(y).nonzero().flatten().tolist()
    offsets = [z[y == label] - z[y == label].mean(0) for label in present]
    if pooled and offsets:
        offsets, present = [torch.cat(offsets)], [0]
    noise = (NOISE * float(z.abs().max())) ** 2 if len(z) else 0.0
    found = [_inverse_root(offset, rtol, noise) for offset in offsets]
    owner = [y.new_full((len(rows),), label) for rows, label in zip(found, present, strict=True)]
    free = room - sum(map(len, found))
    rows = torch.cat([*found, z.new_zeros(free, dim)]).to(dtype)
    return rows, torch.cat([*owner, y.new_full((free,), NOBODY)])


def _inverse_root(offset: Tensor, rtol: float, noise: float) -> Tensor:
    """V [rank, dim] with V'V = pinv(Sigma), Sigma = offset' offset / Z, by way of the smaller of its two products."""
    size, dim = offset.shape
    wide = size <= dim
    values, vectors = torch.linalg.eigh((offset @ offset.T if wide else offset.T @ offset) / size)
    kept = values > max(rtol * float(values[-1]), noise)  # ascending; nothing is kept where examples do not differ
    e, u = values[kept], vectors[:, kept].T
    rows: Tensor = u @ offset / (e[:, None] * size**0.5) if wide else u / e[:, None].sqrt()
    return rows


def product_of_gaussians(count: Tensor, mean: Tensor, factor: Factor, alpha: float, pooled: bool = False) -> Tensor:
    """Class means of the product over clients n of N(mean_nk, Lambda_nk^-1), Lambda_nk = V_nk'V_nk + alpha I.

    `count` is [clients, classes], `mean` [clients, classes, dim], `factor` has rows [clients, room, dim]. A client
    without a class has Lambda = 0 there. Returns [classes, dim]; what stands at a class that nobody has is meaningless.

    With m_k the plain mean of the holders' means, d_n = mean_nk - m_k and a = alpha (number of holders),

        centroid_k = m_k + (a I + V'V)^-1 V't = m_k + V' (a I + VV')^-1 t,    V = all rows of the class,  t = V d

    (row by row, d of the row's own client; the alpha d_n add up to 0). Exact either way: the smaller matrix is solved,
    in float64, since precisions of directions in which examples hardly differ exceed alpha by far.
    """
    here = count > 0
    holders = here.sum(0)
    middle = torch.where(here[..., None], wide(mean), 0.0).sum(0) / holders.clamp_min(1)[:, None]
    away = torch.where(here[..., None], wide(mean) - middle, 0.0)  # [clients, classes, dim]
    ridge = alpha * wide(holders.clamp_min(1))
    step = (_pooled_steps if pooled else _steps)(factor, here, away, ridge)
    return (middle + step).to(mean.dtype)


def _steps(factor: Factor, here: Tensor, away: Tensor, ridge: Tensor) -> Tensor:
    """[classes, dim]; each class has rows of its own, found by one sort."""
    room, classes = factor.owner.shape[1], here.shape[1]
    owner = factor.owner.flatten()
    sizes = torch.bincount(owner + 1, minlength=classes + 1).tolist()  # NOBODY first
    groups = torch.split(torch.argsort(owner, stable=True), sizes)[1:]
    flat, steps = factor.rows.flatten(0, 1), []
    for k, group in enumerate(groups):
        client = group // room
        rows = wide(flat[group])
        t = (rows * away[client, k]).sum(1)
        thin = len(rows) < rows.shape[1]
        matrix = rows @ rows.T if thin else rows.T @ rows
        root = torch.linalg.cholesky(matrix + ridge[k] * torch.eye(len(matrix)).to(matrix))
        if thin:
            steps.append(rows.T @ torch.cholesky_solve(t[:, None], root)[:, 0])
        else:
            steps.append(torch.cholesky_solve((rows.T @ t)[:, None], root)[:, 0])
    return torch.stack(steps)


def _pooled_steps(factor: Factor, here: Tensor, away: Tensor, ridge: Tensor) -> Tensor:
    """[classes, dim]; a client's rows serve all its classes, so they are multiplied out once, [dim, dim] a client."""
    dim = away.shape[2]
    total, pull = away.new_zeros(here.shape[1], dim * dim), torch.zeros_like(away[0])
    some = max(1, AT_ONCE // (8 * dim * dim))
    for part in torch.split(torch.arange(len(here)), some):
        rows = wide(factor.rows[part])
        products = rows.mT @ rows  # [some, dim, dim]
        total = total + wide(here[part]).T @ products.flatten(1)
        pull = pull + (away[part] @ products).sum(0)
    matrix = total.reshape(-1, dim, dim) + ridge[:, None, None] * torch.eye(dim).to(total)
    return torch.cholesky_solve(pull[..., None], torch.linalg.cholesky(matrix))[..., 0]


def product_of_diagonals(count: Tensor, mean: Tensor, precision: Tensor, alpha: float) -> Tensor:
    """The same for Lambda_nk = diag(precision_nk) + alpha I, `precision` [clients, classes, dim]."""
    weight = torch.where(count[..., None] > 0, wide(precision) + alpha, 0.0)
    return ((weight * mean).sum(0) / weight.sum(0).clamp_min(torch.finfo(mean.dtype).tiny)).to(mean.dtype)


def weighted_means(weight: Tensor, mean: Tensor) -> Tensor:
    """sum_n w_nk mean_nk / sum_n w_nk, [classes, dim]; `weight` [clients, classes], 0 where there is none."""
    total = torch.einsum("nk,nkd->kd", wide(weight), wide(mean))
    return (total / wide(weight).sum(0).clamp_min(1e-12)[:, None]).to(mean.dtype)


def centroid_distance(features: Tensor, batch: Batch, anchor: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """strength * mean over examples and features of (z - centroid_y)^2, for `anchor` = (centroid, known, strength).

    An example of a class that has no centroid yet adds 0. A penalty for `coterie.local.train`.
    """
    centroid, known, strength = anchor
    here = (batch.mask > 0).to(batch.mask.dtype)  # class weights are for the loss: here every example counts the same
    weight = here * known[batch.y]
    distance = ((features - centroid[batch.y]) ** 2).flatten(1).mean(1)
    return strength * (distance * weight).sum() / here.sum().clamp_min(1.0)


def used_bytes(count: Tensor, mean: Tensor, factor: Tensor | Factor | tuple[()]) -> int:
    """Bytes of class moments without those of absent classes and of rows that nobody owns; leaves have rows."""
    here, dim = int((count > 0).sum()), mean.shape[-1]
    if isinstance(factor, Factor):
        ranks = int((factor.owner != NOBODY).sum())
        spread = ranks * (dim * factor.rows.element_size() + factor.owner.element_size())
    else:
        spread = here * dim * factor.element_size() if isinstance(factor, Tensor) else 0
    return count.nbytes + here * dim * mean.element_size() + spread


def _widened(batches: Batches, width: int = 64) -> Batches:
    """The same examples in fewer, wider minibatches, for passes that train nothing."""
    together = max(1, width // batches.index.shape[-1])
    missing = -batches.index.shape[1] % together

    def join(part: Tensor, fill: Tensor) -> Tensor:
        padded = torch.cat([part, fill.expand(-1, missing, -1)], 1)
        return padded.reshape(len(padded), -1, together * part.shape[-1])

    index, mask = batches.index, batches.mask
    index, mask = join(index, index[:, :1]), join(mask, 0 * mask[:, :1])
    return batches._replace(index=index, mask=mask, key=batches.key[:, ::together])


def _members(batch: Batch, classes: int) -> Tensor:
    """[batch, classes]; 1 where an example that counts, whatever its weight, is of the class."""
    return (batch.y[:, None] == torch.arange(classes, device=batch.y.device)) & (batch.mask > 0)[:, None]
