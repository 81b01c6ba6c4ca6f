"""IFCA (Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020).

There are K = `clusters` models. Each client takes the one that fits its data best, and those who took it average it:

    j_i <- argmin_j f_i(theta_j)                                     (`_closest`; Algorithm 1, line 7)
    w_i <- SGD on f_i, from theta_{j_i}                              (`local_update`; Algorithm 1, option II)
    theta_j <- mean of w_i over the clients with j_i = j, by n_i     (`aggregate`; Algorithm 1, option II)

A model that nobody took stays as it is. A client deploys the model that fits its training data best at that time, which
is also how a client that never took part, or a newcomer, finds its cluster. K = 1 is FedAvg (tested).

Details: the models begin as in `coterie.parts.components`, since equal ones would stay equal. f_i is the mean loss over
the examples of the round's first epoch, in evaluation mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import mean_loss, train
from coterie.core.tree import Params
from coterie.parts.components import chosen, different_models

NO_CLUSTER = -1  # of a client that has not taken part yet


class Server(NamedTuple):
    theta: Params  # [K, ...]
    cluster: Tensor  # [population] int64; j_i of the client's last round, and before it NO_CLUSTER


class Up(NamedTuple):
    w: Params
    cluster: Tensor  # [] int64; j_i
    count: Tensor  # type: ignore[assignment]  # []; n_i


@dataclass(frozen=True)
class IFCA(Method[Server, tuple[()], Params, Up]):
    learns_from: ClassVar[str] = "the clients of its cluster, those whom the same one of several models fits best"

    optimizer: Optimizer = SGD()
    clusters: Annotated[int, Search(2, 5), Field(ge=1, description="K, the number of models")] = 3

    @property
    def personalize_epochs(self) -> int:
        return 1  # to find the model that fits best

    def init_server(self, params: Params, population: Population) -> Server:
        theta = different_models(params, self.clusters, population.task)
        return Server(theta, torch.full((population.size,), NO_CLUSTER))

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server.theta, len(ids))

    def local_update(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> tuple[tuple[()], Up, Info]:
        closest = _closest(task, down, batches)
        w, loss = train(task, self.optimizer, chosen(down, closest), batches)
        return (), Up(task.sent(w), closest, batches.count), {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        took = ups.cluster == torch.arange(self.clusters, device=ups.cluster.device)[:, None]  # [K, clients]

        def combined(theta: Params, took: Tensor) -> Params:
            weight = torch.where(took.any(), took * ups.count, torch.ones_like(ups.count))
            mean = tree.mean(ups.w, weight)
            return {**theta, **tree.where(took.any(), mean, {name: theta[name] for name in mean})}

        return Server(vmap(combined)(server.theta, took), server.cluster.index_copy(0, ids, ups.cluster))

    def personalize(self, task: Task, client: tuple[()], down: Params, batches: Batches) -> Params:
        return chosen(down, _closest(task, down, batches))

    def implausible(self, up: Up, examples: int) -> str | None:
        if not 0 <= int(up.cluster) < self.clusters:
            return f"cluster {int(up.cluster)} of {self.clusters}"
        return super().implausible(up, examples)

    def server_info(self, server: Server) -> Info:
        together = (server.cluster[:, None] == server.cluster) & (server.cluster != NO_CLUSTER)
        together = (together | torch.eye(len(together), dtype=torch.bool, device=together.device)).to(torch.float32)
        return {"collaboration": together / together.sum(1, keepdim=True)}


def _closest(task: Task, models: Params, batches: Batches) -> Tensor:
    """Return j_i, the number of the model with the lowest loss on the client's data."""
    return vmap(lambda model: mean_loss(task, model, batches.epoch(0)))(models).argmin()
