"""FedFomo (Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021).

Every client asks a few others for their models, and begins its local training at a mean of those that do better than
its own model did, on examples that it withholds from training. With L_i the mean loss on these, theta_i^old the model
at which client i's last local training began, and theta_j the models at hand, its own as trained since then among them:

    w_ij    = max(0, (L_i(theta_i^old) - L_i(theta_j)) / ||theta_j - theta_i^old||)      (`_weights`)
    theta_i <- sum_j w_ij theta_j / sum_j w_ij,  or its own model if all w_ij are 0      (`local_update`)
    theta_i <- SGD on f_i from there, over the round's minibatches                       (`local_update`)
    P_ij    <- P_ij + w_ij / sum_j w_ij                                                  (`local_update`)

In the next round client i is sent the `models` = M models of the largest P_ij or, with a probability that begins at
epsilon and loses `decay` with each round, M at random (`dispatch`). Each client deploys its own theta_i. With M = 0, or
alone, this is local training (tested).

A model and the row P_i belong to client i. A central server holds all of them; a peer holds its own
(`Population.holds`), offers its model to those who ask (`offer`), and tells nobody else anything.

Details: since the w_ij are divided by their sum, the mean is theta_i^old + sum_j w_ij (theta_j - theta_i^old), the
update that the paper derives from a first-order expansion of L_i. Distances are those of trained parameters; buffers
are averaged with the same weights. L_i is taken on a fixed share of the client's training examples (`withheld`; the
paper holds out 20 % of a client's data) and not on the run's validation examples, because these select the round. A
client of a single example can withhold nothing and keeps its own model. P starts at 0, and equal P_ij are in random
order. Two things are otherwise in the authors' program: chance decides for each of the M models, not once a round for
all of them, and P_ij also falls, by the share of a model that does worse than theta_i^old. Only models of clients that
have taken part are sent. A newcomer's own P is learned as everybody's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Info, Method, Newcomer, Population
from coterie.core.optimizers import SGD, Optimizer
from coterie.core.routes import NOBODY, Addressed, Asked
from coterie.core.search import UNSEARCHED, Search
from coterie.core.task import Task
from coterie.core.training import mean_loss, train
from coterie.core.tree import Params
from coterie.parts import mixtures

TINY = 1e-30  # of the numbers that put equal affinities in random order: less than any real one


class Server(NamedTuple):
    """The rows of R clients: of all N at a server, of itself at a peer."""

    held: Tensor  # [R] int64; whose rows these are
    models: Params  # [R, ...]; theta, as it is sent
    affinity: Tensor  # [R, N]; P
    heard: Tensor  # [N] bool; who has taken part
    keys: Tensor  # [N] int64; from which random numbers are drawn
    round: Tensor  # [] int64; rounds so far

    def at(self, ids: Tensor) -> Tensor:
        """Return in which row each of the clients `ids` is; -1 if in none."""
        return torch.full((len(self.keys),), -1).index_copy(0, self.held, torch.arange(len(self.held)))[ids]


class Client(NamedTuple):
    own: Params  # theta_i
    old: Params  # theta_i^old


class Down(NamedTuple):
    models: Asked  # [M, ...]; nobody's where fewer than M are on offer
    itself: Tensor  # [] int64; the client's number
    affinity: Tensor  # [N]; the row P_i


class Own(NamedTuple):
    """What a client tells its server, or its own copy of it."""

    params: Params
    affinity: Tensor  # [N]


@dataclass(frozen=True)
class FedFomo(Method[Server, Client, Any, Addressed]):
    learns_from: ClassVar[str] = "clients whose models did well on examples that this one withheld from training"

    optimizer: Optimizer = SGD()
    models: Annotated[
        int, Search(1, 10), Field(ge=0, description="M, others' models that a client is sent in a round")
    ] = 5
    epsilon: Annotated[
        float, UNSEARCHED, Field(ge=0, le=1, description="chance of being sent M models at random, in the first round")
    ] = 0.3
    decay: Annotated[float, UNSEARCHED, Field(ge=0, le=1, description="what that chance loses with each round")] = 0.05
    withheld: Annotated[
        float, UNSEARCHED, Field(gt=0, lt=1, description="share of the training data that weighs models")
    ] = 0.2

    law_contexts: ClassVar[tuple[dict[str, Any], ...]] = (
        {"models": 1, "epsilon": 0.45, "decay": 0.0},
        {"models": 1, "epsilon": 0.0, "withheld": 0.3},
        {"models": 1, "epsilon": 0.5, "decay": 0.4, "withheld": 0.3},  # of which 0.1 is left in the second round
    )

    @property
    def withheld_share(self) -> float:
        return self.withheld

    def init_server(self, params: Params, population: Population) -> Server:
        size, task = population.size, population.task
        held = torch.arange(size) if population.holds is None else population.holds
        sent = params if task is None else task.sent(params)
        keys = torch.arange(size) if population.keys is None else population.keys
        models = tree.clone(tree.broadcast(sent, len(held)))
        return Server(
            held, models, torch.zeros(len(held), size), torch.zeros(size, dtype=torch.bool), keys, torch.tensor(0)
        )

    def init_client(self, params: Params) -> Client:
        return Client(params, params)

    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        affinity = tree.rows(server.affinity, server.at(ids))
        draws = mixtures.draw_orders(rng, ids, server.keys)
        greedy = torch.where(affinity > 0, tree.widest_float(affinity), TINY * draws.ties)
        score = torch.where(draws.coin < self.epsilon - self.decay * server.round, draws.order, greedy)
        number = min(self.models + 1, len(server.keys))
        owners = mixtures.choose_owners(score, server.heard.expand(len(ids), -1), ids, number)[:, 1:]
        rows = tree.rows(server.models, server.at(owners.clamp_min(0)).clamp_min(0))  # among peers filled in later
        return Down(Asked(owners, rows), ids, affinity)

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> tuple[()]:
        return ()

    def offer(self, server: Server, ids: Tensor) -> Params:
        return tree.rows(server.models, server.at(ids))

    def local_update(self, task: Task, client: Client, down: Down, batches: Batches) -> tuple[Client, Addressed, Info]:
        owners, others = down.models
        everybody = torch.cat([down.itself[None], owners])  # [1 + M]
        others = {**tree.broadcast(client.own, len(owners)), **others}
        models = tree.map(lambda own, rest: torch.cat([own[None], rest]), client.own, others)
        weight = _weights(task, client.old, models, everybody != NOBODY, batches.of_withheld())
        start = tree.mean(models, weight)
        theta, loss = train(task, self.optimizer, start, batches)
        whose = everybody[:, None] == torch.arange(len(down.affinity))  # [1 + M, N]
        affinity = down.affinity + (whose * weight[:, None]).sum(0).to(down.affinity)
        up = Addressed(Own(task.sent(theta), affinity), owners.new_full((1,), NOBODY), ())
        return Client(theta, start), up, {"loss": loss, "own_weight": weight[0]}

    def aggregate(self, server: Server, ids: Tensor, ups: Addressed) -> Server:
        at = server.at(ids)
        here = (at >= 0).nonzero().flatten()  # a peer hears that others took part, and nothing else
        new = Own(*tree.rows(ups.own, here))
        models, affinity = tree.put((server.models, server.affinity), at[here], (new.params, new.affinity))
        heard = server.heard.index_fill(0, ids, True)
        return server._replace(models=models, affinity=affinity, heard=heard, round=server.round + 1)

    def personalize(self, task: Task, client: Client, down: tuple[()], batches: Batches) -> Params:
        return client.own

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Addressed | None) -> Newcomer:
        if ups is None:
            return newcomer
        return newcomer._replace(server=self.aggregate(newcomer.server, ids, ups))  # its own rows only

    def implausible(self, up: Addressed, examples: int) -> str | None:
        return "affinities below 0" if float(up.own.affinity.min()) < 0 else None

    def server_info(self, server: Server) -> Info:
        return {"collaboration": server.affinity / server.affinity.sum(1, keepdim=True).clamp_min(1.0)}


def _weights(task: Task, old: Params, models: Params, there: Tensor, withheld: Batches) -> Tensor:
    """Return w_ij over their sum, [1 + M]; those of `models` that are not `there` count 0, and the first is the own."""
    trained, begin = task.split(models)[0], task.split(old)[0]
    distance = vmap(lambda theta: tree.sqdist(theta, begin))(trained).sqrt()
    loss = vmap(lambda theta: mean_loss(task, theta, withheld))(models)
    gain = mean_loss(task, old, withheld) - loss
    weight = torch.where(there & (distance > 0) & (gain > 0), gain / distance.clamp_min(TINY), 0.0)
    total = weight.sum()
    alone = (torch.arange(len(weight)) == 0).to(weight)
    return torch.where(total > 0, weight / total.clamp_min(TINY), alone)
