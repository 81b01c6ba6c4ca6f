"""Train candidates: from where they were to the end of a rung, scored on validation examples alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coterie.compute.compiled import compilations
from coterie.core.errors import CoterieError
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import Engine
from coterie.evaluation.metrics import average
from coterie.experiment.config import parse_bytes
from coterie.experiment.pick_engine import Choices, RunStart, pick_engine
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import DIVERGED, Simulation
from coterie.experiment.tuning.journal import Point
from coterie.experiment.tuning.space import Values
from coterie.storage.paged_rows import Store
from coterie.storage.run_folder import RunFolder


class Trainee(NamedTuple):
    """A candidate that is about to train."""

    setup: Setup  # on a federation from `without_test`
    states: RunFolder  # where its state is kept between rungs
    values: Values
    done: int  # the rounds it has trained for


class Trained(NamedTuple):
    """What a candidate did in a rung."""

    curve: tuple[Point, ...]
    seconds: float
    diverged: str  # why training stopped; empty: it did not


class Train(Protocol):
    """Trains candidates as `train_until` does, in this process or at the sites."""

    def __call__(self, trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]: ...


def without_test(federation: Federation) -> Federation:
    """Return the federation without its test examples: a search cannot look at what it does not have.

    Every client needs some test example, so its first validation example stands there; nobody reads its score.
    """
    clients = {name: Split(own.train, own.validation, own.validation[:1]) for name, own in federation.clients.items()}
    return replace_unchecked(federation, clients=clients)


@dataclasses.dataclass
class Engines:
    """Pick the engine for the candidates of a method: once, if they share their compiled steps.

    Candidates that differ in what is part of a step's code (a step size of its own, a choice of words) each need a
    compiled step of their own. Then a second choice is made, in which compiling has to pay within one candidate.
    """

    rounds: int  # that all candidates of a method train for
    each: int  # that one of them trains for on average
    choices: Choices
    say: Callable[[str], None]
    _engine: Engine | None = None
    _compiled: list[int] = dataclasses.field(default_factory=list)  # steps compiled before each candidate
    _settled: bool = False

    def engine(self, setup: Setup, sim: Simulation) -> Engine:
        """Return the engine for a candidate that is about to train."""
        self._compiled.append(compilations())
        if self._engine is None:
            self._engine = self._picked(setup, sim, self.rounds, self.choices)
        elif self._engine.compiled and not self._settled and len(self._compiled) > 2:
            self._settled = True
            if self._compiled[-1] > self._compiled[-2]:  # the second candidate compiled steps of its own
                self._engine = self._picked(setup, sim, self.each, Choices())
        return self._engine.fitted(sim.participants)

    def _picked(self, setup: Setup, sim: Simulation, rounds: int, choices: Choices) -> Engine:
        start = RunStart(setup, sim, None, rounds)
        return pick_engine([start], start.probe, self.say, choices)


def train_until(trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]:
    """Train candidates to the end of round `until`.

    Args:
        trainees: the candidates.
        until: the last round of this rung.
        engines: picks their engines.
        keep: write their states at the end, since they may go on.

    Returns:
        What each of them did.
    """
    return [_train(each.setup, each.states, each.done, until, engines, keep=keep) for each in trainees]


def _train(setup: Setup, states: RunFolder, done: int, until: int, engines: Engines, *, keep: bool) -> Trained:
    begin = time.perf_counter()
    config, federation = setup.config, setup.federation
    store = Store(parse_bytes(config.memory) // 2, states.path / "checkpoints")
    schedule = config.plan(), config.participants(len(federation.names)), config.seed
    sim = Simulation.start(setup.method, setup.task, federation, *schedule, place=setup.peers, store=store)
    sim.heard = config.clients_heard
    if done:
        sim.state, _ = states.load(done, sim.state)
    curve: list[Point] = []
    diverged = ""
    try:
        engine = engines.engine(setup, sim)
        for number in range(done + 1, until + 1):
            sim.train(number, engine)
            if number % config.evaluate_every == 0 or number == until:
                scores = sim.evaluate(number, engine, own_only=True)["validation"]
                curve.append(point_of(number, setup, scores))
        if keep:
            states.save(until, sim.state, None)
    except CoterieError as error:
        if not str(error).startswith(DIVERGED):
            raise
        diverged = str(error)
    return Trained(tuple(curve), time.perf_counter() - begin, diverged)


def point_of(round: int, setup: Setup, scores: Mapping[str, Any]) -> Point:
    """Return what a search keeps of the clients' validation scores after a round."""
    value, loss = (average(scores[name], setup.config.average) for name in (setup.metric, "loss"))
    return Point(round, value, loss)


def best_of(curve: tuple[Point, ...], sign: int) -> Point | None:
    """Return the point that a run with this curve would select: the best by its metric, the first of equal ones."""
    known = [point for point in curve if not math.isnan(point.value)]
    return max(known, key=lambda point: sign * point.value, default=None)
