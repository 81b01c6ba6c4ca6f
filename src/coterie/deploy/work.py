"""One site's work of one message: evaluate the round before, train this one. Exactly what the loop engine does with
one client, here with that client's data alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from coterie import rng, tree
from coterie.batches import Batches
from coterie.data.federation import Federation
from coterie.deploy.facts import Facts, build_task, message_forms, population
from coterie.deploy.outcome import Taken
from coterie.deploy.places import Elsewhere, Own
from coterie.engine import Central, Engine
from coterie.experiment.config import Config
from coterie.experiment.run import local_like
from coterie.experiment.setup import Model
from coterie.experiment.simulation import Simulation, State
from coterie.hyper import AnyMethod
from coterie.method import Population
from coterie.task import Task
from coterie.tree import Tree

LOOP = Engine("loop")
Metrics = dict[str, dict[str, float]]


class Private(NamedTuple):
    """All that a site keeps from round to round. A peer has a copy of the server, and its own last message."""

    client: Tree
    alone: Tree  # the model trained alone, for comparison; () without one
    copy: Tree = ()
    up: Tree = ()
    spoke: Tree = ()  # [] bool; whether `up` is of this state's round


@dataclasses.dataclass
class Bench:
    """A site's data with the method and model of one federation."""

    config: Config
    method: AnyMethod
    facts: Facts
    federation: Federation  # of this one client
    task: Task
    local: AnyMethod | None  # what the site is compared with

    @classmethod
    def build(cls, config: Config, method: AnyMethod, model: Model, facts: Facts, own: Federation) -> Bench:
        federation = dataclasses.replace(own, num_classes=facts.classes)
        local = local_like(method) if config.reference and config.method != "local" else None
        return cls(config, method, facts, federation, build_task(config, model, facts), local)

    def initial(self) -> Private:
        params = self.task.init()
        alone = () if self.local is None else _row(self.local.init_client(params))
        return Private(_row(self.method.init_client(params)), alone)

    def initial_peer(self, keys: torch.Tensor, near: int) -> Private:
        params = self.task.init()
        copy = self.method.init_server(params, population(self.facts, self.task, keys, near))
        up, _ = message_forms(self.method, self.task, copy, self.config, self.facts)
        blank = tree.map(torch.zeros_like, up)
        return self.initial()._replace(copy=copy, up=blank, spoke=torch.tensor(False))

    def arriving(self, *, train: bool, deploy: bool) -> dict[str, Tree]:
        """The form of what the server sends."""
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
        """The structure of a client's view, from the initial model without training."""
        params, steps = self.task.init(), torch.zeros(self.method.personalize_epochs, 1, 2, dtype=torch.int64)
        server = self.method.init_server(params, people)
        down = tree.rows(self.method.deploy(server, torch.tensor([0]), torch.Generator()), 0)
        pool = (self.federation.x[:2], self.federation.y[:2])
        batches = Batches(*pool, steps, steps.float(), steps[..., 0], torch.tensor(1.0))  # all masked: no step
        return self.method.personalize(self.task, self.method.init_client(params), down, batches)

    def simulation(self, private: Private, place: Any) -> Simulation:
        state = State(private.copy, private.client)
        plan = self.facts.plan(self.config)
        return Simulation(self.method, self.task, self.federation, plan, 1, self.config.seed, state, place)

    def alone(self, private: Private) -> Simulation | None:
        if self.local is None:
            return None
        state, plan = State((), private.alone), self.facts.plan(self.config)
        return Simulation(self.local, self.task, self.federation, plan, 1, self.config.seed, state, Central())

    def evaluate(self, round: int, private: Private, place: Elsewhere | Own) -> dict[str, Metrics]:
        """{"own": metrics, "alone": metrics}, of the models after `round`."""
        found = {"own": _scores(self.simulation(private, place), round)}
        alone = self.alone(private)
        return found if alone is None else {**found, "alone": _scores(alone, round)}

    def train(self, round: int, private: Private, place: Elsewhere | Own) -> tuple[Private, Tree, Tree, Tree]:
        """(new state, the site's message, its info, info of training alone)."""
        sim = self.simulation(private, place)
        info = tree.rows(sim.train(round, LOOP).info, 0)
        new = private._replace(client=sim.state.clients)
        alone, alone_info = self.alone(private), {}
        if alone is not None:
            alone_info = tree.rows(alone.train(round, LOOP).info, 0)
            new = new._replace(alone=alone.state.clients)
        return new, place.said, info, alone_info

    def deployed(self, round: int, private: Private, place: Own) -> Tree:
        """What a peer's own copy would have it deploy after `round`; no client axis."""
        draw = lambda: rng.torch_generator(self.config.seed, "dispatch for evaluation", round)  # noqa: E731
        return tree.rows(place.send(self.method.deploy, private.copy, torch.tensor([0]), draw), 0)

    def taken(self, round: int, client: Tree, deploy: Tree) -> Taken:
        """The site's model as of `round`, and what it says of the test examples."""
        sim = self.simulation(Private(client, ()), Elsewhere(deploy))
        return Taken(sim.views(round, LOOP), sim.predictions(round, LOOP))

    def taken_alone(self, round: int, alone: Tree) -> Taken:
        sim = self.alone(Private((), alone))
        assert sim is not None
        return Taken(sim.views(round, LOOP), sim.predictions(round, LOOP))


def _scores(sim: Simulation, round: int) -> Metrics:
    scores = sim.evaluate(round, LOOP)
    return {part: {name: float(values[0]) for name, values in by.items()} for part, by in scores.items()}


def _row(state: Tree) -> Tree:
    return tree.clone(tree.broadcast(state, 1))
