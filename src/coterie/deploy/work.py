"""A site's work for one message: evaluate the previous round, train this one.

This is exactly what the loop engine does with one client, but with that client's data alone.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, NamedTuple

import torch

from coterie.core import rng, routes, tree
from coterie.core.batches import Batches
from coterie.core.method import Population
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.deploy.federation_facts import FederationFacts, build_task, message_forms, population, population_of_peer
from coterie.deploy.outcome import SiteResults
from coterie.deploy.site_roles import OwnServer, RemoteServer
from coterie.engine import Central, Engine
from coterie.evaluation.metrics import about
from coterie.experiment.building import Model
from coterie.experiment.config import Config
from coterie.experiment.execute import local_like
from coterie.experiment.privacy.install import Installed, at_site
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import AnyMethod
from coterie.storage.state import State

LOOP = Engine("loop")
Metrics = dict[str, dict[str, float | None]]


class Private(NamedTuple):
    """What a site keeps from round to round. A peer also has a copy of the server, and its own last message.

    If messages have parts for others (`coterie.core.routes`), it keeps its own part only.
    """

    client: Tree
    alone: Tree  # the model trained alone, for comparison; () without one
    copy: Tree = ()
    up: Tree = ()
    spoke: Tree = ()  # [] bool: whether `up` was sent in this state's round


@dataclasses.dataclass
class Workbench:
    """A site's data, together with the method and model of one federation."""

    config: Config
    method: AnyMethod
    facts: FederationFacts
    federation: Federation  # with this client only
    task: Task
    local: AnyMethod | None  # training alone, for comparison
    privacy: Installed  # the method as it trains, and how its messages are changed
    _initial: dict[Any, Private] = dataclasses.field(default_factory=dict, repr=False)  # of peers

    @classmethod
    def build(
        cls, config: Config, method: AnyMethod, model: Model, facts: FederationFacts, own: Federation
    ) -> Workbench:
        federation = dataclasses.replace(own, num_classes=facts.classes)
        local = local_like(method) if config.reference and config.method != "local" else None
        task = build_task(config, model, facts)
        privacy = at_site(config, method, task, federation, facts.plan(config))
        return cls(config, privacy.method, facts, federation, task, local, privacy)

    def initial(self) -> Private:
        """Return the state before the first round."""
        params = self.task.init()
        alone = () if self.local is None else _row(self.local.init_client(params))
        return Private(_row(self.method.init_client(params)), alone)

    def initial_of_peer(self, keys: torch.Tensor, near: int, index: int) -> Private:
        """Return the state of the peer `index` with `near` neighbours, itself included, before the first round.

        It is made once, since every message of the run asks for it.
        """
        known = tuple(keys.tolist()), near, index
        if known not in self._initial:
            self._initial[known] = self._new_peer(keys, near, index)
        return self._initial[known]

    def _new_peer(self, keys: torch.Tensor, near: int, index: int) -> Private:
        people = population_of_peer(self.facts, self.task, keys, near, index)
        people = people._replace(seed=rng.server_seed(self.config.seed))
        copy = self.method.init_server(self.task.init(), people)
        up, _ = message_forms(self.method, self.task, copy, self.config, self.facts, index)
        blank = tree.map(torch.zeros_like, routes.own_part(up, index))
        return self.initial()._replace(copy=copy, up=blank, spoke=torch.tensor(False))

    def asks(self, round: int, copy: Tree, index: int, *, train: bool, evaluate: bool) -> set[int]:
        """Return whom a peer asks in message `round`, to train and to evaluate the round before."""
        sends = [(self.method.dispatch, "dispatch", round)] if train else []
        sends += [(self.method.deploy, "dispatch for evaluation", round - 1)] if evaluate else []
        found: set[int] = set()
        for send, purpose, number in sends:
            want = routes.asked(
                send(copy, torch.tensor([index]), rng.torch_generator(self.config.seed, purpose, number))
            )
            found |= set() if want is None else set(want.owners.flatten().tolist())
        return found - {index, routes.NOBODY}

    def offer(self, copy: Tree, index: int) -> Tree:
        """Return what a peer gives to those who ask."""
        return tree.rows(self.method.offer(copy, torch.tensor([index])), 0)

    def message_form(self, *, train: bool, deploy: bool) -> dict[str, Tree]:
        """Return the form of what the server sends."""
        params = self.task.init()
        server = self.method.init_server(params, population(self.facts, self.task))
        first = torch.tensor([0])
        form: dict[str, Tree] = {}
        if train:
            form["train"] = tree.rows(self.method.dispatch(server, first, torch.Generator()), 0)
        if deploy:
            form["deploy"] = tree.rows(self.method.deploy(server, first, torch.Generator()), 0)
            shared = self.method.global_model(server)
            form |= {} if shared is None else {"shared": shared}
        return form

    def view_form(self, people: Population) -> Tree:
        """Return the form of a client's deployed model, from the initial model without training."""
        params, steps = self.task.init(), torch.zeros(self.method.personalize_epochs, 1, 2, dtype=torch.int64)
        server = self.method.init_server(params, people)
        down = tree.rows(self.method.deploy(server, torch.tensor([0]), torch.Generator()), 0)
        pool = (self.federation.x[:2], self.federation.y[:2])
        batches = Batches(*pool, steps, steps.float(), steps[..., 0], torch.tensor(1.0))  # all masked: no step
        return self.method.personalize(self.task, self.method.init_client(params), down, batches)

    def simulation(self, private: Private, place: Any) -> Simulation:
        """Return a simulation of this client; `place` is its server."""
        state = State(private.copy, private.client)
        plan = self.facts.plan(self.config)
        sim = Simulation(self.method, self.task, self.federation, plan, 1, self.config.seed, state, place)
        sim.shares = self.privacy.shares
        return sim

    def alone(self, private: Private) -> Simulation | None:
        """Return a simulation of training alone, or None without a reference."""
        if self.local is None:
            return None
        state, plan = State((), private.alone), dataclasses.replace(self.facts.plan(self.config), poisson=False)
        return Simulation(self.local, self.task, self.federation, plan, 1, self.config.seed, state, Central())

    def evaluate(self, round: int, private: Private, place: RemoteServer | OwnServer) -> dict[str, Metrics]:
        """Return the metrics of the models after `round`: {"own": metrics, "alone": metrics}."""
        found = {"own": _scores(self.simulation(private, place), round)}
        alone = self.alone(private)
        return found if alone is None else {**found, "alone": _scores(alone, round)}

    def train(self, round: int, private: Private, place: RemoteServer | OwnServer) -> tuple[Private, Tree, Tree, Tree]:
        """Train a round; return the new state, the site's message, its info, and the info of training alone."""
        sim = self.simulation(private, place)
        if self.privacy.budget is not None:  # the server knows the run's seed: it must not know who is drawn
            sim.seed = secrets.randbits(62)
        info = tree.rows(sim.train(round, LOOP).info, 0)
        new = private._replace(client=sim.state.clients)
        alone, alone_info = self.alone(private), {}
        if alone is not None:
            alone_info = tree.rows(alone.train(round, LOOP).info, 0)
            new = new._replace(alone=alone.state.clients)
        if self.privacy.budget is not None:  # losses tell of examples, without noise
            info, alone_info = tree.map(torch.zeros_like, (info, alone_info))
        return new, place.message, info, alone_info

    def deploy_from_copy(self, round: int, private: Private, place: OwnServer) -> Tree:
        """Return what a peer's own copy of the server deploys after `round`; no client axis."""
        draw = lambda: rng.torch_generator(self.config.seed, "dispatch for evaluation", round)  # noqa: E731
        return tree.rows(place.send(self.method, self.method.deploy, private.copy, torch.tensor([0]), draw), 0)

    def results(self, round: int, client: Tree, deploy: Tree) -> SiteResults:
        """Return the site's model as of `round`, and its predictions."""
        sim = self.simulation(Private(client, ()), RemoteServer(deploy))
        return _results(sim, round)

    def results_alone(self, round: int, alone: Tree) -> SiteResults:
        """Return the same for training alone."""
        sim = self.alone(Private((), alone))
        assert sim is not None
        return _results(sim, round)


def _results(sim: Simulation, round: int) -> SiteResults:
    found = sim.all_predictions(round, LOOP)
    return SiteResults(sim.views(round, LOOP), found["test"], found["validation"])


def _scores(sim: Simulation, round: int) -> Metrics:
    scores = sim.evaluate(round, LOOP)
    return {
        part: {name: reported(name, float(values[0])) for name, values in by.items()} for part, by in scores.items()
    }


def reported(name: str, value: float) -> float | None:
    """Return a metric as it is reported; None if it is not defined, or infinite as a diverging model's loss is."""
    return value if about(name).low <= value <= about(name).high else None


def _row(state: Tree) -> Tree:
    return tree.clone(tree.broadcast(state, 1))
