"""Train candidates: from where they were to the end of a rung, scored on validation examples alone."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coterie.compute.compiled import compilations
from coterie.core.errors import CoterieError
from coterie.core.units import parse_bytes
from coterie.core.user_code import naming_users_line
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import Choice, ClientRunner, Engine
from coterie.engine.autotune import shaped
from coterie.evaluation.metrics import average
from coterie.experiment.divergence import DIVERGED
from coterie.experiment.pick_engine import Choices, RunStart, Work, pick_engine, stacked_shape
from coterie.experiment.setup import Setup
from coterie.experiment.several.lockstep import memory_for
from coterie.experiment.simulation import Simulation
from coterie.experiment.tuning.journal import Point
from coterie.experiment.tuning.side_by_side import agree, kind_of, merged_probe, side_by_side
from coterie.experiment.tuning.space import Values
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

    A step is compiled if that saves time over what the candidates take side by side, which needs no compiling.
    Candidates that differ in what is part of a step's code (a step size of its own, a choice of words) each need a
    compiled step of their own. Then a second choice is made, in which compiling has to pay within one candidate.
    """

    rounds: int  # that all candidates of a method train for
    each: int  # that one of them trains for on average
    choices: Choices
    say: Callable[[str], None]
    _engine: Engine | None = None  # of one candidate
    _beside: Engine | None = None  # of several side by side
    _compiled: list[int] = dataclasses.field(default_factory=list)  # steps compiled before each candidate
    _settled: bool = False
    _unsaid: list[str] = dataclasses.field(default_factory=list)  # on the engine of one, until it is known who trains

    def engine(self, setup: Setup, sim: Simulation) -> Engine:
        """Return the engine for a candidate that is about to train alone."""
        self._compiled.append(compilations())
        if self._engine is None:
            self._engine = self._picked([setup], [sim], self.rounds, self.choices)
        elif self._engine.compiled and not self._settled and len(self._compiled) > 2:
            self._settled = True
            if self._compiled[-1] > self._compiled[-2]:  # the second candidate compiled steps of its own
                self._engine = self._picked([setup], [sim], self.each, Choices())
        if self._engine.compiled:
            return self._engine.fitted(sim.participants)
        return shaped(self._engine, *stacked_shape(setup, sim, sim.participants), sim.participants)

    def may_share(self, setups: Sequence[Setup]) -> bool:
        """Tell whether candidates of one kind may gain by training side by side, and fit into memory together."""
        compiled = self._engine is not None and self._engine.compiled
        looped = setups[0].config.engine == "loop" or (self._beside is not None and self._beside.kind == "loop")
        return len(setups) > 1 and not compiled and not looped and memory_for(setups) >= len(setups)

    def shared(self, setups: Sequence[Setup], sims: Sequence[Simulation], values: Sequence[Values]) -> Engine | None:
        """Return the engine for candidates of one kind side by side; None if they are to train one after another.

        They gain nothing side by side where one client's steps are taken at a time, in a loop or by C++. Compiled steps
        that Python calls would have to be compiled for every number of candidates.
        """
        known = self._engine is not None
        engine = self._shared(setups, sims, values)
        if not known and engine is not None:
            self._unsaid = [f"{setups[0].config.method}: candidates side by side, {engine.describe()}"]
        for words in self._unsaid:
            self.say(words)
        self._unsaid.clear()
        return engine

    def _shared(self, setups: Sequence[Setup], sims: Sequence[Simulation], values: Sequence[Values]) -> Engine | None:
        setup, sim = setups[0], sims[0]
        if self._engine is None:
            otherwise = functools.partial(self._seconds_beside, setups, sims, values)
            say = self._unsaid.append
            self._engine = self._picked([setup], [sim], self.rounds, self.choices, say=say, otherwise=otherwise)
        if not self.may_share(setups) or not self._agree(setups, sims, values):
            return None
        if self._beside is None:
            self._beside = self._engine
            if self._engine.kind == "loop":  # one candidate is too few to be stacked, or its model is large
                self._pick_beside(setups, sims, values)
        if self._beside.kind == "loop":
            return None
        participants = sum(each.participants for each in sims)
        return shaped(self._beside, *stacked_shape(setup, sim, participants), participants)

    def _agree(self, setups: Sequence[Setup], sims: Sequence[Simulation], values: Sequence[Values]) -> bool:
        kind, agreed = (type(setups[0].method), sims[0].task, kind_of(values[0])), self.choices.agreed
        if kind not in agreed:
            agreed[kind] = agree(sims, values)
        return agreed[kind]

    def _seconds_beside(self, setups: Sequence[Setup], sims: Sequence[Simulation], values: Sequence[Values]) -> float:
        """Return how long all candidates take side by side, without compiling; infinity if they cannot."""
        if not self.may_share(setups) or not self._agree(setups, sims, values):
            return math.inf
        choice = self._pick_beside(setups, sims, values)
        if choice is None or choice.engine.kind == "loop" or not choice.microseconds:
            return math.inf
        steps = sims[0].client_steps(self.rounds)
        return steps * min(choice.microseconds.values()) / 1e6 / (choice.engine.workers or 1)

    def _pick_beside(
        self, setups: Sequence[Setup], sims: Sequence[Simulation], values: Sequence[Values]
    ) -> Choice | None:
        probe = functools.partial(merged_probe, sims, values)
        plain, choices, rounds = [_uncompiled(each) for each in setups], Choices(), -(-self.rounds // len(sims))
        self._beside = self._picked(plain, sims, rounds, choices, probe, say=lambda _: None)
        return choices.same(RunStart(plain[0], sims[0], None, rounds))

    def _picked(
        self,
        setups: Sequence[Setup],
        sims: Sequence[Simulation],
        rounds: int,
        choices: Choices,
        probe: Callable[[], Work] | None = None,
        say: Callable[[str], None] | None = None,
        otherwise: Callable[[], float] | None = None,
    ) -> Engine:
        starts = [RunStart(setup, sim, None, rounds) for setup, sim in zip(setups, sims, strict=True)]
        return pick_engine(starts, probe or starts[0].probe, say or self.say, choices, otherwise)


def _uncompiled(setup: Setup) -> Setup:
    return dataclasses.replace(setup, config=setup.config.model_copy(update={"compile": False}))


class Trainee(NamedTuple):
    """A candidate that is about to train."""

    setup: Setup  # on a federation from `without_test`
    states: RunFolder  # where its state is kept between rungs
    values: Values
    done: int  # the rounds it has trained for


class Trained(NamedTuple):
    """What a candidate did in a rung."""

    curve: tuple[Point, ...]
    seconds: float  # its share, if it trained side by side with others
    diverged: str  # why training stopped; empty: it did not


class Train(Protocol):
    """Trains candidates as `train_until` does, in this process or at the sites."""

    def __call__(self, trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]: ...


@naming_users_line()
def train_until(trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]:
    """Train candidates to the end of round `until`, side by side where that is faster.

    Args:
        trainees: the candidates.
        until: the last round of this rung.
        engines: picks their engines.
        keep: write their states at the end, since they may go on.

    Returns:
        What each of them did.
    """
    kinds: dict[Hashable, list[int]] = {}
    for place, trainee in enumerate(trainees):
        kinds.setdefault(kind_of(trainee.values), []).append(place)
    found: dict[int, Trained] = {}
    for places in kinds.values():
        some = [trainees[place] for place in places]
        found |= dict(zip(places, _train_alike(some, until, engines, keep=keep), strict=True))
    return [found[place] for place in range(len(trainees))]


def _train_alike(trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]:
    """Train candidates that differ in numbers only."""
    begin = time.perf_counter()
    setups, values = [each.setup for each in trainees], [each.values for each in trainees]
    if engines.may_share(setups):
        sims = [_begin(trainee) for trainee in trainees]
        engine = engines.shared(setups, sims, values)
        if engine is not None:
            works = [functools.partial(_train, *pair, until, keep) for pair in zip(trainees, sims, strict=True)]
            done = side_by_side(works, sims, values, engine)
            share = (time.perf_counter() - begin) / len(done)
            return [Trained(curve, share, diverged) for curve, diverged in done]
        del sims  # one state at a time
    found = []
    for trainee in trainees:
        sim = _begin(trainee)
        curve, diverged = _train(trainee, sim, until, keep, engines.engine(trainee.setup, sim))
        found.append(Trained(curve, time.perf_counter() - begin, diverged))
        begin = time.perf_counter()
    return found


def _begin(trainee: Trainee) -> Simulation:
    setup, federation = trainee.setup, trainee.setup.federation
    config, states = setup.config, trainee.states
    store = Store(parse_bytes(config.memory) // 2, states.path / "checkpoints")
    schedule = config.plan(), config.participants(len(federation.names)), config.seed
    sim = Simulation.start(setup.method, setup.one_task(), federation, *schedule, place=setup.peers, store=store)
    sim.heard, sim.sampler = config.clients_heard, config.sampler
    if trainee.done:
        sim.state, _ = states.load(trainee.done, sim.state)
    return sim


def _train(
    trainee: Trainee, sim: Simulation, until: int, keep: bool, engine: ClientRunner
) -> tuple[tuple[Point, ...], str]:
    """Train one candidate; return its scores, and why training diverged, if it did."""
    curve: list[Point] = []
    every = trainee.setup.config.evaluate_every
    try:
        for number in range(trainee.done + 1, until + 1):
            sim.train(number, engine)
            if number % every == 0 or number == until:
                scores = sim.evaluate(number, engine, own_only=True)["validation"]
                curve.append(point_of(number, trainee.setup, scores))
        if keep:
            trainee.states.save(until, sim.state, None)
    except CoterieError as error:
        if not str(error).startswith(DIVERGED):
            raise
        return tuple(curve), str(error)
    return tuple(curve), ""


def point_of(round: int, setup: Setup, scores: Mapping[str, Any]) -> Point:
    """Return what a search keeps of the clients' validation scores after a round."""
    value, loss = (average(scores[name], setup.config.average) for name in (setup.metric, "loss"))
    return Point(round, value, loss)


def best_of(curve: tuple[Point, ...], sign: int) -> Point | None:
    """Return the point that a run with this curve would select: the best by its metric, the first of equal ones."""
    known = [point for point in curve if not math.isnan(point.value)]
    return max(known, key=lambda point: sign * point.value, default=None)
