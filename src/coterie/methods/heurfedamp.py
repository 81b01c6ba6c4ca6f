"""HeurFedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, section 6).

FedAMP with weights from cosines, meant for deep networks, where Euclidean distances say little. In round k:

    xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j)),  xi_ii a hyper-parameter   (`_xi`; eq. 8)
    u_i   = sum_j xi_ij w_j                                                          (`dispatch`; eq. 5)
    w_i  <- argmin_w  F_i(w) + lambda / (2 alpha_k) ||w - u_i||^2                     (`local_update`; eq. 6)

alpha_k and lambda enter by their ratio only, the `pull`; `theorem` is sqrt(K), from alpha_k = lambda / sqrt(K).

Deviations:
- Alg. 1 draws an initial model for each client; the cosines of such models are all near 0, so all start from one.
- sigma is a number or (default) each round's `contrast` / median(1 - cos(w_i, w_j)). From one initial model, cosines
  differ by 1e-5 to 1e-2: a sigma that tells clients apart depends on model and data.
- The self-attention xi_ii is a number or (default) 1/m, so that equal models have equal weights.
- A client trains on from its own w_i ("personalized training on model M(w_i)"), by minibatch steps, not to the minimum.
- Clients that take no part in a round count with their last upload, those never heard not at all.
- Of very many clients, each may attend to its `neighbours` only, the k most like it so far (`coterie.neighbours`).
Only trained parameters are sent and compared: buffers (and frozen weights) stay the client's own. It deploys w_i.
A newcomer begins at the mean of all w_j; its own row of xi then gives its u_i (`attention.join`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from coterie.attention import join, middle
from coterie.batches import Batches
from coterie.local import SGD, Optimizer, quadratic, train
from coterie.method import Info, Method, Newcomer, Population
from coterie.neighbours import COSINE, Neighbours, begin, send, shown, weigh
from coterie.task import Task
from coterie.tree import Params

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Server(NamedTuple):
    w: Any  # rows of the population; last uploads, before them the initial model
    heard: Tensor  # [population]
    xi: Any  # [population, population], or of the neighbours


@dataclass(frozen=True)
class HeurFedAMP(Method[Server, Params, Params, Params]):
    learns_from: ClassVar[str] = "the clients whose models are most like its own"
    optimizer: Optimizer = SGD()
    sigma: Annotated[Literal["auto"] | Positive, Field(description="scale of the cosines in eq. 8")] = "auto"
    contrast: Annotated[float, Field(gt=0, description="sigma auto: this over the median of 1 - cos")] = 2.0
    self_attention: Annotated[Literal["auto"] | Share, Field(description="xi_ii of eq. 8; auto: 1/m")] = "auto"
    pull: Annotated[Literal["theorem"] | Positive, Field(description="lambda / alpha_k of eq. 6")] = 1.0
    total_rounds: Annotated[int, Field(ge=1, description="K, for pull theorem")] = 20
    neighbours: Annotated[Neighbours, Field(description="how many others each attends to at most")] = "all"

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"pull": "theorem"},)

    def init_server(self, params: Params, population: Population) -> Server:
        return Server(*begin(params, population, self.neighbours))

    def init_client(self, params: Params) -> Params:
        return params  # w_i

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return send(server, ids)

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return {}  # a view is the client's own model: nothing is sent for it

    def local_update(self, task: Task, client: Params, down: Params, batches: Batches) -> tuple[Params, Params, Info]:
        pull = math.sqrt(self.total_rounds) if isinstance(self.pull, str) else self.pull
        anchor = (down, torch.tensor(pull))
        w, loss = train(task, self.optimizer, client, batches, quadratic, anchor)
        return w, task.split(w)[0], {"loss": loss}

    def aggregate(self, server: Server, ids: Tensor, ups: Params) -> Server:
        return Server(*weigh(server, ids, ups, COSINE, self._xi))

    def personalize(self, task: Task, client: Params, down: Params, batches: Batches) -> Params:
        return client

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Params | None) -> Newcomer:
        return join(self.aggregate, newcomer, ids, ups)

    def server_info(self, server: Server) -> Info:
        return shown(server.xi)

    def _xi(self, cosine: Tensor, attends: Tensor, pairs: Tensor) -> tuple[Tensor, ...]:
        count = attends.sum(1, keepdim=True)  # [clients, 1]; m - 1 once all were heard
        sigma = self.contrast / middle((1 - pairs).clamp_min(0)) if self.sigma == "auto" else self.sigma
        own = 1 / (count + 1) if isinstance(self.self_attention, str) else self.self_attention
        # The softmax subtracts the maximum; where there is nobody to attend to it is NaN, and not used.
        share = torch.softmax((sigma * cosine).masked_fill(~attends, -torch.inf), 1)
        return (torch.where(attends, (1 - own) * share, 0.0),)
