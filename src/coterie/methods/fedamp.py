"""FedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021).

FedAMP minimises  sum_i F_i(w_i) + lambda A(W),  A(W) = sum_{i<j} A(||w_i - w_j||^2)  (eq. 1), by turns. In round k:

    xi_ij = alpha_k A'(||w_i - w_j||^2),  xi_ii = 1 - sum_{j != i} xi_ij    (`_xi`; eq. 7)
    u_i   = sum_j xi_ij w_j                                             (`dispatch`; eq. 5)
    w_i  <- argmin_w  F_i(w) + lambda / (2 alpha_k) ||w - u_i||^2       (`cloud_models.pulled_update`; eq. 6)

The paper names three attention-inducing functions A, here written in s = ||w_i - w_j||^2 / sigma and a = `shape`. All
are concave and nondecreasing with A(0) = 0, and scaled so that A'(0) = 1/sigma (`_slope` is sigma A'):

    negative-exponential   A = 1 - exp(-s)                                              sigma A' = exp(-s)
    scad                   A = s;  from s = 1  (a s - s^2/2 - 1/2) / (a - 1);  from s = a  (a + 1) / 2
                                                                        sigma A' = min(1, (a - s)_+ / (a - 1))
    minimax-concave        A = s - s^2 / (2a);  from s = a  a/2                         sigma A' = (1 - s/a)_+

`alpha` is one of four:
- a number;
- `theorem` for lambda / sqrt(K) in all K rounds, as in the first halves of Theorems 1 and 2. The pull lambda / alpha_k
  of eq. 6 is then sqrt(K), whatever lambda is. K is the run's number of rounds, or `total_rounds`;
- `diminishing` for lambda / k^(1/2 + `decay`) in round k, with 0 < decay <= 1/2: sum alpha_k is infinite and
  sum alpha_k^2 finite, as in the second halves of Theorems 1 and 2. The pull is k^(1/2 + decay);
- `auto` (default) for alpha_k = sigma / m. Equal models then have equal weights, as in FedAvg, and `lam` is lambda in
  units of alpha_k, which is the pull itself; lam `auto` (default) is one that hardly slows a round down
  (`attention.gentle_pull`). With another alpha, lam `auto` is 1.

With sigma `auto`, A changes every round, and with alpha `auto` lambda does: neither eq. 1 nor the theorems describe the
default. They hold for a number sigma with alpha `theorem` or `diminishing`, and exact minimisers (tested).

Only trained parameters are sent and compared; buffers and frozen weights stay the client's own. Each client deploys
w_i. A newcomer begins at the mean of all w_j, and its own row of xi then gives its u_i (`cloud_models.onboard`).

`cap` below 1, which is not in the paper, lets no other client weigh more than that in u_i, however alike it is; what
it loses goes to w_i. A hostile client may imitate another's model.

Deviations:
- Eq. 5 drops the 2 of the gradient in eq. 3. We keep eq. 5, so that U = W - (alpha_k / 2) grad A(W), and lambda / 2
  stands in eq. 1.
- Alg. 1 draws an initial model for each client. Distances between such models say nothing, so all start from one model.
- sigma is a number or (default) each round's median ||w_i - w_j||^2 over `contrast`. With
  4, a client at that distance counts e^-4 of what one with an equal model does. On digits, smaller values were better
  for IID clients and worse for those with few labels. benchmarks/defaults.py says what the defaults gain.
- The paper wants xi >= 0, which alpha_k <= sigma / (m - 1) ensures. A larger alpha_k is lowered to that, and lambda
  with it, so that the pull stays what it was; a warning says so once.
- A client takes minibatch steps instead of going to the minimum of eq. 6, which does not depend on where they begin:
  `start` is `cloud` (default), at u_i, or `own`, at its own w_i ("personalized training on model M(w_i)"). From w_i
  only the pull brings u_i in, and one that is strong enough holds the client at the models of the round before: on
  digits, clients with a pull of 1 were far behind those that trained alone for the same 30 rounds.
- A client that takes no part in a round counts with its last upload, and one that never took part not at all.
- With very many clients, each may attend to its `neighbours` only, the k most like it so far (`parts/neighbours.py`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.batches import Batches
from coterie.core.errors import CoterieWarning
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import cloud_models
from coterie.parts.attention import gentle_pull, typical_value
from coterie.parts.neighbours import DISTANCE, Neighbours, combined_models, initial_state, update_attention

Positive = Annotated[float, Field(gt=0)]
Function = Literal["negative-exponential", "scad", "minimax-concave"]


class Server(NamedTuple):
    w: Any  # rows of the population; each client's last upload, and before it the initial model
    heard: Tensor  # [population] bool; who has sent a model so far
    xi: Any  # [population, population], or NearestClients
    warned: Tensor  # [] bool; whether the warning that alpha_k was lowered has been given
    rounds: Tensor  # [] int64; rounds done, k - 1


class Down(NamedTuple):
    u: Params
    k: Tensor  # []; the number of the round, from 1


@dataclass(frozen=True)
class FedAMP(Method[Server, Params, Any, Params]):
    learns_from: ClassVar[str] = "the clients whose models are most like its own"

    optimizer: Optimizer = SGD()
    attention: Annotated[Function, UNSEARCHED, Field(description="the function A of eq. 1")] = "negative-exponential"
    sigma: Annotated[Literal["auto"] | Positive, Field(description="squared distance at which A bends")] = "auto"
    contrast: Annotated[float, Search(1, 16), Field(gt=0, description="sigma auto: the median distance over this")] = (
        4.0
    )
    alpha: Annotated[Literal["auto", "theorem", "diminishing"] | Positive, Field(description="step size of eq. 3")] = (
        "auto"
    )
    lam: Annotated[
        Literal["auto"] | Positive, Field(description="lambda of eq. 1; alpha auto: in units of alpha_k")
    ] = "auto"
    start: Annotated[cloud_models.Start, UNSEARCHED, Field(description="where a client's steps begin: u_i or w_i")] = (
        "cloud"
    )
    total_rounds: Annotated[cloud_models.Rounds, Field(description="K, for alpha theorem; auto: rounds")] = "auto"
    decay: Annotated[
        float, UNSEARCHED, Field(gt=0, le=0.5, description="alpha diminishing: alpha_k is lambda / k^(1/2 + decay)")
    ] = 0.1
    shape: Annotated[float, Field(gt=2, description="a of scad and minimax-concave")] = 3.7
    neighbours: Annotated[Neighbours, Field(description="how many others each attends to at most")] = "all"
    cap: Annotated[float, Field(gt=0, le=1, description="most that one other client may weigh")] = 1.0

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"attention": "scad"},
        {"alpha": "theorem", "sigma": 3.0},
        {"alpha": "diminishing", "sigma": 3.0},
        {"contrast": 0.1, "cap": 0.1},
    )

    init_client, personalize, deploy = cloud_models.init_client, cloud_models.personalize, cloud_models.deploy
    onboard, server_info = cloud_models.onboard, cloud_models.server_info

    def scheduled(self, rounds: int) -> Self:
        return cloud_models.with_rounds(self, rounds) if self.alpha == "theorem" else self

    def init_server(self, params: Params, population: Population) -> Server:
        w, heard, xi = initial_state(params, population, self.neighbours)
        return Server(w, heard, xi, torch.tensor(False), torch.tensor(0))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        return Down(combined_models(server, ids), (server.rounds + 1).expand(len(ids)))

    def local_update(self, task: Task, client: Params, down: Down, batches: Batches) -> tuple[Params, Params, Info]:
        automatic = self.alpha == "auto" and self.lam == "auto"
        pull = gentle_pull(self.optimizer, batches) if automatic else self._pull(down.k).to(batches.mask.dtype)
        return cloud_models.pulled_update(task, self.optimizer, self.start, client, down.u, pull, batches)

    def aggregate(self, server: Server, ids: Tensor, ups: Params) -> Server:
        done = server.rounds + 1
        formula = partial(self._xi, server.warned, done + 1)
        w, heard, xi, warned = update_attention(server, ids, ups, DISTANCE, formula)
        return Server(w, heard, xi, warned, done)

    @property
    def _lambda(self) -> float:
        return 1.0 if isinstance(self.lam, str) else self.lam

    @property
    def pull_option(self) -> str:
        return "lam" if self.alpha == "auto" else "1/alpha"

    def _pull(self, k: Tensor) -> Tensor:
        """Return lambda / alpha_k of eq. 6 for round k, a scalar."""
        if self.alpha == "diminishing":
            return k.double() ** (0.5 + self.decay)
        if self.alpha == "theorem":
            return cloud_models.theorem_pull("alpha = theorem", self.total_rounds)
        return torch.tensor(self._lambda if isinstance(self.alpha, str) else self._lambda / self.alpha)

    def _xi(self, warned: Tensor, k: Tensor, distance: Tensor, attends: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return xi_ij [clients, others] of round k, and whether a warning was given: a `neighbours.WeightFormula`."""
        count = attends.sum(1, keepdim=True)  # [clients, 1]; m - 1 once all were heard
        sigma = typical_value(pairs) / self.contrast if self.sigma == "auto" else self.sigma
        if self.alpha == "auto":
            alpha = sigma / (count + 1)
        else:
            wanted, most = self._lambda / self._pull(k), sigma / count
            alpha = torch.minimum(most, wanted)
            if not bool(warned) and float(wanted) > float(most.min()):
                _warn_that_alpha_is_lowered(float(wanted), float(most.min()))
                warned = torch.tensor(True)
        xi = alpha / sigma * self._slope(distance / sigma)
        return torch.where(attends, xi, 0.0).clamp_max(self.cap), warned

    def _slope(self, s: Tensor) -> Tensor:
        """Return sigma A' at the distances s."""
        if self.attention == "scad":
            return ((self.shape - s) / (self.shape - 1)).clamp(0, 1)
        if self.attention == "minimax-concave":
            return (1 - s / self.shape).clamp_min(0)
        return torch.exp(-s)


def _warn_that_alpha_is_lowered(alpha: float, most: float) -> None:
    warnings.warn(
        f"alpha = {alpha:.3g} is above sigma / (m - 1) = {most:.3g}: the self-weight of equal models would be "
        f"1 - alpha (m - 1) / sigma = {1 - alpha / most:.3g}; lowered.",
        CoterieWarning,
        stacklevel=2,
    )
