"""FedMAP ("FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization", 2024).

The global model is a prior rho_gamma on the clients' models, R(theta, gamma) = -log rho_gamma(theta) (`priors.py`):

    theta_k <- argmin  L(theta; Z_k) + R(theta, gamma)                     (`local_update`; eqs. 2, 7)
    log omega_k = -L(theta_k; Z_k) - R(theta_k, gamma)                     (`local_update`; eq. 8)
    gamma   <- gamma - lambda sum_k w_k grad_gamma R(theta_k, gamma)       (`aggregate`; eq. 3)

with w_k = omega_k / sum_j omega_j. For the prior N(gamma, sigma^2 I) (eq. 6) and lambda = sigma^2 the last is
gamma <- sum_k w_k theta_k (eq. 9). With exact local minimisers eq. 3 is gradient descent on the envelope M(gamma)
(Theorem 1; tested for every prior). A client starts from its own theta_k of the round before (from gamma the first
time) and deploys theta_k. The prior covers trained parameters only; buffers follow theta_k and are averaged by w_k.

Deviations, all options:
- `prior`: `gaussian` (eq. 6, default); `gaussian-learned` has gamma = (mu, s) and a variance s + c of its own for each
  parameter (eqs. 18, 21 and Lemma 1; as there without the normalising constant, so that only epsilon bounds s), sigma^2
  at first, s kept above -c; `laplace` and `student-t` are future work of the paper. Laplace's tip is rounded (tau), as
  Theorem 1 asks for a slope everywhere. Student's t is not convex, which it asks for too; its sigma^2 is scale^2.
- `prior_lr`: lambda is a number, as in eq. 3, or `natural` (default), a step size for each parameter: eq. 9 and what
  corresponds to it for the other priors (`Prior.natural`). An aggregation takes `prior_steps` such steps, one in eq. 3.
- `likelihood`: the paper writes L as a sum over the examples in eq. 2 and as their mean in eq. 7, which differ by a
  factor N_k in the strength of the prior. `mean` (default) is eq. 7 and what the authors' code trains; `sum` is eq. 2.
  The same L is used in eq. 8. With `sum`, omega is so small (1e-40 to 1e-400) that it only exists as a logarithm and
  the weights are nearly one-hot; with `mean` they are nearly uniform.
- `weighting`: `omega` (default) is eq. 8; `samples` weighs by N_k, as A.4 and the authors' published code do; `uniform`
  weighs all alike. Terms of R without theta, the same for all clients, are left out of omega.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.local import Adam, Optimizer, mean_loss, train
from coterie.method import Info, Method, Population
from coterie.priors import Family, Gamma, Prior, Rate, make, overweight
from coterie.task import Task
from coterie.tree import Params


class Server(NamedTuple):
    gamma: Params  # the prior's centre (mu of eq. 18), and the buffers' mean
    s: Params  # s of eq. 18 for the trained parameters; empty unless the prior learns variances
    weight: Tensor  # [population]; w_k of the last round, 0 for those who took no part


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


class Up(NamedTuple):
    theta: Params  # what the prior covers
    log_weight: Tensor  # []
    buffers: Params = {}  # noqa: RUF012


@dataclass(frozen=True)
class FedMAP(Method[Server, Client, Gamma, Up]):
    learns_from: ClassVar[str] = "all clients, through the prior that their models make by the weights below"
    optimizer: Optimizer = Adam(lr=1e-4)
    prior: Annotated[Family, Field(description="family of the prior on the clients' models")] = "gaussian"
    sigma2: Annotated[float, Field(gt=0, description="variance of the prior; small pulls to gamma")] = 15.0
    weighting: Annotated[Literal["omega", "samples", "uniform"], Field(description="what a client weighs in gamma")] = (
        "omega"
    )
    likelihood: Annotated[Literal["mean", "sum"], Field(description="L of eq. 7 (mean) or eq. 2 (sum)")] = "mean"
    prior_lr: Annotated[Rate, Field(description="lambda of eq. 3, the step size of the prior")] = "natural"
    prior_steps: Annotated[int, Field(ge=1, description="gradient steps on the prior in an aggregation")] = 1
    c: Annotated[float, Field(gt=0, description="gaussian-learned: variance s + c")] = 1.0
    epsilon: Annotated[float, Field(gt=0, description="gaussian-learned: draws mu and s to 0")] = 1e-4
    tau: Annotated[float, Field(gt=0, description="laplace: width of the rounded tip over the scale b")] = 0.01
    nu: Annotated[float, Field(gt=0, description="student-t: degrees of freedom")] = 4.0

    implausible = overweight
    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = tuple(
        {"prior": prior} for prior in ("gaussian-learned", "laplace", "student-t")
    )

    def init_server(self, params: Params, population: Population) -> Server:
        trained = params if population.task is None else population.task.split(params)[0]
        return Server(params, self._rho.spread(trained), torch.zeros(population.size))

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Gamma:
        return tree.broadcast(Gamma(server.gamma, server.s), len(ids))

    def local_update(self, task: Task, client: Client, down: Gamma, batches: Batches) -> tuple[Client, Up, Info]:
        # Training divides the objective by N_k: the mean loss, and the prior over `scale` examples.
        scale = batches.count if self.likelihood == "sum" else torch.ones(())
        start, anchor = self._theta(client, down), (down, 1 / scale)
        theta, loss = train(task, self.optimizer, start, batches, self._rho.penalty, anchor)
        trained, buffers = task.split(theta)
        prior = self._rho.R(trained, down)
        log_weight = {
            "omega": -scale * mean_loss(task, theta, batches.epoch(0)) - prior,
            "samples": batches.count.log(),
            "uniform": torch.zeros(()),
        }[self.weighting]
        return Client(theta, client.rounds + 1), Up(trained, log_weight, buffers), {"loss": loss, "prior": prior}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        weight = torch.softmax(tree.wide(ups.log_weight), 0).float()
        gamma = Gamma(*({name: part[name] for name in ups.theta if part} for part in (server.gamma, server.s)))
        gamma = self._rho.descend(gamma, ups.theta, weight, self.prior_lr, self.prior_steps)
        new = {**gamma.mu, **tree.mean(ups.buffers, weight)}
        return Server(
            {name: new[name] for name in server.gamma},
            {**server.s, **gamma.s},
            torch.zeros_like(server.weight).index_copy(0, ids, weight),
        )

    def personalize(self, task: Task, client: Client, down: Gamma, batches: Batches) -> Params:
        return self._theta(client, down)

    def server_info(self, server: Server) -> Info:
        return {"weight": server.weight}

    @property
    def _rho(self) -> Prior:
        return make(self.prior, self.sigma2, self.c, self.epsilon, self.tau, self.nu)

    def _theta(self, client: Client, down: Gamma) -> Params:
        return tree.where(client.rounds > 0, client.theta, down.mu)
