"""pFedVMP ("Personalized Federated Learning via Variational Message Passing", 2024).

Client n has a shared body theta^b and its own head theta_n^h (the split is `task.head_names`). With z = body(x), and
mu_k the shared centroid of the features of class k:

    theta^b, theta_n^h <- SGD on  CE + (xi1 / 512) mean_i ||z_i - mu_{y_i}||^2          (`local_update`; eq. 9)
    mu_kn = mean of z over class k,  Lambda_kn = pinv(Sigma_kn) + alpha I              (`_moments`; eq. 11)
    theta^b <- sum_n (S_n / S) theta_n^b                                               (`aggregate`; eqs 10 and 12)
    mu_k <- (sum_n Lambda_kn)^-1 sum_n Lambda_kn mu_kn                                 (`_centroid`; eq. 13)

Body and head train together. Eq. 11 then uses the updated body in evaluation mode, on the examples of the round's first
epoch, which are all of the client's unless a number of steps is set. A client without class k adds nothing to eq. 13,
where alpha I would drag mu_k to 0. A class that nobody has keeps its centroid, and a class that never had one (all of
them in round 1) adds nothing to eq. 9. Each client deploys the shared body with its own head. A newcomer trains a head
on the shared body, which stays as it is, beginning with the nearest-centroid classifier
(`class_moments.centroid_head`).

Deviations:
- The paper's xi1 = 50 diverges with the sum over features, as printed, and works with their mean, at the paper's 512
  features: each is pulled with 2 (50 / 512) (z_ij - mu_j). The mean over another number of features would pull each
  with another strength (32 times the paper's for a body of 16), while what the loss asks of one feature does not
  depend on how many others there are. So the sum is divided by `PAPER_WIDTH` = 512 whatever the width is
  (`_strength`), and xi1 means the same for every body. At 512 features this is the mean.
- pinv is discontinuous, so eigenvalues below `rtol` times the largest, or below what float32 resolves, count as 0.
- `precision`: `full` is eq. 11, sent as thin factors and combined exactly (`coterie.parts.class_moments`) if no client
  has more than `room` examples. The covariances of a larger client are those of `room` of its examples, drawn anew each
  round; `left_out` in the record of the round says how many it leaves out. `diagonal` keeps the variances only;
  `pooled` is one covariance within classes for each client; `none` is the paper's ablation pFedVMP-avg, the mean of
  the centroids weighted by Z_kn.
- The unused part of `room` takes memory, but is not counted as sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Newcomer, Population, body_cautions
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging, class_moments, shared_layers
from coterie.parts.class_moments import Factor

PAPER_WIDTH = 512  # the paper's number of features, for which its xi1 was tuned


class Server(NamedTuple):
    """The server's state, which is also what every client is sent."""

    body: Params
    centroid: Tensor  # [classes, dim]; mu_k
    known: Tensor  # [classes]; 1 once anybody had the class


class Up(NamedTuple):
    body: Params
    size: Tensor  # []; S_n
    class_size: Tensor  # [classes]; Z_kn, the client's number of examples of class k; 1 for any where precisions weigh
    mean: Tensor  # [classes, dim]; mu_kn
    spread: Factor | Tensor | tuple[()]  # Lambda_kn - alpha I: rows, or its diagonal [classes, dim], or not sent


@dataclass(frozen=True)
class PFedVMP(Method[Server, Params, Server, Up]):
    learns_from: ClassVar[str] = "all clients, through the body and the class centroids; the head is its own"

    optimizer: Optimizer = SGD()
    xi1: Annotated[
        float,
        Search(1, 500),
        Field(ge=0, description="512 times the pull of each feature to its class's centroid, whatever the width"),
    ] = 50.0
    alpha: Annotated[float, Search(1e-1, 1e1), Field(gt=0, description="precision added in every direction")] = 1.0
    precision: Annotated[
        Literal["full", "diagonal", "pooled", "none"],
        UNSEARCHED,
        Field(description="what is sent of a class's covariance"),
    ] = "full"
    rtol: Annotated[
        float, UNSEARCHED, Field(ge=1e-6, lt=1, description="eigenvalues below this share of the largest are 0")
    ] = 1e-6
    room: Annotated[int, Field(ge=2, description="examples of a client that covariances are taken from")] = 2048

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"room": 8},)

    dispatch, init_client = averaging.dispatch, shared_layers.init_client  # only the client's head is used

    @property
    def averaged(self) -> tuple[str, ...]:
        return ("body",)

    @property
    def stepped(self) -> tuple[str, ...]:
        return ("body",)

    def init_server(self, params: Params, population: Population) -> Server:
        classes, dim = class_moments.dimensions(population.task)
        head = population.task.head_names if population.task else frozenset()
        body = {name: value for name, value in params.items() if name not in head}
        return Server(body, class_moments.zeros_for(params, classes, dim), class_moments.zeros_for(params, classes))

    def local_update(self, task: Task, client: Params, down: Server, batches: Batches) -> tuple[Params, Up, Info]:
        start = {**client, **down.body}
        anchor = (down.centroid, down.known, torch.as_tensor(self._strength(task)))
        theta, loss = train(
            task, self.optimizer, start, batches, anchor=anchor, feature_penalty=class_moments.centroid_distance
        )
        body = task.sent({name: theta[name] for name in down.body})
        class_size, mean, spread = self._moments(task, theta, batches.once())
        info = {"loss": loss}
        if isinstance(spread, Factor):
            info["left_out"] = (class_size.sum() - self.room).clamp_min(0)
        if self.precision != "none":
            class_size = class_size.clamp_max(1.0)  # eq. 13 asks only whether the client has the class
        return theta, Up(body, batches.count, class_size, mean, spread), info

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        found = ups.class_size.sum(0) > 0
        centroid = torch.where(found[:, None], self._centroid(ups), server.centroid)
        known = torch.maximum(server.known, found.to(server.known))
        return Server({**server.body, **tree.mean(ups.body, ups.size)}, centroid, known)

    def personalize(self, task: Task, client: Params, down: Server, batches: Batches) -> Params:
        return {**client, **down.body}

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        head = class_moments.centroid_head(task, newcomer.server.centroid, newcomer.server.known, self._strength(task))
        return newcomer._replace(params={**newcomer.params, **head}, only=task.head_names & task.trainable or None)

    def message_bytes(self, ups: Up) -> int:
        return tree.nbytes((ups.body, ups.size)) + class_moments.used_bytes(ups.class_size, ups.mean, ups.spread)

    @property
    def pull_option(self) -> str:
        return "xi1"

    def cautions(self, task: Task, population: Population) -> list[str]:
        return body_cautions(task)

    def _strength(self, task: Task) -> float:
        """Return what multiplies the mean over features, so that each is pulled as in the paper's body."""
        return self.xi1 * task.feature_dim / PAPER_WIDTH

    def _moments(self, task: Task, theta: Params, epoch: Batches) -> tuple[Tensor, Tensor, Factor | Tensor | tuple[()]]:
        """Return Z_kn, mu_kn and Lambda_kn - alpha I, as in `Up`."""
        guard = self.optimizer.guard
        class_size, mean = class_moments.class_means(task, theta, epoch, guard)
        if self.precision == "none":
            return class_size, mean, ()
        if self.precision == "diagonal":
            variance = class_moments.class_variances(task, theta, epoch, class_size, mean, guard)
            return class_size, mean, class_moments.inverse_variances(variance, mean, self.rtol)
        pooled = self.precision == "pooled"
        return class_size, mean, class_moments.precision_factor(task, theta, epoch, self.room, self.rtol, pooled)

    def _centroid(self, ups: Up) -> Tensor:
        """Return mu_k [classes, dim] from the messages of a round; what stands at a class nobody has is meaningless."""
        if isinstance(ups.spread, Factor):
            pooled = self.precision == "pooled"
            return class_moments.product_of_gaussians(ups.class_size, ups.mean, ups.spread, self.alpha, pooled)
        if isinstance(ups.spread, Tensor):
            return class_moments.product_of_diagonals(ups.class_size, ups.mean, ups.spread, self.alpha)
        return class_moments.weighted_means(ups.class_size, ups.mean)
