"""FedeRiCo (Sui et al., "Find Your Friends: Personalized Federated Learning with the Right Collaborators", 2022).

Client i's data is taken to come from a mixture of all clients' models phi_j. Each round is one step of expectation
maximisation. With l_ij = tau * (mean loss of phi_j on D_i), tracked over rounds as Lhat_ij:

    B_i  <- M clients: with probability epsilon at random, else the best     (`dispatch`; section 3.3, Alg. 1 line 7)
    Lhat <- (1 - beta) Lhat + beta l, or Lhat + l                            (`mixtures.track_losses`; line 15, eq. 24)
    w_ij  = softmax_j(-Lhat_ij)                                              (`mixtures.posterior`; eq. 3, line 16)
    g_ji  = w_ij grad_phi_j (mean loss on D_i), sent to the owner j          (`local_update`; eq. 5, line 20)
    phi_j <- phi_j - eta sum_i g_ji, or any optimiser's step                 (`aggregate`; eq. 6, 8, line 25)
    predict with sum_j w_ij softmax(h_phi_j(x)); its logarithm is returned   (`predict`; after eq. 6)

A newcomer finds its posterior weights over the existing models by the E-step on its own data, and trains its own model,
which begins at their mean; the others' models stay as they are (`onboard`).

Deviations:
- `temperature`: the paper's sum over n_i examples makes w one-hot within a few rounds, on arbitrary clients; tau = 3 to
  10 finds similar clients. `count` is the paper's tau = n_i; g is then a sum over examples too, which needs a smaller
  step size.
- Client i is always in B_i, so that M = 0 is local training. `all-to-all` (section 3.2) has everybody in it. All phi
  start equal, and all-to-all EM would keep them so; a model is therefore offered only once its owner has taken part.
- The paper's Lhat = 0 at the start gives the largest weight to clients that were never visited. Here these have no
  weight, though the greedy choice still takes them first; Lhat_ij then starts level with the client's own Lhat_ii.
- A model whose total weight is less than `idle_below` takes no step, because Adam would take a full step along any
  gradient, however small.
- `local_work` = `epochs` (default; line 19, "multiple gradient steps"): each model used is trained on all minibatches,
  g_ji is w_ij times the way it went, and the owner goes sum_i g_ji / max(1, sum_i w_ij). Buffers always move like that.
  `gradient` is the equations above: one step in a round, whatever the number of epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Newcomer, Population
from coterie.core.optimizers import Adam, Optimizer
from coterie.core.task import Task
from coterie.core.training import mean_loss
from coterie.core.tree import Params, Tree
from coterie.parts import mixtures
from coterie.parts.mixtures import Contributions, Losses, Mixture

Positive = Annotated[float, Field(gt=0)]
WEIGHT_ROUNDING = 1e-4  # posterior weights in a message may add up to this much more than 1


class Server(NamedTuple):
    models: Params  # [N, ...]; phi
    optimizer: Tree  # [N, ...]; the state of each owner's optimiser
    losses: Losses  # [N, N]
    heard: Tensor  # [N] bool; who has taken part
    keys: Tensor  # [N] int64; from which random numbers are drawn


class Down(NamedTuple):
    models: Params  # [K, ...]; the client's own first
    owners: Tensor  # [K] int64
    used: Tensor  # [K] bool; false where fewer than K models are on offer
    losses: Losses  # [N]; the client's row


class Up(NamedTuple):
    own: Params  # phi_i as the client received it, for peers that have not heard all that changed it
    steps: Contributions  # [K, ...]; g_ji
    losses: Losses  # [N]; the client's new row


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

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"neighbours": 1, "epsilon": 0.45, "idle_below": 1.0, "prune_below": 0.25},
    )

    not_meant_to_learn: ClassVar[dict[str, str]] = {
        "local_work = gradient": "it takes one step a round, so that it needs as many rounds as others take steps"
    }

    def init_server(self, params: Params, population: Population) -> Server:
        size, task = population.size, population.task
        state = self.optimizer.init(params if task is None else task.split(params)[0])
        models, states = tree.clone(tree.broadcast((params, state), size))
        visited, heard = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
        losses = Losses(torch.zeros(size, size), torch.zeros(size, size), visited)
        keys = torch.arange(size) if population.keys is None else population.keys
        return Server(models, states, losses, heard, keys)

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        score = mixtures.epsilon_greedy(tree.rows(server.losses, ids), self.epsilon, rng, ids, server.keys)
        return self._send_models(server, ids, score, allowed=server.heard.expand(len(ids), -1))

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        score = -tree.widest_float(server.losses.tracked[ids])
        return self._send_models(server, ids, score, allowed=server.losses.visited[ids])

    def _send_models(self, server: Server, ids: Tensor, score: Tensor, allowed: Tensor) -> Down:
        """Send to each client of `ids` its own model and those allowed that have the highest scores, [len(ids), N]."""
        size = len(server.keys)
        number = size if self.mode == "all-to-all" else min(self.neighbours + 1, size)
        owners, used = mixtures.choose_owners(score, allowed, ids, number)
        return Down(tree.rows(server.models, owners), owners, used, tree.rows(server.losses, ids))

    def local_update(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> tuple[tuple[()], Up, Info]:
        tau = batches.count if isinstance(self.temperature, str) else torch.tensor(self.temperature)
        loss = vmap(lambda phi: mean_loss(task, phi, batches.epoch(0)))(down.models)  # [K]
        whose = (down.owners[:, None] == torch.arange(len(down.losses.last))) & down.used[:, None]  # [K, N]
        beta = self.beta if self.loss_tracking == "ema" else None
        losses = mixtures.track_losses(down.losses, whose, tau * loss, beta)
        w = mixtures.posterior(losses.tracked, losses.visited)  # [N]
        weight = (whose * w).sum(1)  # [K]
        optimizer = self.optimizer if self.local_work == "epochs" else None
        times = tau if self.temperature == "count" and optimizer is None else torch.ones(())
        steps = mixtures.contributions(task, optimizer, down.models, down.owners, weight, times, batches)
        info = {"loss": loss[0], "collaborators": torch.special.entr(w).sum().exp()}
        return (), Up(tree.rows(down.models, 0), steps, losses), info

    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        optimizer = self.optimizer if self.local_work == "gradient" else None
        models, losses = tree.put((server.models, server.losses), ids, (ups.own, ups.losses))
        models, states = mixtures.apply_contributions(optimizer, models, server.optimizer, ups.steps, self.idle_below)
        heard = server.heard.index_fill(0, ids, True)
        return Server(models, states, losses, heard, server.keys)

    def personalize(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> Mixture:
        losses = tree.rows(down.losses, down.owners)  # [K]
        own = down.owners == down.owners[0]
        allowed = (losses.visited & down.used) | own
        return mixtures.pruned_mixture(down.models, losses.tracked, allowed, self.prune_below)

    def predict(self, task: Task, view: Mixture, x: Tensor) -> Tensor:
        return mixtures.predict_mixture(task, view, x)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        server: Server = newcomer.server
        if ups is None:
            start = tree.broadcast(tree.mean(server.models, server.heard), 1)
            return newcomer._replace(server=server._replace(models=tree.put(server.models, ids, start)))
        new = self.aggregate(server, ids, ups)
        # Of all models, only the newcomer's own may change.
        own = tree.rows((new.models, new.optimizer), ids)
        models, states = tree.put((server.models, server.optimizer), ids, own)
        return newcomer._replace(server=new._replace(models=models, optimizer=states))

    def implausible(self, up: Up, examples: int) -> str | None:
        owners, weight = up.steps.owners, up.steps.weight
        if int(owners.min()) < 0 or int(owners.max()) >= len(up.losses.tracked):
            return "steps for models that nobody owns"
        if float(weight.min()) < 0 or float(weight.sum()) > 1 + WEIGHT_ROUNDING:
            return f"posterior weights that add up to {float(weight.sum()):g}"
        if float(up.losses.tracked.min()) < 0 or float(up.losses.last.min()) < 0:
            return "losses below 0"
        return None

    def server_info(self, server: Server) -> Info:
        itself = torch.eye(len(server.keys), dtype=torch.bool)
        return {"collaboration": mixtures.posterior(server.losses.tracked, server.losses.visited | itself)}
