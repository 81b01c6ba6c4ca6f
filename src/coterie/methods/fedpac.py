"""FedPAC (Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
2023).

A shared body, whose features z are drawn to common class centroids, and heads that are combined for each client with
weights of its own:

    g_i   <- SGD on f_i, the body fixed as received                                        (`local_update`)
    phi_i <- SGD on  f_i + lam mean (z - c_y)^2,  the head fixed as just trained           (`local_update`)
    phi   <- sum_i (n_i / n) phi_i,    c_k <- sum_i n_ik c_ik / sum_i n_ik                 (`aggregate`)
    g_i   <- sum_j alpha_ij g_j                                                            (`_combined`)

alpha_i trades the bias of other clients' heads for the variance of the own one. With h_j [classes, dim], the mean
feature of class k times its share of client j's examples, and v_j the variance of that estimate, it minimises

    || sum_j alpha_j h_j - h_i ||^2 + sum_j alpha_j^2 v_j   over alpha >= 0, sum_j alpha_j = 1      (`_weights`)
    v_j = (sum_k p_jk mean_k ||z||^2 - sum_k p_jk^2 ||mean_k z||^2) / (n_j - 1)                     (`_statistics`)

h and v are those of the received body, which is the same for all clients, and of the examples of the round's first
epoch. With K = HH', the first line is alpha'(K + diag v) alpha - 2 K_i alpha + const: all clients' programs share one
matrix and are solved together (`coterie.parts.simplex`). Each client deploys the shared body with its combined head. A
newcomer trains a head on the shared body, which stays as it is.

Details: a client that is not in a round keeps the head that it was last given. The head is trained once through the
round's minibatches, and so is the body, each with an optimiser of its own and the same step size. (The authors'
program: one epoch for the head, with step size 0.1, and five for the body, with 0.01; and it sets alpha below 0.001 to
0.) v is divided by n_j - 1, so that it is unbiased; the paper divides by n_j. One example says nothing of its variance:
v is then ||z||^2, its square about 0, and not 0, which would make that client the most certain of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import client_rows, tree
from coterie.core.batches import Batch, Batches
from coterie.core.method import Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.privacy import Guard, noisy_sum
from coterie.core.scan import scan
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import EVALUATION_BATCH, train
from coterie.core.tree import Params
from coterie.parts import class_moments, simplex


class Server(NamedTuple):
    body: Params
    heads: Any  # rows of the population; each client's combined head
    centroid: Tensor  # [classes, dim]; c_k
    known: Tensor  # [classes]; 1 once anybody had the class
    alpha: Tensor  # [population, population]; the weights of the client's last round


class Down(NamedTuple):
    body: Params
    head: Params
    centroid: Tensor  # [classes, dim]
    known: Tensor  # [classes]


class Up(NamedTuple):
    theta: Params  # (phi_i, g_i)
    size: Tensor  # []; n_i
    class_size: Tensor  # [classes]; n_ik
    centroid: Tensor  # [classes, dim]; c_ik
    h: Tensor  # [classes, dim]
    v: Tensor  # []


@dataclass(frozen=True)
class FedPAC(Method[Server, tuple[()], Down, Up]):
    learns_from: ClassVar[str] = "all clients through the body, and through heads weighed by whose features are alike"

    exempt: ClassVar[dict[int, str]] = {
        9: "the model is kept in two parts, body and head, so the law finds no whole one"
    }

    optimizer: Optimizer = SGD()
    lam: Annotated[
        float, Search(1e-2, 1e1), Field(ge=0, description="strength of the pull of features to their class's centroid")
    ] = 1.0

    def init_server(self, params: Params, population: Population) -> Server:
        classes, dim = class_moments.dimensions(population.task)
        names = population.task.head_names if population.task else frozenset()
        body = {name: value for name, value in params.items() if name not in names}
        heads = population.rows({name: value for name, value in params.items() if name in names})
        centroid, known = class_moments.zeros_for(params, classes, dim), class_moments.zeros_for(params, classes)
        return Server(body, heads, centroid, known, torch.eye(population.size))

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        heads = client_rows.take(server.heads, ids)
        body, centroid, known = tree.broadcast((server.body, server.centroid, server.known), len(ids))
        return Down(body, heads, centroid, known)

    def local_update(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> tuple[tuple[()], Up, Info]:
        start = {**down.body, **down.head}
        h, v = _statistics(task, start, batches.once(), self.optimizer.guard)
        theta, _ = train(task, self.optimizer, start, batches, only=task.head_names)
        theta, loss = train(
            task,
            self.optimizer,
            theta,
            batches,
            anchor=(down.centroid, down.known, torch.as_tensor(self.lam)),
            only=frozenset(down.body),
            feature_penalty=class_moments.centroid_distance,
        )
        class_size, centroid = class_moments.class_means(task, theta, batches.once(), self.optimizer.guard, 3)
        return (), Up(task.sent(theta), batches.count, class_size, centroid, h, v), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        found = ups.class_size.sum(0) > 0
        mean = class_moments.weighted_means(ups.class_size, ups.centroid)
        centroid = torch.where(found[:, None], mean, server.centroid)
        weights = _weights(ups.h, ups.v)  # [clients, clients]
        combined = {name: _combined(weights, value) for name, value in ups.theta.items() if name not in server.body}
        heads = _replaced(server.heads, ids, combined)
        rows = server.alpha.new_zeros(len(ids), len(server.alpha)).index_copy(1, ids, weights.to(server.alpha))
        alpha = server.alpha.index_copy(0, ids, rows)
        known = torch.maximum(server.known, found.to(server.known))
        body = tree.mean({name: value for name, value in ups.theta.items() if name in server.body}, ups.size)
        return Server({**server.body, **body}, heads, centroid, known, alpha)

    def personalize(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> Params:
        return {**down.body, **down.head}

    @property
    def pull_option(self) -> str:
        return "lam"

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        newcomer = newcomer._replace(only=task.head_names & task.trainable or None)
        if ups is None:
            return newcomer
        head = {name: value for name, value in ups.theta.items() if name not in newcomer.server.body}
        heads = _replaced(newcomer.server.heads, ids, head)
        return newcomer._replace(server=newcomer.server._replace(heads=heads))

    def server_info(self, server: Server) -> Info:
        return {"collaboration": server.alpha}


def _statistics(task: Task, theta: Params, epoch: Batches, guard: Guard | None = None) -> tuple[Tensor, Tensor]:
    """Return h [classes, dim] and v [] of the features of `theta`, in evaluation mode; private if there is a guard."""
    size, mean = class_moments.class_means(task, theta, epoch, guard)

    def step(carry: Tensor, theta: Any, batch: Batch) -> Tensor:
        here = (batch.mask > 0).to(carry.dtype)
        features = class_moments.clipped(task.features(theta, batch.x), guard)
        return carry + (here * (features**2).flatten(1).sum(1)).sum()

    squares = scan(step, mean.new_zeros(()), theta, epoch.merged(EVALUATION_BATCH))
    if guard is not None:
        squares = noisy_sum(guard, squares, guard.clip_features**2, epoch.key[0, 0], 2).clamp_min(0)
    total = size.sum().clamp_min(1.0)
    h = size[:, None] / total * mean
    variance = (squares / total - (h**2).sum()).clamp_min(0) / (total - 1).clamp_min(1.0)
    return h, torch.where(total > 1, variance, squares)


def _weights(h: Tensor, v: Tensor) -> Tensor:
    """Return alpha [clients, clients], row i that of client i."""
    rows = tree.widest_float(h.flatten(1))
    rows = rows - rows.mean(0)  # weights add up to 1, so the programs are the same, and better conditioned
    gram = rows @ rows.T
    return simplex.minimise_quadratic(gram + torch.diag(tree.widest_float(v)), gram)


def _replaced(heads: Any, ids: Tensor, new: Params) -> Any:
    """Return the rows `heads` with those of `ids` replaced by `new`, which lacks parameters that are frozen."""
    return client_rows.put(heads, ids, {**client_rows.take(heads, ids), **new})


def _combined(weights: Tensor, leaf: Tensor) -> Tensor:
    """Return sum_j weights_ij leaf_j for each i; `leaf` is [clients, ...]."""
    return (weights.to(leaf.dtype) @ leaf.flatten(1)).reshape(leaf.shape)
