"""FedMAP ("FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization", 2024).

The global model is a prior on the clients' models, rho_gamma = N(gamma, sigma^2 I) (eq. 6), R = -log rho_gamma:

    theta_k <- argmin  L(theta; Z_k) + ||theta - gamma||^2 / (2 sigma^2)       (`local_update`; eq. 7)
    log omega_k = -L(theta_k; Z_k) - ||theta_k - gamma||^2 / (2 sigma^2)       (`local_update`; eq. 8)
    gamma   <- sum_k omega_k theta_k / sum_k omega_k                          (`aggregate`; eq. 9)

Equation 9 is the gradient step (3) on sum_k w_k R(theta_k, gamma) with step size sigma^2 and w_k = omega_k / sum omega,
and so, with exact local minimisers, gradient descent on the envelope M(gamma) (Theorem 1; tested). Each client starts
from its own theta_k of the round before (gamma when it takes part for the first time) and deploys theta_k.

Deviations, all options:
- `likelihood`: the paper writes L as a sum over the examples in eq. 2 and as their mean in eq. 7, which differ by a
  factor N_k in the strength of the prior. `mean` (default) is eq. 7 and what the authors' code trains; `sum` is eq. 2.
  The same L is used in eq. 8. With `sum`, omega is so small (1e-40 to 1e-400) that it only exists as a logarithm and
  the weights are nearly one-hot; with `mean` they are nearly uniform.
- `weighting`: `omega` (default) is eq. 8; `samples` weighs by N_k, which is what the authors' published code does;
  `uniform` weighs all alike.
The prior covers trained parameters only; buffers follow theta_k and are averaged into gamma with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.local import Adam, Optimizer, mean_loss, quadratic, train
from coterie.method import Info, Method, Population
from coterie.task import Task
from coterie.tree import Params


class Server(NamedTuple):
    gamma: Params
    weight: Tensor  # [population]; w_k of the last round, 0 for those who took no part


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


class Up(NamedTuple):
    theta: Params
    log_weight: Tensor  # []


@dataclass(frozen=True)
class FedMAP(Method[Server, Client, Params, Up]):
    optimizer: Optimizer = Adam(lr=1e-4)
    sigma2: Annotated[float, Field(gt=0, description="variance of the prior; small pulls to gamma")] = 15.0
    weighting: Annotated[Literal["omega", "samples", "uniform"], Field(description="what a client weighs in gamma")] = (
        "omega"
    )
    likelihood: Annotated[Literal["mean", "sum"], Field(description="L of eq. 7 (mean) or eq. 2 (sum)")] = "mean"

    def init_server(self, params: Params, population: Population) -> Server:
        return Server(params, torch.zeros(population.size))

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return tree.broadcast(server.gamma, len(ids))

    def local_update(self, task: Task, client: Client, down: Params, batches: Batches) -> tuple[Client, Up, Info]:
        # Training divides the objective by N_k: the mean loss, and the prior over `scale` examples.
        scale = batches.count if self.likelihood == "sum" else torch.ones(())
        anchor = (down, 1 / (self.sigma2 * scale))
        theta, loss = train(task, self.optimizer, self._theta(client, down), batches, quadratic, anchor)
        prior = quadratic(task.split(theta)[0], (down, torch.tensor(1 / self.sigma2)))
        log_weight = {
            "omega": -scale * mean_loss(task, theta, batches.epoch(0)) - prior,
            "samples": batches.count.log(),
            "uniform": torch.zeros(()),
        }[self.weighting]
        return Client(theta, client.rounds + 1), Up(theta, log_weight), {"loss": loss, "prior": prior}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        weight = torch.softmax(ups.log_weight.double(), 0).float()
        return Server(tree.mean(ups.theta, weight), torch.zeros_like(server.weight).index_copy(0, ids, weight))

    def personalize(self, task: Task, client: Client, down: Params, batches: Batches) -> Params:
        return self._theta(client, down)

    def server_info(self, server: Server) -> Info:
        return {"weight": server.weight}

    def _theta(self, client: Client, down: Params) -> Params:
        return tree.where(client.rounds > 0, client.theta, down)
