"""FedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021).

Minimise  sum_i F_i(w_i) + lambda A(W),  A(W) = sum_{i<j} A(||w_i - w_j||^2)  (eq. 1) by turns, in round k:

    xi_ij = alpha_k A'(||w_i - w_j||^2),  xi_ii = 1 - sum_{j != i} xi_ij              (`_xi`; eq. 7)
    u_i   = sum_j xi_ij w_j                                                          (`dispatch`; eq. 5)
    w_i  <- argmin_w  F_i(w) + lambda / (2 alpha_k) ||w - u_i||^2                     (`local_update`; eq. 6)

The attention-inducing functions that the paper names, of s = ||w_i - w_j||^2 / sigma and a = `shape`. All are concave
and nondecreasing with A(0) = 0, and scaled so that A'(0) = 1/sigma (`_slope` is sigma A'):

    negative-exponential   A = 1 - exp(-s)                                              sigma A' = exp(-s)
    scad                   A = s;  from s = 1  (a s - s^2/2 - 1/2) / (a - 1);  from s = a  (a + 1) / 2
                                                                        sigma A' = min(1, (a - s)_+ / (a - 1))
    minimax-concave        A = s - s^2 / (2a);  from s = a  a/2                         sigma A' = (1 - s/a)_+

`alpha` is a number, `theorem` for lambda / sqrt(K) in all K rounds as in Theorems 1 and 2 (the pull lambda / alpha_k of
eq. 6 is then sqrt(K) whatever lambda is), or `auto` (default) for alpha_k = sigma / m: equal models then have equal
weights, as in FedAvg, and `lam` is lambda in units of alpha_k, the pull itself. Deviations:
- Eq. 5 drops the 2 of the gradient in eq. 3. We keep eq. 5: U = W - (alpha_k / 2) grad A(W), and lambda / 2 in eq. 1.
- Alg. 1 draws an initial model for each client; distances between such models say nothing, so all start from one.
- sigma is a number or (default) each round's median ||w_i - w_j||^2 over `contrast` (on digits, 1 was best for IID
  clients and 4 for clients in groups; 2, with the default A, was on neither worse than training alone).
- The paper wants xi >= 0, which alpha_k <= sigma / (m - 1) ensures. A larger alpha_k is lowered to that, and lambda
  with it, so that the pull stays what it was; a warning says so once.
- A client trains on from its own w_i ("personalized training on model M(w_i)"), by minibatch steps, not to the minimum.
- Clients that take no part in a round count with their last upload, those never heard not at all.
- Of very many clients, each may attend to its `neighbours` only, the k most like it so far (`coterie.neighbours`).
Only trained parameters are sent and compared: buffers (and frozen weights) stay the client's own. It deploys w_i.
A newcomer begins at the mean of all w_j; its own row of xi then gives its u_i (`attention.join`).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.attention import join, middle
from coterie.batches import Batches
from coterie.errors import CoterieWarning
from coterie.local import SGD, Optimizer, quadratic, train
from coterie.method import Info, Method, Newcomer, Population
from coterie.neighbours import DISTANCE, Neighbours, begin, send, shown, weigh
from coterie.task import Task
from coterie.tree import Params

Positive = Annotated[float, Field(gt=0)]
Function = Literal["negative-exponential", "scad", "minimax-concave"]


class Server(NamedTuple):
    w: Any  # rows of the population; last uploads, before them the initial model
    heard: Tensor  # [population]
    xi: Any  # [population, population], or of the neighbours
    warned: Tensor  # []; whether the guard on alpha_k has spoken


@dataclass(frozen=True)
class FedAMP(Method[Server, Params, Params, Params]):
    learns_from: ClassVar[str] = "the clients whose models are most like its own"
    optimizer: Optimizer = SGD()
    attention: Annotated[Function, Field(description="the function A of eq. 1")] = "negative-exponential"
    sigma: Annotated[Literal["auto"] | Positive, Field(description="squared distance at which A bends")] = "auto"
    contrast: Annotated[float, Field(gt=0, description="sigma auto: the median distance over this")] = 2.0
    alpha: Annotated[Literal["auto", "theorem"] | Positive, Field(description="step size of eq. 3")] = "auto"
    lam: Annotated[float, Field(gt=0, description="lambda of eq. 1; alpha auto: in units of alpha_k")] = 1.0
    total_rounds: Annotated[int, Field(ge=1, description="K, for alpha theorem")] = 20
    shape: Annotated[float, Field(gt=2, description="a of scad and minimax-concave")] = 3.7
    neighbours: Annotated[Neighbours, Field(description="how many others each attends to at most")] = "all"
    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"attention": "scad"}, {"alpha": "theorem", "sigma": 3.0})

    def init_server(self, params: Params, population: Population) -> Server:
        return Server(*begin(params, population, self.neighbours), torch.tensor(False))

    def init_client(self, params: Params) -> Params:
        return params  # w_i

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return send(server, ids)

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return {}  # a view is the client's own model: nothing is sent for it

    def local_update(self, task: Task, client: Params, down: Params, batches: Batches) -> tuple[Params, Params, Info]:
        w, loss = train(task, self.optimizer, client, batches, quadratic, (down, torch.tensor(self._pull)))
        return w, task.split(w)[0], {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Params) -> Server:
        return Server(*weigh(server, ids, ups, DISTANCE, partial(self._xi, server.warned)))

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return client

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Params | None) -> Newcomer:
        return join(self.aggregate, newcomer, ids, ups)

    def server_info(self, server: Server) -> Info:
        return shown(server.xi)

    @property
    def _pull(self) -> float:  # lambda / alpha_k
        if isinstance(self.alpha, str):
            return math.sqrt(self.total_rounds) if self.alpha == "theorem" else self.lam
        return self.lam / self.alpha

    def _xi(self, warned: Tensor, distance: Tensor, attends: Tensor, pairs: Tensor) -> tuple[Tensor, ...]:
        count = attends.sum(1, keepdim=True)  # [clients, 1]; m - 1 once all were heard
        sigma = middle(pairs) / self.contrast if self.sigma == "auto" else self.sigma
        alpha = sigma / (count + 1)
        if self.alpha != "auto":
            alpha = (most := sigma / count).clamp_max(self.lam / self._pull)
            warned = warned if bool(warned) else torch.tensor(_warn(self.lam / self._pull, float(most.min())))
        return torch.where(attends, alpha / sigma * self._slope(distance / sigma), 0.0), warned

    def _slope(self, s: Tensor) -> Tensor:
        if self.attention == "scad":
            return ((self.shape - s) / (self.shape - 1)).clamp(0, 1)
        return (1 - s / self.shape).clamp_min(0) if self.attention == "minimax-concave" else torch.exp(-s)


def _warn(alpha: float, most: float) -> bool:
    if alpha > most:
        words = f"alpha = {alpha:.3g} is above sigma / (m - 1) = {most:.3g}: the self-weight of equal models would be"
        warnings.warn(f"{words} 1 - alpha (m - 1) / sigma = {1 - alpha / most:.3g}; lowered.", CoterieWarning, 2)
    return alpha > most
