"""FedeRiCo (Sui et al., "Find Your Friends: Personalized Federated Learning with the Right Collaborators", 2022).

Client i's data is taken to come from a mixture of all clients' models phi_j. Each round is one step of expectation
maximisation. With l_ij = tau * (mean loss of phi_j on D_i), tracked over rounds as Lhat_ij:

    B_i  <- M clients: with probability epsilon at random, else the best     (`dispatch`; section 3.3, Alg. 1 line 7)
    Lhat <- (1 - beta) Lhat + beta l, or Lhat + l                            (`mixtures.track_losses`; line 15, eq. 24)
    w_ij  = softmax_j(-Lhat_ij)                                              (`mixtures.posterior`; eq. 3, line 16)
    g_ji  = w_ij grad_phi_j (mean loss on D_i), sent to the owner j          (`local_update`; eq. 5, line 20)
    phi_j <- phi_j - eta sum_i g_ji, or any optimiser's step                 (`aggregate`; eq. 6, 8, line 25)
    predict with sum_j w_ij softmax(h_phi_j(x)); its logarithm is returned   (`predict`; after eq. 6)

Section 3.3 needs no server and no flood: client i asks the M clients of B_i for their models, and sends each of these
owners g_ji; that is 2M messages of a model's size for each client and round. phi_i, its optimiser's state and the row
Lhat_i belong to client i. A central server holds all of them; a peer holds its own (`Population.holds`), offers phi_i
to those who ask (`offer`) and hears what is addressed to it (`routes.Addressed`).

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
- `m_step`: eq. 3 divides by a sum over all clients that were ever visited. A client that has M of them at hand then
  contributes only what w has there, 4 tenths of a round's work where ten clients are alike, and the rest is never done.
  So by default the weights in g are the posterior over the models at hand (`at-hand`), which adds up to 1: nothing
  changes in all-to-all, or where w is concentrated on those at hand. `all` is the paper's.
- A model whose total weight is less than `idle_below` takes no step, because Adam would take a full step along any
  gradient, however small.
- `local_work` = `epochs` (default; line 19, "multiple gradient steps"): each model used is trained on all minibatches,
  g_ji is w_ij times the way it went, and the owner goes sum_i g_ji / max(1, sum_i w_ij). Buffers always move like that.
  `gradient` is the equations above: one step in a round, whatever the number of epochs. With `epochs`, a client makes
  its optimiser anew for each model and round; with `gradient`, the owner keeps one for its model.
- `deployed`: the sum over j in the prediction runs over the client's own model and the M of lowest Lhat (`best`), or as
  many others as the number says, or all that it ever had (`all`), with the weights divided by their sum. The paper
  sums over all j, but notes that nearly all w_ij are nearly 0 (section 4.3). What the deployed models have of the
  posterior weight is logged as `deployed_mass`.
- `cap` below 1, which is not in the paper, lets no other client's model weigh more than that, in training and in
  prediction; the rest goes to the client's own. Nor does anybody else's contribution to a model weigh more, or go
  further than its owner's own (`mixtures.capped_contributions`).
- `reject` = f, which is not in the paper either, leaves out the f contributions to each model that lie farthest from
  the others, as multi-Krum does with models, but never the owner's own (`mixtures.agreeing_contributions`). An owner
  alone cannot tell hostile contributions from those of clients that differ: it takes 2 f + 3 contributions to a model,
  so about as many `neighbours`. A model with fewer takes its owner's own only.
- A model of another client whose loss here is not finite counts as one of `WORTHLESS`, and gets no contribution.
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
from coterie.core.routes import NOBODY, Addressed, Asked
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import mean_loss
from coterie.core.tree import Params, Tree
from coterie.parts import mixtures
from coterie.parts.mixtures import Losses, Mixture

Positive = Annotated[float, Field(gt=0)]
WORTHLESS = 1e6  # the loss of another client's model that has none, or a larger one
WEIGHT_ROUNDING = 1e-4  # posterior weights in a message may add up to this much more than 1


class Server(NamedTuple):
    """The rows of R clients: of all N at a server, of itself at a peer."""

    held: Tensor  # [R] int64; whose rows these are
    models: Params  # [R, ...]; phi
    optimizer: Tree  # [R, ...]; the state of each owner's optimiser, if it has one
    losses: Losses  # [R, N]
    heard: Tensor  # [N] bool; who has taken part
    keys: Tensor  # [N] int64; from which random numbers are drawn

    def at(self, ids: Tensor) -> Tensor:
        """Return in which row each of the clients `ids` is; -1 if in none, and for nobody."""
        rows = torch.full((len(self.keys) + 1,), -1)  # the last is nobody's
        return rows.index_copy(0, self.held, torch.arange(len(self.held)))[ids]


class Down(NamedTuple):
    models: Asked  # [K, ...]; the client's own first; nobody's where fewer than K are on offer
    losses: Losses  # [N]; the client's row


@dataclass(frozen=True)
class FedeRiCo(Method[Server, tuple[()], Down, Addressed]):
    optimizer: Optimizer = Adam(lr=0.01)
    mode: Annotated[Literal["sampled", "all-to-all"], UNSEARCHED, Field(description="whose models a client gets")] = (
        "sampled"
    )
    neighbours: Annotated[int, Field(ge=0, description="M, others' models a client and round (sampled)")] = 3
    epsilon: Annotated[float, Field(ge=0, le=1, description="chance of choosing neighbours at random (sampled)")] = 0.3
    loss_tracking: Annotated[
        Literal["ema", "accumulated"], UNSEARCHED, Field(description="how losses add up over rounds")
    ] = "ema"
    beta: Annotated[float, Field(gt=0, le=1, description="weight of the new loss (ema)")] = 0.6
    temperature: Annotated[
        Literal["count"] | Positive, Search(1, 50), Field(description="tau, large is choosy; count: n_i")
    ] = 5.0
    local_work: Annotated[Literal["gradient", "epochs"], UNSEARCHED, Field(description="one gradient, or training")] = (
        "epochs"
    )
    m_step: Annotated[
        Literal["at-hand", "all"],
        Field(description="weights of contributions: posterior over models at hand, or over all"),
    ] = "at-hand"
    idle_below: Annotated[float, Field(ge=0, description="total weight below which a model makes no step")] = 1e-3
    prune_below: Annotated[
        float, UNSEARCHED, Field(ge=0, lt=1, description="weight below which a model is not deployed")
    ] = 0.01
    deployed: Annotated[
        Literal["best", "all"] | Annotated[int, Field(ge=0)],
        Field(description="others whose models are deployed; best: as many as neighbours"),
    ] = "best"
    cap: Annotated[float, Field(gt=0, le=1, description="most that another client's model may weigh")] = 1.0
    reject: Annotated[
        int, UNSEARCHED, Field(ge=0, description="f, contributions to a model to leave out; wants 2 f + 2 neighbours")
    ] = 0

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"neighbours": 1, "epsilon": 0.45, "idle_below": 1.0, "prune_below": 0.25},
        {"neighbours": 1, "deployed": 0},
        {"cap": 0.1},
    )

    not_meant_to_learn: ClassVar[dict[str, str]] = {
        "local_work = gradient": "it takes one step a round, so that it needs as many rounds as others take steps"
    }

    def init_server(self, params: Params, population: Population) -> Server:
        size, task = population.size, population.task
        held = torch.arange(size) if population.holds is None else population.holds
        state: Tree = ()
        if self.local_work == "gradient":
            state = self.optimizer.init(params if task is None else task.split(params)[0])
        models, states = tree.clone(tree.broadcast((params, state), len(held)))
        blank = torch.zeros(len(held), size)
        losses = Losses(blank, blank.clone(), blank > 0)
        keys = torch.arange(size) if population.keys is None else population.keys
        return Server(held, models, states, losses, torch.zeros(size, dtype=torch.bool), keys)

    def init_client(self, params: Params) -> tuple[()]:
        return ()

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        losses = tree.rows(server.losses, server.at(ids))
        score = mixtures.epsilon_greedy(losses, self.epsilon, rng, ids, server.keys)
        number = self._number(len(server.keys), "all" if self.mode == "all-to-all" else self.neighbours)
        return self._send(server, ids, mixtures.choose_owners(score, server.heard.expand(len(ids), -1), ids, number))

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        losses = tree.rows(server.losses, server.at(ids))
        number = self._number(len(server.keys), self._deployed)
        score = -tree.widest_float(losses.tracked)
        return self._send(server, ids, mixtures.choose_owners(score, losses.visited, ids, number))

    def offer(self, server: Server, ids: Tensor) -> Params:
        return tree.rows(server.models, server.at(ids))

    @property
    def _deployed(self) -> Literal["all"] | int:
        if self.deployed != "best":
            return self.deployed
        return "all" if self.mode == "all-to-all" else self.neighbours

    @staticmethod
    def _number(size: int, others: Literal["all"] | int) -> int:
        """Return K, the number of models at hand with so many others."""
        return size if others == "all" else min(others + 1, size)

    def _send(self, server: Server, ids: Tensor, owners: Tensor) -> Down:
        """Send to each client of `ids` the models of its `owners` [len(ids), K], its own where there is none here."""
        at = server.at(owners)
        rows = tree.rows(server.models, torch.where(at < 0, at[:, :1], at))
        return Down(Asked(owners, rows), tree.rows(server.losses, server.at(ids)))

    def local_update(
        self, task: Task, client: tuple[()], down: Down, batches: Batches
    ) -> tuple[tuple[()], Addressed, Info]:
        owners, models = down.models
        tau = batches.count if isinstance(self.temperature, str) else torch.as_tensor(self.temperature)
        loss = vmap(lambda phi: mean_loss(task, phi, batches.epoch(0)))(models)  # [K]
        loss = torch.cat([loss[:1], loss[1:].nan_to_num(WORTHLESS, WORTHLESS).clamp_max(WORTHLESS)])
        whose = owners[:, None] == torch.arange(len(down.losses.last))  # [K, N]
        beta = self.beta if self.loss_tracking == "ema" else None
        losses = mixtures.track_losses(down.losses, whose, tau * loss, beta)
        w = mixtures.posterior(losses.tracked, losses.visited)  # [N]
        weight = (whose * w).sum(1)  # [K]
        if self.m_step == "at-hand":
            weight = mixtures.posterior((whose * losses.tracked).sum(1), whose.any(1))
        weight = mixtures.capped(weight, self.cap)
        optimizer = self.optimizer if self.local_work == "epochs" else None
        times = tau if self.temperature == "count" and optimizer is None else torch.ones(())
        steps = mixtures.only_finite(mixtures.contributions(task, optimizer, models, weight, times, batches))
        number = self._number(len(w), self._deployed)
        mass = mixtures.deployed_mass(losses.tracked, losses.visited, whose[0], number, self.prune_below)
        info = {"loss": loss[0], "collaborators": torch.special.entr(w).sum().exp(), "deployed_mass": mass}
        return (), Addressed(losses, owners, steps), info

    def aggregate(self, server: Server, ids: Tensor, ups: Addressed) -> Server:
        optimizer = self.optimizer if self.local_work == "gradient" else None
        at = server.at(ids)
        row = torch.where(at < 0, len(server.held), at)  # rows that are not held here go to one too many
        roomy = tree.map(lambda leaf: torch.cat([leaf, leaf[:1]]), server.losses)
        losses = tree.rows(tree.put(roomy, row, ups.own), slice(len(server.held)))
        to = server.at(ups.to)
        own, steps = ups.to == ids[:, None], ups.parts  # among peers, a sender's own model is not its first
        steps = mixtures.capped_contributions(steps, to, own, self.cap) if self.cap < 1 else steps
        steps = mixtures.agreeing_contributions(steps, to, own, self.reject) if self.reject else steps
        models, states = mixtures.apply_contributions(
            optimizer, server.models, server.optimizer, to, steps, self.idle_below
        )
        heard = server.heard.index_fill(0, ids, True)
        return Server(server.held, models, states, losses, heard, server.keys)

    def personalize(self, task: Task, client: tuple[()], down: Down, batches: Batches) -> Mixture:
        owners, models = down.models
        losses = tree.rows(down.losses, owners.clamp_min(0))  # [K]
        allowed = (losses.visited & (owners >= 0)) | (owners == owners[0])
        return mixtures.pruned_mixture(models, losses.tracked, allowed, self.prune_below, self.cap)

    def predict(self, task: Task, view: Mixture, x: Tensor) -> Tensor:
        return mixtures.predict_mixture(task, view, x)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Addressed | None) -> Newcomer:
        server: Server = newcomer.server
        if ups is None:
            start = tree.broadcast(tree.mean(server.models, server.heard), 1)
            return newcomer._replace(server=server._replace(models=tree.put(server.models, ids, start)))
        new = self.aggregate(server, ids, ups)
        # Of all models, only the newcomer's own may change.
        own = tree.rows((new.models, new.optimizer), ids)
        models, states = tree.put((server.models, server.optimizer), ids, own)
        return newcomer._replace(server=new._replace(models=models, optimizer=states))

    def implausible(self, up: Addressed, examples: int) -> str | None:
        weight, losses = up.parts.weight, up.own
        if int(up.to.min()) < NOBODY or int(up.to.max()) >= len(losses.tracked):
            return "steps for models that nobody owns"
        owners = [owner for owner in up.to.tolist() if owner != NOBODY]
        if len({*owners}) < len(owners):  # else one client could pass for many
            return "several steps for one model"
        if float(weight.min()) < 0 or float(weight.sum()) > 1 + WEIGHT_ROUNDING:
            return f"posterior weights that add up to {float(weight.sum()):g}"
        if float(losses.tracked.min()) < 0 or float(losses.last.min()) < 0:
            return "losses below 0"
        return None

    def cautions(self, task: Task, population: Population) -> list[str]:
        senders = population.audience if self.mode == "all-to-all" else min(self.neighbours + 1, population.audience)
        if not self.reject or senders >= 2 * self.reject + 3:
            return []
        needed = 2 * self.reject + 2
        return [
            f"reject = {self.reject} wants contributions of {needed} others to a model, and about {senders - 1} of "
            f"{population.audience} clients make some: models learn from their own clients only; raise neighbours to "
            f"{needed} or more, or lower reject"
        ]

    def server_info(self, server: Server) -> Info:
        itself = server.held[:, None] == torch.arange(len(server.keys))  # [R, N]
        return {"collaboration": mixtures.posterior(server.losses.tracked, server.losses.visited | itself)}
