"""HeurFedAMP (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, section 6).

HeurFedAMP is FedAMP with weights from cosines. It is meant for deep networks, where Euclidean distances say little. In
round k:

    xi_ij = (1 - xi_ii) softmax_{j != i}(sigma cos(w_i, w_j)),  xi_ii a number       (`_xi`; eq. 8)
    u_i   = sum_j xi_ij w_j                                                  (`dispatch`; eq. 5)
    w_i  <- argmin_w  F_i(w) + lambda / (2 alpha_k) ||w - u_i||^2            (`cloud_models.pulled_update`; eq. 6)

alpha_k and lambda enter only as their ratio, the `pull`: a number, `auto` (default) for one that hardly slows a round
down (`attention.gentle_pull`), or `theorem` for sqrt(K), which is FedAMP's alpha_k = lambda / sqrt(K). K is the run's
number of rounds, or `total_rounds`. No theorem of the paper is about eq. 8.

Only trained parameters are sent and compared; buffers and frozen weights stay the client's own. Each client deploys
w_i. A newcomer begins at the mean of all w_j, and its own row of xi then gives its u_i (`cloud_models.onboard`).

Deviations:
- Alg. 1 draws an initial model for each client. The cosines of such models are all near 0, so all start from one model.
- sigma is a number or (default) each round's `contrast` / median(1 - cos(w_i, w_j)). From one initial model, cosines
  differ by 1e-5 to 1e-2, so a sigma that tells clients apart depends on model and data.
- The self-attention xi_ii is a number or (default) 1 - (1/m) sum_{j != i} exp(-sigma (1 - cos(w_i, w_j))), which is
  FedAMP's with alpha_k = sigma / m for the distance 1 - cos. Equal models then have equal weights, and a client that
  is like nobody keeps its own model. (1/m for all held such clients far behind those that trained alone.)
- A client takes minibatch steps instead of going to the minimum of eq. 6, which does not depend on where they begin:
  `start` is `cloud` (default), at u_i, or `own`, at its own w_i; see FedAMP.
- A client that takes no part in a round counts with its last upload, and one that never took part not at all.
- With very many clients, each may attend to its `neighbours` only, the k most like it so far (`parts/neighbours.py`).
`cap`: see FedAMP; what others lose goes to xi_ii.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.parts import cloud_models
from coterie.parts.attention import gentle_pull, typical_value
from coterie.parts.neighbours import COSINE, Neighbours, combined_models, initial_state, update_attention

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Server(NamedTuple):
    w: Any  # rows of the population; each client's last upload, and before it the initial model
    heard: Tensor  # [population] bool; who has sent a model so far
    xi: Any  # [population, population], or NearestClients


@dataclass(frozen=True)
class HeurFedAMP(Method[Server, Params, Any, Params]):
    learns_from: ClassVar[str] = "the clients whose models are most like its own"

    optimizer: Optimizer = SGD()
    sigma: Annotated[Literal["auto"] | Positive, Field(description="scale of the cosines in eq. 8")] = "auto"
    contrast: Annotated[
        float, Search(1, 16), Field(gt=0, description="sigma auto: this over the median of 1 - cos")
    ] = 4.0
    self_attention: Annotated[Literal["auto"] | Share, Field(description="xi_ii of eq. 8; auto: FedAMP's")] = "auto"
    pull: Annotated[Literal["auto", "theorem"] | Positive, Field(description="lambda / alpha_k of eq. 6")] = "auto"
    start: Annotated[cloud_models.Start, UNSEARCHED, Field(description="where a client's steps begin: u_i or w_i")] = (
        "cloud"
    )
    total_rounds: Annotated[cloud_models.Rounds, Field(description="K, for pull theorem; auto: rounds")] = "auto"
    neighbours: Annotated[Neighbours, Field(description="how many others each attends to at most")] = "all"
    cap: Annotated[float, Field(gt=0, le=1, description="most that one other client may weigh")] = 1.0

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = ({"pull": "theorem"}, {"contrast": 0.1, "cap": 0.1})

    init_client, personalize, deploy = cloud_models.init_client, cloud_models.personalize, cloud_models.deploy
    onboard, server_info = cloud_models.onboard, cloud_models.server_info

    def scheduled(self, rounds: int) -> Self:
        return cloud_models.with_rounds(self, rounds) if self.pull == "theorem" else self

    def init_server(self, params: Params, population: Population) -> Server:
        return Server(*initial_state(params, population, self.neighbours))

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Params:
        return combined_models(server, ids)

    def local_update(self, task: Task, client: Params, down: Params, batches: Batches) -> tuple[Params, Params, Info]:
        pull = self._pull(batches)
        return cloud_models.pulled_update(task, self.optimizer, self.start, client, down, pull, batches)

    def aggregate(self, server: Server, ids: Tensor, ups: Params) -> Server:
        return Server(*update_attention(server, ids, ups, COSINE, self._xi))

    @property
    def pull_option(self) -> str:
        return "pull"

    def _pull(self, batches: Batches) -> Tensor:
        """Return lambda / alpha_k of eq. 6, a scalar."""
        if self.pull == "auto":
            return gentle_pull(self.optimizer, batches)
        if self.pull == "theorem":
            return cloud_models.theorem_pull("pull = theorem", self.total_rounds)
        return torch.tensor(self.pull)

    def _xi(self, cosine: Tensor, attends: Tensor, pairs: Tensor) -> tuple[Tensor]:
        """Return xi_ij [clients, others]; see `neighbours.WeightFormula`."""
        count = attends.sum(1, keepdim=True)  # [clients, 1]; m - 1 once all were heard
        sigma = self.contrast / typical_value((1 - pairs).clamp_min(0)) if self.sigma == "auto" else self.sigma
        if isinstance(self.self_attention, str):
            alike = torch.exp(-sigma * (1 - cosine).clamp_min(0))
            self_weight = 1 - torch.where(attends, alike, 0.0).sum(1, keepdim=True) / (count + 1)
        else:
            self_weight = torch.tensor(self.self_attention)
        # A client that has nobody to attend to gets NaN from the softmax, which is not used.
        share = torch.softmax((sigma * cosine).masked_fill(~attends, -torch.inf), 1)
        return (torch.where(attends, (1 - self_weight) * share, 0.0).clamp_max(self.cap),)
