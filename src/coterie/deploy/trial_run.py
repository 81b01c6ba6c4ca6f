"""One candidate of a recommendation as the server sees it: what to send, and what follows from the answers.

A candidate is trained as a run is: message t evaluates it after round t - 1 and, at the sites that are sampled, trains
round t. Several candidates share a message, so that all of them take as many messages as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coterie.core import rng, tree
from coterie.core.method import Population
from coterie.core.tree import Tree
from coterie.deploy import guard, messages
from coterie.deploy.federation_facts import FederationFacts, message_forms
from coterie.deploy.refused import Refused
from coterie.engine import Central
from coterie.evaluation.benefit import sign_of
from coterie.experiment.divergence import DIVERGED
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.experiment.tuning.candidates import point_of
from coterie.experiment.tuning.journal import Point
from coterie.storage import files
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

BASE = "base.json"  # beside a state: from which round each site goes on


@dataclasses.dataclass
class TrialRun:
    """A candidate between two rounds.

    Attributes:
        id: under which the sites keep its state.
        setup: method and settings, on a federation without data.
        sim: the server's part of it.
        forms: of a site's message, and of what it logs.
        begun: the rounds that it had been trained for.
        step: the round to train next.
        until: the last round.
        keep: the sites keep evaluated models, one of which will be asked for.
        base: the last accepted round of each site.
        curve: what it scored.
        best: the round that validation selects so far.
        sent: bytes of the methods' messages, up and down.
        diverged: why it stopped.
    """

    id: str
    setup: Setup
    sim: Simulation
    forms: tuple[Tree, Tree]
    begun: int
    step: int
    until: int
    keep: bool
    base: dict[str, int]
    curve: list[Point] = dataclasses.field(default_factory=list)
    best: int = 0
    sent: int = 0
    diverged: str = ""
    _down: Tree = ()

    @classmethod
    def begin(
        cls, id: str, setup: Setup, facts: FederationFacts, begun: int, until: int, *, states: Path | None, keep: bool
    ) -> TrialRun:
        """Return a candidate that has been trained for `begun` rounds, with its state in the folder `states`."""
        config, method, task, names = setup.config, setup.method, setup.task, setup.federation.names
        people = Population(facts.size, facts.audience, task, rng.keys_of(names), seed=rng.server_seed(config.seed))
        server = method.init_server(task.init(), people)
        forms = message_forms(method, task, server, config, facts)
        state, base = State(server, ()), dict.fromkeys(names, 0)
        if begun and states is not None:
            state = RunFolder(states).load(begun, state)[0]
            base = {name: int(files.read_json(states / BASE)[name]) for name in names}
        plan = facts.plan(config)
        sim = Simulation(method, task, setup.federation, plan, facts.audience, config.seed, state, Central())
        sim.sampler, sim.heard = config.sampler, config.clients_heard
        return cls(id, setup, sim, forms, begun, begun + 1, until, keep, base)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.diverged) or self.step > self.until + 1

    @property
    def sampled(self) -> list[int]:
        """The sites that train next."""
        return self.sim.sample(self.step) if self.step <= self.until else []

    @property
    def evaluating(self) -> bool:
        """Whether the last round is evaluated now."""
        last, every = self.step - 1, self.setup.config.evaluate_every
        return last > self.begun and (last % every == 0 or last == self.until)

    def requests(self) -> dict[str, tuple[messages.Trial, dict[str, Tree]]]:
        """Return what to ask of each site, and what to send it for that."""
        names, sampled = self.setup.federation.names, self.sampled
        self._down = self._send(self.setup.method.dispatch, sampled, "dispatch", self.step) if sampled else ()
        deploy: Tree = ()
        if self.evaluating:
            everyone = list(range(len(names)))
            deploy = self._send(self.setup.method.deploy, everyone, "dispatch for evaluation", self.step - 1)
        found = {}
        for i, name in enumerate(names):
            content: dict[str, Tree] = {}
            if i in sampled:
                content["train"] = tree.rows(self._down, sampled.index(i))
            if self.evaluating:
                content["deploy"] = tree.rows(deploy, i)
            if content:
                found[name] = self.spec(name, train=i in sampled, evaluate=self.evaluating), content
        return found

    def spec(self, name: str, *, train: bool = False, evaluate: bool = False, hold: bool = False) -> messages.Trial:
        """Return what a site is told."""
        config = self.setup.config
        return messages.Trial(
            id=self.id,
            method=config.method,
            hyper=config.hyper,
            optimizer=config.optimizer,
            base=self.base[name],
            step=self.step,
            train=train,
            evaluate=evaluate,
            keep=self.keep,
            hold=hold,
            best=self.best,
        )

    def check(self, name: str, up: Tree, info: Tree, examples: int, norm_bound: float) -> None:
        """Check what a site sends for this candidate; raise `Refused` if it cannot be used."""
        guard.check_info(info)
        guard.check_message(self.setup.method, up, examples, norm_bound)
        index = self.setup.federation.names.index(name)
        guard.check_combines(self.setup.method, self.sim.state.server, index, up)

    def absorb(self, scores: Mapping[str, Mapping[str, float | None]], ups: Mapping[str, Tree], failed: int) -> None:
        """Take in the answers of all sites: scores of the last round, messages of this one, and how many failed.

        A site whose training diverges counts as not sampled. If half of the sampled sites say so, it is the candidate
        that diverges: one of several sites cannot stop it alone.
        """
        names, sampled = self.setup.federation.names, self.sampled
        if self.evaluating:
            self._scored(scores)
        given = [i for i in sampled if names[i] in ups]
        if sampled and (not given or 2 * failed >= len(sampled)):
            self.diverged = f"{DIVERGED}: at {failed} of {len(sampled)} sites in round {self.step}"
            return
        if given:
            try:
                given = self._combine(given, ups)
            except Exception as error:  # not even one message can be used
                self.diverged = f"{DIVERGED}: messages of round {self.step} cannot be combined ({type(error).__name__})"
                return
            for i in given:
                self.base[names[i]] = self.step
        self.step += 1

    def save(self, states: Path) -> None:
        """Write the state after the last round, from which it may go on."""
        RunFolder(states).save(self.until, self.sim.state, None)
        files.write_json(states / BASE, self.base)

    def _scored(self, scores: Mapping[str, Mapping[str, float | None]]) -> None:
        names = self.setup.federation.names
        by = {
            metric: [_number(scores.get(name, {}).get(metric)) for name in names]
            for metric in (self.setup.metric, "loss")
        }
        point = point_of(self.step - 1, self.setup, by)
        sign = sign_of(self.setup.metric)
        standing = next((each.value for each in self.curve if each.round == self.best), math.nan)
        if not self.best or sign * point.value > sign * standing:
            self.best = point.round
        self.curve.append(point)

    def _combine(self, given: list[int], ups: Mapping[str, Tree]) -> list[int]:
        names, place, method = self.setup.federation.names, self.sim.place, self.setup.method

        def combined(ids: list[int]) -> Tree:
            those = self.sim.heard_of(self.step, ids)
            rows = tree.stack([ups[names[i]] for i in those])
            return place.aggregate(method, self.sim.state.server, torch.tensor(those), rows)

        sampled = self.sampled
        ids, new = guard.combine_usable(given, functools.partial(combined))
        if not ids:
            raise Refused("unusable")
        self.sim.state = State(new, ())
        rows = torch.tensor([sampled.index(i) for i in ids])
        everyone = tree.stack([ups[names[i]] for i in ids])
        self.sent += sum(place.traffic(method, torch.tensor(ids), everyone, tree.rows(self._down, rows)))
        return ids

    def _send(self, send: Any, ids: list[int], purpose: str, round: int) -> Tree:
        def draw() -> torch.Generator:
            return rng.torch_generator(self.setup.config.seed, purpose, round)

        down = self.sim.place.send(self.setup.method, send, self.sim.state.server, torch.tensor(ids), draw)
        return self.setup.task.sent(down)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
