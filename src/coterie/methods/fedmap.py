"""FedMAP ("FedMAP: Unlocking Potential in Personalized Federated Learning through Bi-Level MAP Optimization", 2024).

The global model is a prior rho_gamma on the clients' models, R(theta, gamma) = -log rho_gamma(theta) (`priors.py`):

    theta_k <- argmin  L(theta; Z_k) + R(theta, gamma)                     (`local_update`; eqs. 2, 7)
    log omega_k = -L(theta_k; Z_k) - R(theta_k, gamma)                     (`local_update`; eq. 8)
    gamma   <- gamma - lambda sum_k w_k grad_gamma R(theta_k, gamma)       (`aggregate`; eq. 3)

with weights w_k that add up to 1, N_k / N or omega_k / sum_j omega_j. For the prior N(gamma, sigma^2 I) (eq. 6) and
lambda = sigma^2, the last line is gamma <- sum_k w_k theta_k (eq. 9). With exact local minimisers, eq. 3 is gradient
descent on the envelope M(gamma) (Theorem 1; tested for every prior). A client deploys theta_k. The prior covers trained
parameters only; buffers follow theta_k and are averaged by w_k.

Choices, all of them options:
- `start`: where a client begins to look for the minimum of eq. 7, which for a network is not the only one. `own` is
  its theta_k of the round before (gamma the first time), as in Algorithm 2; the settings of the paper's tables have it.
  A few steps from there reach only what is near theta_k, however much better the others' gamma is. `better` (default)
  begins at theta_k or gamma, whichever has the smaller L + R on the client's training examples (`_start`). Where
  clients' data differ much, that is theta_k, and the two are the same.
- `sigma2`: a number is eq. 7's sigma^2, the same for all clients (15 in the authors' code and in the settings of the
  paper's tables). Such a number is right for one network and schedule only: 15 does nothing in a short run on a hundred
  rows, and 1 holds the paper's own clients at their start. `auto` (default) asks instead that in one round the prior
  takes back the share `pull` of a client's way from gamma. K steps of size eta on R alone shrink theta - gamma by
  (1 - eta / sigma^2)^K, about exp(-eta K / sigma^2), so client k has

      sigma_k^2 = eta K_k / pull                                                (`pulls.pull_of_a_round`)

  with its own number of steps K_k. With epochs of minibatches K_k grows with N_k: minimising (sigma_k^2 / v) L_k + R
  with one variance v for all is eq. 2, whose L is a sum over N_k examples, and Theorem 1 holds with it. In the paper's
  label-skew setting it is about 36; a `pull` of 0.24 gives the authors' 15 there.
- `prior`: `gaussian` (default) is eq. 6. `gaussian-learned` has gamma = (mu, s) and a separate variance s + c for each
  parameter (eqs. 18, 21 and Lemma 1). It is sigma^2 until the first aggregation, and from then on what the clients'
  distances make of it; s is kept above -c. As in the paper, its normalising constant is left out, so that only epsilon
  bounds s. `laplace` and `student-t` are future work of the paper. Laplace's tip is rounded (tau), since Theorem 1
  needs a slope everywhere. Theorem 1 needs convexity too, which Student's t does not have; its sigma^2 is scale^2. With
  `sigma2` auto, the shapes of the last three are in units of the clients' typical squared distance u from gamma, as the
  server saw it in the last round (1 at first, where all are Gaussian): R_k = (u / sigma_k^2) R(t / u). M then changes
  with u from round to round, so Theorem 1 holds for one round at a time. `priors.py` says why, and
  what `c` and `epsilon` are if they are auto.
- `prior_lr`: lambda is a number, as in eq. 3, or `natural` (default), a step size for each parameter, which is eq. 9
  and what corresponds to it for the other priors (`Prior.natural_step_sizes`). An aggregation takes `prior_steps` such
  steps; eq. 3 takes one.
- `likelihood`: the paper writes L as a sum over the examples in eq. 2 and as their mean in eq. 7, which differ by a
  factor N_k in the strength of the prior. `mean` (default) is eq. 7 and what the authors' code trains; `sum` is eq. 2.
  The same L is used in eq. 8; if `sigma2` is auto, the choice matters there only. With `sum`, omega is so small (1e-40
  to 1e-400) that it exists only as a logarithm, and weights are nearly one-hot; with `mean` they are nearly uniform.
- `weighting`: section 2.2 leaves the weights w_k open. `samples` (default) is N_k / N, as in A.4 and in the authors'
  published code. `omega` is eq. 8, and the settings of the paper's tables have it. Beware of it where sites are small:
  one that fits its only example has L = 0 and so the largest omega of all (0.56 in A.4, for one example of 116). If a
  weight is more than ten times N_k / N, a warning says so once. `uniform` gives all clients the same weight. Terms of R
  without theta, which are the same for all clients, are left out of omega.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.errors import CoterieWarning
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import Adam, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import mean_loss, train
from coterie.core.tree import Params
from coterie.parts import pulls
from coterie.parts.priors import Family, Gamma, Prior, Rate, Scale, make_prior, typical_distance

FAR_TOO_HEAVY = 10  # a weight of this many times N_k / N is told
LOG_WEIGHT_ROUNDING = 0.01  # a log-weight is a sum of very many terms, so it may exceed its bound by this much


class Server(NamedTuple):
    gamma: Params  # the prior's centre (mu of eq. 18), and the mean of the buffers
    s: Params  # s of eq. 18 for the trained parameters; empty unless the prior learns variances
    weight: Tensor  # [population]; w_k of the last round, 0 for clients that took no part in it
    unit: Tensor | tuple[()]  # []; the clients' typical squared distance from gamma; () where R has no use for it
    warned: Tensor  # [] bool; whether the warning about weights has been given


class Client(NamedTuple):
    theta: Params
    rounds: Tensor  # []; rounds taken part in


class Up(NamedTuple):
    theta: Params  # the trained parameters, which the prior covers
    log_weight: Tensor  # []; log w_k up to a constant: log N_k, log omega_k or 0
    buffers: Params = {}  # noqa: RUF012
    count: Tensor | tuple[()] = ()  # type: ignore[assignment]  # []; N_k, which only the warning about omega needs


@dataclass(frozen=True)
class FedMAP(Method[Server, Client, Gamma, Up]):
    learns_from: ClassVar[str] = "all clients, through the prior that their models make by the weights below"

    optimizer: Optimizer = Adam(lr=1e-4)
    prior: Annotated[Family, UNSEARCHED, Field(description="family of the prior on the clients' models")] = "gaussian"
    sigma2: Annotated[Scale, Field(description="variance of the prior; small pulls to gamma; auto: by `pull`")] = "auto"
    pull: Annotated[
        float, Search(1e-2, 1), Field(gt=0, description="sigma2 auto: share of the way from gamma taken back a round")
    ] = pulls.HELD_BACK
    start: Annotated[
        Literal["better", "own"], Field(description="where training begins: own model, or gamma if better")
    ] = "better"
    weighting: Annotated[
        Literal["omega", "samples", "uniform"], UNSEARCHED, Field(description="what a client weighs in gamma")
    ] = "samples"
    likelihood: Annotated[Literal["mean", "sum"], UNSEARCHED, Field(description="L of eq. 7 (mean) or eq. 2 (sum)")] = (
        "mean"
    )
    prior_lr: Annotated[Rate, Field(description="lambda of eq. 3, the step size of the prior")] = "natural"
    prior_steps: Annotated[int, Field(ge=1, description="gradient steps on the prior in an aggregation")] = 1
    c: Annotated[Scale, Field(description="gaussian-learned: variance s + c; auto: sigma2")] = "auto"
    epsilon: Annotated[Scale, Field(description="gaussian-learned: draws mu and s to 0; auto: by sigma2")] = "auto"
    tau: Annotated[float, Field(gt=0, description="laplace: width of the rounded tip over the scale b")] = 2.0
    nu: Annotated[float, Field(gt=0, description="student-t: degrees of freedom")] = 4.0

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prior": "gaussian-learned"},
        {"prior": "laplace"},
        {"prior": "student-t"},
        {"weighting": "omega"},
    )

    @property
    def averaged(self) -> tuple[str, ...]:
        return ("theta", "buffers") if self.prior == "gaussian" else ()  # others learn from the spread, too

    @property
    def stepped(self) -> tuple[str, ...]:
        return ("gamma",)

    @property
    def beyond_sums(self) -> str:
        if self.weighting == "omega" and self.likelihood == "sum":
            return "omega of a sum of losses is too small for sums in fixed point: use likelihood = mean"
        return ""

    def largest_weight(self, examples: int) -> float:
        return float(examples) if self.weighting == "samples" else 1.0  # omega is at most 1

    def init_server(self, params: Params, population: Population) -> Server:
        trained = params if population.task is None else population.task.split(params)[0]
        unit = torch.ones(()) if self.sigma2 == "auto" and self.prior != "gaussian" else ()
        weight = torch.zeros(population.size)
        return Server(params, self._rho.initial_spread(trained), weight, unit, torch.zeros((), dtype=torch.bool))

    def init_client(self, params: Params) -> Client:
        return Client(params, torch.zeros((), dtype=torch.int64))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Gamma:
        return tree.broadcast(Gamma(server.gamma, server.s, server.unit), len(ids))

    def local_update(self, task: Task, client: Client, down: Gamma, batches: Batches) -> tuple[Client, Up, Info]:
        # L is `scale` times the mean loss. Training minimises L + R over `scale`: the mean loss and `strength` R.
        scale = batches.count if self.likelihood == "sum" else torch.ones(())
        own = _own_theta(client, down)
        if self.sigma2 == "auto":
            unit = down.unit if isinstance(down.unit, Tensor) else torch.ones(())
            strength = unit * pulls.pull_of_a_round(self.optimizer, self.pull, task.split(own)[0], batches)
        else:
            strength = 1 / scale
        start = self._start(task, own, down, strength, batches) if self.start == "better" else own
        theta, loss = train(task, self.optimizer, start, batches, self._rho.penalty, (down, strength))
        trained, buffers = task.split(task.sent(theta))
        prior = scale * strength * self._rho.R(trained, down)
        if self.weighting == "omega":
            log_weight = -scale * mean_loss(task, theta, batches.once(), self.optimizer.guard) - prior
        elif self.weighting == "samples":
            log_weight = batches.count.log()
        else:
            log_weight = torch.zeros(())
        up = Up(trained, log_weight, buffers, batches.count if self.weighting == "omega" else ())
        return Client(theta, client.rounds + 1), up, {"loss": loss, "prior": prior}

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        weight = torch.softmax(tree.widest_float(ups.log_weight), 0).float()
        mu = {name: server.gamma[name] for name in ups.theta}
        s = {name: server.s[name] for name in ups.theta} if server.s else {}
        new = self._rho.descend(Gamma(mu, s, server.unit), ups.theta, weight, self.prior_lr, self.prior_steps)
        unit = server.unit
        if isinstance(unit, Tensor):
            seen = typical_distance(mu, ups.theta, weight)
            unit = torch.where(seen > 0, seen, unit)  # clients that did not move say nothing
        return Server(
            {**server.gamma, **new.mu, **tree.mean(ups.buffers, weight)},
            {**server.s, **new.s},
            torch.zeros_like(server.weight).index_copy(0, ids, weight),
            unit,
            self._warn(server.warned, ids, weight, ups.count),
        )

    def personalize(self, task: Task, client: Client, down: Gamma, batches: Batches) -> Params:
        return _own_theta(client, down)

    def implausible(self, up: Up, examples: int) -> str | None:
        if isinstance(up.count, Tensor) and not 0 < float(up.count) <= examples:
            return f"'count' counts {float(up.count):g} examples of {examples} declared"
        # Neither L nor R is below 0, so omega is at most 1.
        most = math.log(examples) if self.weighting == "samples" else 0.0
        claimed = float(up.log_weight)
        if claimed > most + LOG_WEIGHT_ROUNDING:
            return f"a log-weight of {claimed:g}, where at most {most:g} is possible"
        return None

    def server_info(self, server: Server) -> Info:
        return {"weight": server.weight}

    def _warn(self, warned: Tensor, ids: Tensor, weight: Tensor, count: Tensor | tuple[()]) -> Tensor:
        """Warn once if omega makes far more of a client than its examples do; return whether that was said."""
        if not isinstance(count, Tensor):
            return warned
        excess = weight * count.sum() / count
        heavy = (excess > FAR_TOO_HEAVY).any()
        if heavy and not warned:
            worst = excess.argmax()
            warnings.warn(
                f"client number {int(ids[worst])} with {float(count[worst]):g} of {float(count.sum()):g} examples has "
                f"the weight {float(weight[worst]):.2g} in FedMAP's prior: omega is large where a few examples are "
                "easy to fit; --weighting samples weighs by their number (this is said once)",
                CoterieWarning,
                stacklevel=2,
            )
        return warned | heavy

    def _start(self, task: Task, own: Params, down: Gamma, strength: Tensor, batches: Batches) -> Params:
        """Return `own` or gamma's centre, whichever has the smaller objective on the client's training examples."""
        epoch, prior = batches.once(), strength * self._rho.R(task.split(own)[0], down)
        guard = self.optimizer.guard
        nearer = mean_loss(task, down.mu, epoch, guard, 1) < mean_loss(task, own, epoch, guard, 2) + prior
        return tree.where(nearer, down.mu, own)

    @property
    def pull_option(self) -> str:
        return "pull" if self.sigma2 == "auto" else "1/sigma2"

    @property
    def _rho(self) -> Prior:
        sigma2 = 1.0 if self.sigma2 == "auto" else self.sigma2
        return make_prior(self.prior, sigma2, self.c, self.epsilon, self.tau, self.nu)


def _own_theta(client: Client, down: Gamma) -> Params:
    """Return theta_k, or the centre of the prior if the client has not taken part before."""
    return tree.where(client.rounds > 0, client.theta, down.mu)
