"""MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021).

FedAvg with a loss that draws the features z of the model in training to those of the received model, and away from
those of the client's own last model:

    l_con = -log  e^(s(z, z_glob) / tau) / (e^(s(z, z_glob) / tau) + e^(s(z, z_prev) / tau))     (`_contrast`; eq. 3)
    w_i  <- SGD on f_i + mean mu l_con, from w                                                   (`local_update`; eq. 4)
    w    <- sum_i (n_i / n) w_i                                                                  (`aggregate`)

s is the cosine of two feature vectors. z_glob and z_prev are features of the received model and of the client's w_i at
the end of its last round, both fixed, in evaluation mode. In its first round a client has no last model: it uses the
received one, and the two terms cancel. mu = 0 is FedAvg (tested). All clients deploy w.

The slope of l_con in z is up to 1 / (tau |z|), while that of the cross-entropy does not depend on |z|. Features are
short as long as a network has not learned: on digits, |z| is 0.6 at first and 11 after 1500 steps. With the paper's
mu = 1 and tau = 0.5, the contrast is then up to six times as steep as the cross-entropy at first (3.1 against 0.5), so
that clients hardly leave the received model, and about as steep at last (0.2). mu is a number, or `auto` (default): for
each example mu = 0.1 tau |z_glob|, with which the slope is at most about 0.1 throughout.

Deviation: the paper puts a projection head of two layers before the features that are compared. Here, as in the
comparisons of later papers, they are what enters the model's own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import MIN_TOTAL_WEIGHT, Batch, Batches
from coterie.core.errors import CoterieError
from coterie.core.method import CountedParams, Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import Search
from coterie.core.task import Task
from coterie.core.training import train
from coterie.core.tree import Params
from coterie.parts import averaging

SLOPE = 0.1  # mu auto: the largest slope of the contrast in the features


class Client(NamedTuple):
    last: Params  # w_i at the end of the client's last round
    rounds: Tensor  # []; rounds taken part in


@dataclass(frozen=True)
class MOON(Method[Params, Client, Params, CountedParams]):
    optimizer: Optimizer = SGD()
    mu: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0)],
        Search(1e-1, 1e1),
        Field(description="strength of the contrast; auto: by the features' length"),
    ] = "auto"
    temperature: Annotated[float, Search(1e-1, 1), Field(gt=0, description="tau, of the contrast")] = 0.5

    dispatch, aggregate = averaging.dispatch, averaging.aggregate

    def init_server(self, params: Params, population: Population) -> Params:
        if population.task is not None and population.task.head_module is None:
            raise CoterieError(
                "MOON compares what enters the model's head, but this model has none: name one with --head"
            )
        return params

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, CountedParams, Info]:
        last = tree.where(client.rounds > 0, client.last, down)

        def contrast(features: Tensor, batch: Batch, anchor: Any) -> Tensor:
            received, last = anchor
            return self._contrast(features, task.features(received, batch.x), task.features(last, batch.x), batch.mask)

        w, loss = train(task, self.optimizer, down, batches, anchor=(down, last), feature_penalty=contrast)
        return Client(w, client.rounds + 1), CountedParams(task.sent(w), batches.count), {"loss": loss}

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return down

    @property
    def pull_option(self) -> str:
        return "mu"

    def _contrast(self, z: Tensor, received: Tensor, last: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of mu l_con over the examples, each counting its mask; features are [batch, dim]."""
        away = F.cosine_similarity(z, last, dim=1) - F.cosine_similarity(z, received, dim=1)
        each = F.softplus(away / self.temperature)  # -log 1 / (1 + e^(away / tau))
        mu = SLOPE * self.temperature * received.norm(dim=1) if self.mu == "auto" else self.mu
        return (mu * each * mask).sum() / mask.sum().clamp_min(MIN_TOTAL_WEIGHT)
