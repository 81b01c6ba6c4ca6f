"""FedMAP ("FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization", 2024).

The global model is a prior rho_gamma on the clients' models, R(theta, gamma) = -log rho_gamma(theta) (`priors.py`):

    theta_k <- argmin  L(theta; Z_k) + R(theta, gamma)                     (`local_update`; eqs. 2, 7)
    log omega_k = -L(theta_k; Z_k) - R(theta_k, gamma)                     (`local_update`; eq. 8)
    gamma   <- gamma - lambda sum_k w_k grad_gamma R(theta_k, gamma)       (`aggregate`; eq. 3)

with w_k = omega_k / sum_j omega_j. For the prior N(gamma, sigma^2 I) (eq. 6) and lambda = sigma^2, the last line is
gamma <- sum_k w_k theta_k (eq. 9). With exact local minimisers, eq. 3 is gradient descent on the envelope M(gamma)
(Theorem 1; tested for every prior). A client starts from its own theta_k of the round before (from gamma the first
time) and deploys theta_k. The prior covers trained parameters only; buffers follow theta_k and are averaged by w_k.

Deviations, all of them options:
- `prior`: `gaussian` (default) is eq. 6. `gaussian-learned` has gamma = (mu, s) and a separate variance s + c for each
  parameter (eqs. 18, 21 and Lemma 1), which is sigma^2 at first; s is kept above -c. As in the paper, its normalising
  constant is left out, so that only epsilon bounds s. `laplace` and `student-t` are future work of the paper. Laplace's
  tip is rounded (tau), since Theorem 1 needs a slope everywhere. Theorem 1 needs convexity too, which Student's t does
  not have; its sigma^2 is scale^2.
- `prior_lr`: lambda is a number, as in eq. 3, or `natural` (default), a step size for each parameter, which is eq. 9
  and what corresponds to it for the other priors (`Prior.natural_step_sizes`). An aggregation takes `prior_steps` such
  steps; eq. 3 takes one.
- `likelihood`: the paper writes L as a sum over the examples in eq. 2 and as their mean in eq. 7, which differ by a
  factor N_k in the strength of the prior. `mean` (default) is eq. 7 and what the authors' code trains; `sum` is eq. 2.
  The same L is used in eq. 8. With `sum`, omega is so small (1e-40 to 1e-400) that it exists only as a logarithm, and
  the weights are nearly one-hot; with `mean` they are nearly uniform.
- `weighting`: `omega` (default) is eq. 8; `samples` weighs by N_k, as A.4 and the authors' published code do; `uniform`
  gives all clients the same weight. Terms of R without theta, which are the same for all clients, are left out of
  omega.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import Adam, Optimizer
from coterie.core.task import Task
from coterie.core.training import mean_loss, train
from coterie.core.tree import Params
from coterie.parts.priors import Family, Gamma, Prior, Rate, make_prior

LOG_WEIGHT_ROUNDING = 0.01  # a log-weight is a sum of very many terms, so it may exceed its bound by this much


class Server(NamedTuple):
    gamma: Params  # the prior's centre (mu of eq. 18), and the mean of the buffers
    s: Params  # s of eq. 18 for the trained parameters; empty unless the prior learns variances
    weight: Tensor  # [population]; w_k of the last round, 0 for clients that took no part in it


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


class Up(NamedTuple):
    theta: Params  # the trained parameters, which the prior covers
    log_weight: Tensor  # []; log omega_k
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

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prior": "gaussian-learned"},
        {"prior": "laplace"},
        {"prior": "student-t"},
    )

    def init_server(self, params: Params, population: Population) -> Server:
        trained = params if population.task is None else population.task.split(params)[0]
        return Server(params, self._rho.initial_spread(trained), torch.zeros(population.size))

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Gamma:
        return tree.broadcast(Gamma(server.gamma, server.s), len(ids))

    def local_update(self, task: Task, client: Client, down: Gamma, batches: Batches) -> tuple[Client, Up, Info]:
        # L is `scale` times the mean loss. Training minimises L + R over `scale`: the mean loss and R / scale.
        scale = batches.count if self.likelihood == "sum" else torch.ones(())
        anchor = (down, 1 / scale)
        theta, loss = train(task, self.optimizer, _own_theta(client, down), batches, self._rho.penalty, anchor)
        trained, buffers = task.split(task.sent(theta))
        prior = self._rho.R(trained, down)
        if self.weighting == "omega":
            log_weight = -scale * mean_loss(task, theta, batches.epoch(0)) - prior
        elif self.weighting == "samples":
            log_weight = batches.count.log()
        else:
            log_weight = torch.zeros(())
        return Client(theta, client.rounds + 1), Up(trained, log_weight, buffers), {"loss": loss, "prior": prior}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        weight = torch.softmax(tree.widest_float(ups.log_weight), 0).float()
        mu = {name: server.gamma[name] for name in ups.theta}
        s = {name: server.s[name] for name in ups.theta} if server.s else {}
        new = self._rho.descend(Gamma(mu, s), ups.theta, weight, self.prior_lr, self.prior_steps)
        return Server(
            {**server.gamma, **new.mu, **tree.mean(ups.buffers, weight)},
            {**server.s, **new.s},
            torch.zeros_like(server.weight).index_copy(0, ids, weight),
        )

    def personalize(self, task: Task, client: Client, down: Gamma, batches: Batches) -> Params:
        return _own_theta(client, down)

    def implausible(self, up: Up, examples: int) -> str | None:
        # Neither L nor R is below 0, so omega is at most 1.
        most = math.log(examples) if self.weighting == "samples" else 0.0
        claimed = float(up.log_weight)
        if claimed > most + LOG_WEIGHT_ROUNDING:
            return f"a log-weight of {claimed:g}, where at most {most:g} is possible"
        return None

    def server_info(self, server: Server) -> Info:
        return {"weight": server.weight}

    @property
    def _rho(self) -> Prior:
        return make_prior(self.prior, self.sigma2, self.c, self.epsilon, self.tau, self.nu)


def _own_theta(client: Client, down: Gamma) -> Params:
    """Return theta_k, or the centre of the prior if the client has not taken part before."""
    return tree.where(client.rounds > 0, client.theta, down.mu)
