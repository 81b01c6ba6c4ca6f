"""FedALA (Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023).

Before a client trains, it decides for every single weight how much of the received model w it takes up:

    theta_hat_i = theta_i + (w - theta_i) * W_i,   0 <= W_i <= 1, element by element       (`_taken_up`; eq. 4)
    W_i     <- clip(W_i - eta grad f_i(theta_hat_i) * (w - theta_i), 0, 1)                 (`_adapt`; eq. 5)
    theta_i <- SGD on f_i, from theta_hat_i                                                (`local_update`)
    w       <- sum_i (n_i / n) theta_i                                                     (`aggregate`)

W_i begins at 1 and is kept from round to round. It is adapted on a share `sample` of the client's minibatches: in every
round once, and `first_passes` times in the first round in which the two models differ, where the authors go on until
the loss stops falling. Only the last `layers` layers that have a weight matrix (the paper's p, with their biases) are
mixed; all other parameters, and buffers, are w's. Each client deploys its theta_i, or w if it never took part (P); w is
the global model (G). W_i = 1 throughout (`layers` = 0) is FedAvg but for what is deployed (tested).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.method import CountedParams, Info, Method
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.scan import scan
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import gradient, train
from coterie.core.tree import Params
from coterie.parts import averaging


class Client(NamedTuple):
    theta: Params
    weight: Params  # W_i, with all names of the model; only those of mixed layers are used
    rounds: Tensor  # []; rounds taken part in


class Models(NamedTuple):
    """What adapting W_i reads and does not change."""

    own: Params  # theta_i
    received: Params  # w


@dataclass(frozen=True)
class FedALA(Method[Params, Client, Params, CountedParams]):
    optimizer: Optimizer = SGD()
    eta: Annotated[float, Search(1e-1, 1e1), Field(gt=0, description="step size of the weights W")] = 1.0
    layers: Annotated[int, Field(ge=0, description="p, how many of the last layers are mixed")] = 1
    sample: Annotated[
        float, UNSEARCHED, Field(gt=0, le=1, description="share of the minibatches that W is adapted on")
    ] = 0.8
    first_passes: Annotated[int, Field(ge=1, description="passes that W is adapted for at first")] = 10

    init_server, dispatch, aggregate = averaging.init_server, averaging.dispatch, averaging.aggregate

    def init_client(self, params: Params) -> Client:
        return Client(params, tree.map(torch.ones_like, params), torch.zeros((), dtype=torch.int64))

    def local_update(
        self, task: Task, client: Client, down: Params, batches: Batches
    ) -> tuple[Client, CountedParams, Info]:
        weight = self._adapted(task, client, down, batches)
        begin = tree.where(client.rounds > 0, _taken_up(task, weight, Models(client.theta, down)), down)
        theta, loss = train(task, self.optimizer, begin, batches)
        kept = {**client.weight, **weight}
        return Client(theta, kept, client.rounds + 1), CountedParams(task.sent(theta), batches.count), {"loss": loss}

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return tree.where(client.rounds > 0, client.theta, down)

    def global_model(self, server: Params) -> Params:
        return server

    def _adapted(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        """Return W_i of the mixed layers, adapted on this round's minibatches."""
        mixed = _last_layers(task, client.theta, self.layers)
        weight: Params = {name: client.weight[name] for name in mixed}
        if not mixed:
            return weight
        some = _share(batches.epoch(0), self.sample)
        # In round 1 there is no model of its own yet, so W_i is first adapted in the client's second round. Steps that
        # are masked change nothing.
        some = some._replace(mask=some.mask * (client.rounds > 0))
        models, step = Models(client.theta, down), partial(self._adapt, task)
        weight = scan(step, weight, models, some)
        if self.first_passes > 1:
            again = some.repeated(self.first_passes - 1)
            weight = scan(step, weight, models, again._replace(mask=again.mask * (client.rounds == 1)))
        return weight

    def _adapt(self, task: Task, weight: Params, models: Models, batch: Batch) -> Params:
        """Do one minibatch: a step of a scan."""
        grads, _, _ = gradient(task, _taken_up(task, weight, models), batch)
        return {
            name: (w - self.eta * grads[name] * (models.received[name] - models.own[name])).clamp(0, 1)
            for name, w in weight.items()
        }


def _taken_up(task: Task, weight: Params, models: Models) -> Params:
    """Return theta_i + (w - theta_i) * W_i in mixed layers, and w elsewhere."""
    own, received = models
    mixed = {name: own[name] + (received[name] - own[name]) * w for name, w in weight.items()}
    return {**received, **mixed}


def _last_layers(task: Task, params: Params, number: int) -> list[str]:
    """Return the names of the trained parameters of the last `number` layers that have a weight matrix."""
    names = [name for name in params if name in task.trainable]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names if params[name].ndim > 1))
    last = layers[max(0, len(layers) - number) :] if number else []
    return [name for name in names if name.rpartition(".")[0] in last]


def _share(batches: Batches, share: float) -> Batches:
    """Mask out all but the first `share` of the client's minibatches (at least one); they are in random order."""
    real = batches.mask.flatten(0, 1).any(-1)
    kept = real.cumsum(0) <= (share * real.sum()).ceil().clamp_min(1)
    mask = (batches.mask.flatten(0, 1) * kept[:, None]).reshape(batches.mask.shape)
    return batches._replace(mask=mask)
