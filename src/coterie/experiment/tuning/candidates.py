"""Train candidates: from where they were to the end of a rung, scored on validation examples alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from coterie.compute.compiled import compilations
from coterie.core.errors import CoterieError
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import Engine
from coterie.evaluation.metrics import mean
from coterie.experiment.config import parse_bytes
from coterie.experiment.pick_engine import Choices, RunStart, pick_engine
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import DIVERGED, Simulation
from coterie.experiment.tuning.journal import Point
from coterie.storage.paged_rows import Store
from coterie.storage.run_folder import RunFolder


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


def train_until(
    setup: Setup, states: RunFolder, done: int, until: int, engines: Engines, *, keep: bool
) -> tuple[tuple[Point, ...], float, str]:
    """Train a candidate from the end of round `done` to the end of round `until`.

    Args:
        setup: the candidate's, on a federation from `without_test`.
        states: where its state is kept between rungs.
        done: the rounds it has trained for.
        until: the last round of this rung.
        engines: picks its engine.
        keep: write its state at the end, since it may go on.

    Returns:
        What it scored, the seconds, and why training diverged, if it did.
    """
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
                curve.append(Point(number, mean(scores[setup.metric]), mean(scores["loss"])))
        if keep:
            states.save(until, sim.state, None)
    except CoterieError as error:
        if not str(error).startswith(DIVERGED):
            raise
        diverged = str(error)
    return tuple(curve), time.perf_counter() - begin, diverged


def best_of(curve: tuple[Point, ...], sign: int) -> Point | None:
    """Return the point that a run with this curve would select: the best by its metric, the first of equal ones."""
    known = [point for point in curve if not math.isnan(point.value)]
    return max(known, key=lambda point: sign * point.value, default=None)
