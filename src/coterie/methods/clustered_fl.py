"""Clustered FL (Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization under Privacy Constraints", IEEE TNNLS 2020).

All clients begin in one cluster, and a cluster does FedAvg:

    Delta_i <- SGD on f_i from w_c, minus w_c                                     (`local_update`; Algorithm 3)
    w_c     <- w_c + sum_{i in c} (n_i / n_c) Delta_i                             (`aggregate`; Algorithm 3)

A cluster whose mean update has become small although its members' own have not is pulled apart by its members. It is
split in two, so that the largest cosine between updates of different halves is least, if that cosine is small enough:

    ||sum_i (n_i / n_c) Delta_i|| < eps1   and   max_i ||Delta_i|| > eps2         (`_stalled`; both conditions)
    c1, c2 = argmin over bipartitions of max_{i in c1, j in c2} cos(Delta_i, Delta_j)     (`_halves`; Algorithm 1)
    sqrt((1 - that maximum) / 2) > gamma_max                                      (`aggregate`; Algorithm 3)

The minimum is found exactly: it leaves out the weakest edge of the maximum spanning tree, which is what single linkage
does when two clusters are left. `splitting` = false never splits: FedAvg (tested).

gamma_max, the option `separation`, bounds how far the updates within one true cluster may be from their common
direction. Near its optimum, a cluster of m alike clients has updates that are little but noise and almost orthogonal:
their mean is about 1 / sqrt(m) as long as they are, so that it looks stalled. For orthogonal updates the square root
above is 0.71. The default, 0.75, thus asks for a cosine below -0.125 between any two members of different halves. Of
few alike clients that does not keep: updates of m clients that add up to 0 have a mean cosine of -1 / (m - 1).

eps1 and eps2 depend on the model and on the step size. With eps1 = `auto` (default), the mean update must be shorter
than `ratio` times the longest of its members'; 0.25 is the ratio of the values that the authors used (0.4 and 1.6).

Details: a client's weight is n_i, where the authors' program has the plain mean; it also splits by complete linkage and
whatever the largest cosine is, without gamma_max. Only trained parameters are compared; buffers are averaged within the
cluster. A cluster is split only in a round in which all its members were heard, from `first_split` on: in the first
rounds the updates say more about the initial model than about the clients. Each client deploys its cluster's model. A
newcomer begins with, and stays at, the mean of all clients' models, because it was not there when the clusters parted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from coterie.core import client_rows, tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Newcomer, Population, TrainedAndBuffers
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params

Positive = Annotated[float, Field(gt=0)]


class Server(NamedTuple):
    w: Any  # rows of the population; each client's cluster's model
    cluster: Tensor  # [population] int64; a cluster is named after one of its members
    round: Tensor  # [] int64; rounds so far


@dataclass(frozen=True)
class ClusteredFL(Method[Server, tuple[()], Params, TrainedAndBuffers]):
    peer_to_peer: ClassVar[bool] = False
    learns_from: ClassVar[str] = "the clients of its cluster, those whose updates point its way"

    optimizer: Optimizer = SGD()
    splitting: Annotated[bool, Field(description="whether clusters are split at all")] = True
    eps1: Annotated[Literal["auto"] | Positive, Field(description="a mean update below this has stalled")] = "auto"
    eps2: Annotated[float, Field(ge=0, description="a member's update must be above this for a split")] = 0.0
    ratio: Annotated[float, Field(gt=0, lt=1, description="eps1 auto: over the members' longest update")] = 0.25
    separation: Annotated[float, Field(ge=0, lt=1, description="gamma_max, how far apart halves must be")] = 0.75
    first_split: Annotated[int, Field(ge=1, description="the first round in which a cluster may be split")] = 5

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        # The laws' updates are 0.11 long at most, and their halves about 0.7 apart.
        {"first_split": 1, "ratio": 0.9, "eps2": 0.06, "separation": 0.4},
        {"first_split": 1, "ratio": 0.9, "eps1": 1e-6, "separation": 0.4},
    )

    @property
    def averaged(self) -> tuple[str, ...]:
        return ()  # clusters have means of their own

    def init_server(self, params: Params, population: Population) -> Server:
        everybody = torch.zeros(population.size, dtype=torch.int64)
        return Server(population.rows(params), everybody, torch.zeros((), dtype=torch.int64))

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return client_rows.take(server.w, ids)  # type: ignore[no-any-return]

    def local_update(
        self, task: Task, client: tuple[()], down: Params, batches: Batches
    ) -> tuple[tuple[()], TrainedAndBuffers, Info]:
        w, loss = train(task, self.optimizer, down, batches)
        trained, buffers = task.split(task.sent(w))
        update = tree.sub(trained, task.split(down)[0])  # Delta_i
        return (), TrainedAndBuffers(update, buffers, batches.count), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: TrainedAndBuffers) -> Server:
        cluster, order = server.cluster, ids.argsort()  # the first member in this order names its cluster
        changed, models = [], []
        for name in sorted(set(server.cluster[ids].tolist())):
            heard = order[server.cluster[ids[order]] == name]
            own = tree.rows(ups, heard)
            members = (server.cluster == name).nonzero().flatten()
            mean = tree.mean(own.trained, own.count)
            before = client_rows.take(server.w, int(ids[heard[0]]))
            after = {**before, **tree.mean(own.buffers, own.count)}
            changed.append(members)
            models.append(after | tree.add({key: before[key] for key in mean}, mean))
            ready = self.splitting and int(server.round) + 1 >= self.first_split and len(heard) == len(members)
            if not ready or len(heard) == 1 or not self._stalled(gram := _gram(own.trained), mean):
                continue
            half, cross = _halves(gram)
            if math.sqrt(max(0.0, 1 - cross) / 2) > self.separation:
                second = ids[heard[half.to(heard.device)]]
                cluster = cluster.index_fill(0, second, int(second.min()))
        return Server(_put_models(server.w, changed, models), cluster, server.round + 1)

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return down

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: TrainedAndBuffers | None) -> Newcomer:
        if ups is not None:
            return newcomer
        others = torch.ones(len(newcomer.server.cluster)).index_fill(0, ids, 0.0)
        mean = client_rows.mean(newcomer.server.w, others)
        rows = client_rows.put(newcomer.server.w, ids, tree.broadcast(mean, 1))
        return newcomer._replace(server=newcomer.server._replace(w=rows))

    def server_info(self, server: Server) -> Info:
        together = (server.cluster[:, None] == server.cluster).to(torch.float32)
        return {"collaboration": together / together.sum(1, keepdim=True)}

    def cautions(self, task: Task, population: Population) -> list[str]:
        if self.splitting and population.audience < population.size:
            return ["not all clients are heard in a round, so no cluster is ever split: use --fraction 1"]
        return []

    def _stalled(self, gram: Tensor, mean: Params) -> bool:
        """Tell whether a cluster's mean update has become small while its members' have not."""
        longest = float(gram.diagonal().max().sqrt())
        limit = self.ratio * longest if self.eps1 == "auto" else self.eps1
        return float(tree.dot(mean, mean).sqrt()) < limit and longest > self.eps2


def _put_models(w: Any, members: list[Tensor], models: list[Params]) -> Any:
    """Return the rows `w` in which all `members` of a cluster have its model; one call writes all clusters'."""
    if len(models) == 1:
        return client_rows.put(w, members[0], tree.broadcast(models[0], len(members[0])))
    everybody = torch.cat(members)
    which = torch.cat([torch.full_like(each, place) for place, each in enumerate(members)])
    order = everybody.argsort()
    return client_rows.put(w, everybody[order], tree.rows(tree.stack(models), which[order]))


def _gram(updates: Params) -> Tensor:
    """Return [clients, clients], the inner products of updates with leaves [clients, ...], added up leaf by leaf."""
    flat = (tree.widest_float(leaf.reshape(len(leaf), -1)) for leaf in updates.values())
    return torch.stack([each @ each.T for each in flat]).sum(0)


def _halves(gram: Tensor) -> tuple[Tensor, float]:
    """Return [clients] bool, true for the half that does not hold the first client, and the largest cosine across."""
    from scipy.cluster.hierarchy import linkage, to_tree  # here, since every run imports all methods
    from scipy.spatial.distance import squareform

    length = gram.diagonal().sqrt().clamp_min(torch.finfo(gram.dtype).tiny)
    distance = (1 - gram / length / length[:, None]).clamp_min(0).cpu().numpy()
    np.fill_diagonal(distance, 0.0)
    links = linkage(squareform(distance, checks=False), "single")
    one = np.isin(np.arange(len(gram)), to_tree(links).get_left().pre_order())
    return torch.from_numpy(one != one[0]), 1 - float(links[-1, 2])
