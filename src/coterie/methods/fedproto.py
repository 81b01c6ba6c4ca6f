"""FedProto (Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022).

Clients keep their models and exchange only prototypes, the mean feature z of each class (features enter the head):

    theta_i <- SGD on  CE + lam mean (z - C_y)^2                            (`local_update`)
    C_i^k   = mean of z over the client's examples of class k              (`local_update`)
    C^k     <- mean of C_i^k over the clients i that have class k          (`aggregate`)
    y(x)    = argmin_k ||z(x) - C^k||                                      (`predict`)

A class that nobody had in a round keeps its prototype. A class that nobody ever had adds nothing to the loss and is
never predicted. Logits are minus the squared distances, and below all others for such a class. Each client deploys its
model with the prototypes.

Deviations:
- The distance is squared and averaged over features.
- Prototypes are taken after the local epochs, in evaluation mode, on the examples of the round's first epoch; public
  implementations add up features while the model still changes.
- `weighting`: `uniform` (default) gives all clients that have the class the same weight, as the public implementations
  do; `samples` weighs them by their number of examples of it.
- `prediction`: `prototype` is the paper's; `head` predicts with the client's own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import class_moments


class Prototypes(NamedTuple):
    """The server's state, which is also what every client is sent."""

    centre: Tensor  # [classes, dim]; C^k
    known: Tensor  # [classes]; 1 once anybody had the class


class Up(NamedTuple):
    class_size: Tensor  # [classes]; the client's number of examples of class k, or 1 for any if all weigh the same
    centre: Tensor  # [classes, dim]; C_i^k


class View(NamedTuple):
    theta: Params
    prototypes: Prototypes


@dataclass(frozen=True)
class FedProto(Method[Prototypes, Params, Prototypes, Up]):
    mixes_models: ClassVar[str] = "prototypes"
    learns_from: ClassVar[str] = "all clients, through the mean feature of each class; the model is its own"

    optimizer: Optimizer = SGD()
    lam: Annotated[
        float, Search(1e-2, 1e1), Field(ge=0, description="strength of the pull of features to their class's prototype")
    ] = 1.0
    weighting: Annotated[
        Literal["uniform", "samples"], UNSEARCHED, Field(description="what a client weighs in a prototype")
    ] = "uniform"
    prediction: Annotated[Literal["prototype", "head"], Field(description="nearest prototype, or the own head")] = (
        "prototype"
    )

    def init_server(self, params: Params, population: Population) -> Prototypes:
        classes, dim = class_moments.dimensions(population.task)
        return Prototypes(class_moments.zeros_for(params, classes, dim), class_moments.zeros_for(params, classes))

    def init_client(self, params: Params) -> Params:
        return params  # theta_i

    def dispatch(self, server: Prototypes, ids: Tensor, rng: torch.Generator) -> Prototypes:
        return tree.broadcast(server, len(ids))

    def local_update(self, task: Task, client: Params, down: Prototypes, batches: Batches) -> tuple[Params, Up, Info]:
        anchor = (*down, torch.as_tensor(self.lam))
        theta, loss = train(
            task, self.optimizer, client, batches, anchor=anchor, feature_penalty=class_moments.centroid_distance
        )
        class_size, centre = class_moments.class_means(task, theta, batches.once(), self.optimizer.guard)
        if self.weighting == "uniform":
            class_size = class_size.clamp_max(1.0)  # whether it has the class is all that the server needs
        return theta, Up(class_size, centre), {"loss": loss}

    def aggregate(self, server: Prototypes, ids: Tensor, ups: Up) -> Prototypes:
        has = (ups.class_size > 0).to(ups.centre)
        weight = has if self.weighting == "uniform" else ups.class_size
        mean = class_moments.weighted_means(weight, ups.centre)
        found = has.amax(0)
        return Prototypes(torch.where(found[:, None] > 0, mean, server.centre), torch.maximum(server.known, found))

    def personalize(self, task: Task, client: Params, down: Prototypes, batches: Batches) -> Params | View:
        return client if self.prediction == "head" else View(client, down)

    def predict(self, task: Task, view: Params | View, x: Tensor) -> Tensor:
        if not isinstance(view, View):
            return task.logits(view, x)
        theta, (centre, known) = view
        distance = ((task.features(theta, x)[:, None] - centre) ** 2).sum(-1)  # [batch, classes]
        farther = (distance * known).amax(1, keepdim=True) + 30.0  # at most e^-30 times as likely as any known class
        return -torch.where(known > 0, distance, farther)

    def message_bytes(self, ups: Up) -> int:
        return class_moments.used_bytes(ups.class_size, ups.centre, ())

    @property
    def pull_option(self) -> str:
        return "lam"
