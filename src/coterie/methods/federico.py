"""FedeRiCo (Sui et al., "Find Your Friends: Personalized Federated Learning with the Right Collaborators", 2022).

Client i's data comes from a mixture of all clients' models phi_j. Expectation maximisation, one step a round; with
l_ij = tau * (mean loss of phi_j on D_i), tracked over rounds as Lhat_ij:

    B_i  <- M clients: with probability epsilon at random, else the best     (`dispatch`; section 3.3, Alg. 1 line 7)
    Lhat <- (1 - beta) Lhat + beta l, or Lhat + l                            (`collaborators.track`; line 15, eq. 24)
    w_ij  = softmax_j(-Lhat_ij)                                              (`collaborators.posterior`; eq. 3, line 16)
    g_ji  = w_ij grad_phi_j (mean loss on D_i), sent to the owner j          (`local_update`; eq. 5, line 20)
    phi_j <- phi_j - eta sum_i g_ji, or any optimiser's step                 (`aggregate`; eq. 6, 8, line 25)
    predict with sum_j w_ij softmax(h_phi_j(x)); its logarithm is returned   (`predict`; after eq. 6)

Deviations:
- `temperature`: the paper's sum over n_i examples makes w one-hot in a few rounds, on arbitrary clients; tau = 3 to 10
  finds similar ones. `count` is the letter, tau = n_i; g is a sum over examples then too (take a smaller step size).
- Client i is always in B_i, so that M = 0 is local training; `all-to-all` (section 3.2) has everybody in it. All phi
  start equal, and all-to-all EM would keep them so: a model is offered once its owner has taken part.
- The paper's Lhat = 0 at the start gives clients never visited the largest weight. Here they have none, though the
  greedy choice still takes them first; Lhat_ij then starts level with the client's own Lhat_ii.
- A model with less total weight than `idle_below` makes no step: Adam would make a full one of any gradient.
- `local_work` = `epochs` (default; line 19, "multiple gradient steps"): each model used is trained on all minibatches,
  g_ji is w_ij times the way it went, and the owner goes sum_i g_ji / max(1, sum_i w_ij); buffers always move like that.
  `gradient` is the equations above: one step a round, whatever the epochs. Newcomers: see `collaborators.join`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie import collaborators, tree
from coterie.batches import Batches
from coterie.collaborators import Losses, Mixture, Positive, Steps
from coterie.local import Adam, Optimizer, mean_loss
from coterie.method import Info, Method, Population
from coterie.task import Task
from coterie.tree import Params, Tree


class Server(NamedTuple):
    models: Params  # [N, ...]; phi
    optimizer: Tree  # [N, ...]; the state of each owner's optimiser
    losses: Losses  # [N, N]
    heard: Tensor  # [N]; bool, who has taken part
    keys: Tensor  # [N]


class Down(NamedTuple):
    models: Params  # [K, ...]; the client's own first
    owners: Tensor  # [K]
    used: Tensor  # [K]; bool
    losses: Losses  # [N]


class Up(NamedTuple):
    own: Params  # phi_i as it was, for peers that have not heard all that changed it
    steps: Steps  # [K, ...]; g_ji
    losses: Losses  # [N]


@dataclass(frozen=True)
class FedeRiCo(Method[Server, tuple[()], Down, Up]):
    optimizer: Optimizer = Adam(lr=0.01)
    mode: Annotated[Literal["sampled", "all-to-all"], Field(description="whose models a client gets")] = "sampled"
    neighbours: Annotated[int, Field(ge=0, description="M, others' models a client and round (sampled)")] = 3
    epsilon: Annotated[float, Field(ge=0, le=1, description="chance of choosing neighbours at random (sampled)")] = 0.3
    loss_tracking: Annotated[Literal["ema", "accumulated"], Field(description="how losses add up over rounds")] = "ema"
    beta: Annotated[float, Field(gt=0, le=1, description="weight of the new loss (ema)")] = 0.6
    temperature: Annotated[Literal["count"] | Positive, Field(description="tau, large is choosy; count: n_i")] = 5.0
    local_work: Annotated[Literal["gradient", "epochs"], Field(description="one gradient, or training")] = "epochs"
    idle_below: Annotated[float, Field(ge=0, description="total weight below which a model makes no step")] = 1e-3
    prune_below: Annotated[float, Field(ge=0, lt=1, description="weight below which a model is not deployed")] = 0.01
    law_contexts: ClassVar = ({"neighbours": 1, "epsilon": 0.45, "idle_below": 1.0, "prune_below": 0.25},)
    onboard, implausible = collaborators.join, collaborators.implausible

    def init_server(self, params: Params, population: Population) -> Server:
        size, task = population.size, population.task
        state = self.optimizer.init(params if task is None else task.split(params)[0])
        models, states = tree.clone(tree.broadcast((params, state), size))
        never = torch.zeros(size, size, dtype=torch.bool)
        keys = torch.arange(size) if population.keys is None else population.keys
        return Server(models, states, Losses(never.float(), never.float(), never), never[0], keys)

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        score = collaborators.epsilon_greedy(tree.rows(server.losses, ids), self.epsilon, rng, ids, server.keys)
        return self._send(server, ids, score, server.heard.expand(len(ids), -1))

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        return self._send(server, ids, -tree.wide(server.losses.tracked[ids]), server.losses.visited[ids])

    def local_update(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> tuple[tuple[()], Up, Info]:
        tau = batches.count if isinstance(self.temperature, str) else torch.tensor(self.temperature)
        loss = vmap(lambda phi: mean_loss(task, phi, batches.epoch(0)))(down.models)  # [K]
        whose = (down.owners[:, None] == torch.arange(len(down.losses.last))) & down.used[:, None]  # [K, N]
        losses = collaborators.track(down.losses, whose, tau * loss, self.beta if self.loss_tracking == "ema" else None)
        w = collaborators.posterior(losses.tracked, losses.visited)  # [N]
        optimizer = self.optimizer if self.local_work == "epochs" else None
        times = tau if self.temperature == "count" and optimizer is None else torch.ones(())
        steps = collaborators.contribute(task, optimizer, down.models, down.owners, (whose * w).sum(1), times, batches)
        info = {"loss": loss[0], "collaborators": torch.special.entr(w).sum().exp()}
        return (), Up(tree.rows(down.models, 0), steps, losses), info

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        optimizer = self.optimizer if self.local_work == "gradient" else None
        models, losses = tree.put((server.models, server.losses), ids, (ups.own, ups.losses))
        stepped = collaborators.step_owners(optimizer, models, server.optimizer, ups.steps, self.idle_below)
        return Server(*stepped, losses, server.heard.index_fill(0, ids, True), server.keys)

    def personalize(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> Mixture:
        of = tree.rows(down.losses, down.owners)
        allowed = (of.visited & down.used) | (down.owners == down.owners[0])
        return collaborators.mixture(down.models, of.tracked, allowed, self.prune_below)

    def predict(self, task: Task, view: Mixture, x: Tensor) -> Tensor:
        return collaborators.predict_together(task, view, x)

    def server_info(self, server: Server) -> Info:
        itself = torch.eye(len(server.keys), dtype=torch.bool)
        return {"collaboration": collaborators.posterior(server.losses.tracked, server.losses.visited | itself)}

    def _send(self, server: Server, ids: Tensor, score: Tensor, allowed: Tensor) -> Down:
        number = len(server.keys) if self.mode == "all-to-all" else min(self.neighbours + 1, len(server.keys))
        owners, used = collaborators.choose(score, allowed, ids, number)
        return Down(tree.rows(server.models, owners), owners, used, tree.rows(server.losses, ids))
