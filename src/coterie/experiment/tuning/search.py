"""Search one method's settings: propose candidates, train them rung by rung, and choose the best on validation data."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError
from coterie.evaluation.benefit import sign_of
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.setup import Setup
from coterie.experiment.tuning.candidates import Engines, Train, Trained, Trainee, best_of, train_until
from coterie.experiment.tuning.halving import Rung, rounds_trained
from coterie.experiment.tuning.journal import Entry, Point, SearchFolder
from coterie.experiment.tuning.propose import SPREAD, Tried, importances, propose
from coterie.experiment.tuning.space import MODEL, Space, Values, defaults_of, in_words, with_values

AT_ONCE = SPREAD + 1  # candidates that are proposed, and trained, together: at first those that depend on no score


@dataclasses.dataclass
class Candidate:
    """One setting of a method, and what it scored so far."""

    number: int
    values: Values
    curve: tuple[Point, ...] = ()
    rungs: int = 0  # done
    seconds: float = 0.0
    diverged: str = ""

    def add(self, entry: Entry) -> None:
        """Take in what was done in one more rung."""
        self.curve, self.rungs = self.curve + entry.curve, entry.rung + 1
        self.seconds, self.diverged = self.seconds + entry.seconds, entry.diverged

    def until(self, round: int) -> tuple[Point, ...]:
        """Return the curve up to a round."""
        return tuple(point for point in self.curve if point.round <= round)


@dataclasses.dataclass
class MethodSearch:
    """The search of one method.

    Attributes:
        label: the name of the method.
        setup: with the method as it is by default, on a federation without test examples.
        space: what is searched.
        rungs: the budget, which is the same for every method.
        candidates: all that were tried, in order.
        engines: picked the candidates' engine; None before the search.
    """

    label: str
    setup: Setup
    space: Space
    rungs: tuple[Rung, ...]
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    engines: Engines | None = None  # that picked the engine of its candidates

    @property
    def metric(self) -> str:
        return self.setup.metric

    def rank(self, candidate: Candidate, rung: int) -> tuple[float, float, int]:
        """Return what candidates are sorted by after a rung: by metric, then by loss, then in order; less is better."""
        sign = sign_of(self.metric)
        best = None if candidate.diverged else best_of(candidate.until(self.rungs[rung].rounds), sign)
        if best is None:
            return math.inf, math.inf, candidate.number
        return -sign * best.value, best.loss, candidate.number

    def leaders(self, rung: int) -> list[Candidate]:
        """Return the candidates that have done a rung, the best first."""
        done = [each for each in self.candidates if each.rungs > rung]
        return sorted(done, key=functools.partial(self.rank, rung=rung))

    @property
    def complete(self) -> bool:
        """Whether all rungs are done."""
        return bool(self.candidates) and len(self.leaders(len(self.rungs) - 1)) >= self.rungs[-1].candidates

    @property
    def chosen(self) -> Candidate:
        """The best candidate of the last rung; if all of them diverged there, the best of the rung before, and so on.

        Raises:
            CoterieError: none of them could be trained.
        """
        for rung in range(len(self.rungs) - 1, -1, -1):
            first = next(iter(self.leaders(rung)), None)
            if first is not None and not math.isinf(self.rank(first, rung)[0]):
                return first
        why = next((each.diverged for each in self.candidates if each.diverged), "no validation score is defined")
        raise CoterieError(f"{self.label}: none of {len(self.candidates)} candidates could be trained ({why})")

    def best(self, candidate: Candidate) -> Point | None:
        """Return the best point of a candidate; None if it has none."""
        return best_of(candidate.curve, sign_of(self.metric))

    @property
    def score(self) -> float:
        """What the chosen candidate scores on validation data."""
        best = self.best(self.chosen)
        return math.nan if best is None else best.value

    @property
    def rounds(self) -> int:
        """How many rounds all candidates trained for together."""
        ends = [0, *(rung.rounds for rung in self.rungs)]
        return sum(ends[each.rungs] for each in self.candidates)

    def chosen_setup(self, setup: Setup) -> Setup:
        """Return `setup`, which has all examples, with what was chosen."""
        return apply(setup, self.chosen.values)

    def tried(self, rung: int = 0) -> list[tuple[Values, float]]:
        """Return the values and scores of all candidates after a rung, of which more is better."""
        done = [each for each in self.candidates if each.rungs > rung]
        return [(each.values, -self.rank(each, rung)[0]) for each in done]

    def importance(self) -> dict[str, float]:
        """Return what share of the variation after the first rung each hyper-parameter explains; {} if unknown."""
        return importances(self.space, self.tried(), self.setup.config.seed) if self.space else {}

    def direction(self, name: str) -> float:
        """Return the rank correlation of a hyper-parameter with the score after the first rung; NaN of words."""
        from scipy.stats import spearmanr

        pairs = [(values[name], score) for values, score in self.tried() if math.isfinite(score)]
        if len(pairs) < 4 or any(isinstance(value, str) for value, _ in pairs):
            return math.nan
        x, y = np.array(pairs, dtype=float).T
        return float(spearmanr(x, y).statistic) if np.ptp(x) and np.ptp(y) else math.nan

    def summary(self) -> dict[str, Any]:
        """Return the search in numbers, for JSON."""
        chosen = self.chosen
        return {
            "space": {name: str(each) for name, each in self.space.items()},
            "rungs": [list(rung) for rung in self.rungs],
            "rounds": self.rounds,
            "chosen": {"candidate": chosen.number, "values": chosen.values, f"validation_{self.metric}": self.score},
            "importance": self.importance(),
            "direction": {name: self.direction(name) for name in self.space},
        }


def apply(setup: Setup, values: Values) -> Setup:
    """Return a setup with the values of a candidate."""
    new = setup.with_method(with_values(setup.method, values))
    model = values.get(MODEL, setup.config.model)
    return new if model == setup.config.model else new.with_model(model)


def run_search(
    search: MethodSearch,
    folder: SearchFolder,
    done: Sequence[Entry],
    tell: Progress,
    choices: Choices,
    train: Train | None = None,
) -> None:
    """Do what is not done yet of a method's search.

    Args:
        search: gets the candidates.
        folder: the journal, and the states of candidates that may go on.
        done: the entries of this method that the journal has.
        tell: receives a "round" for each candidate and rung, numbered by the rounds trained so far.
        choices: engines chosen for other methods.
        train: trains candidates; by default in this process.
    """
    known = {(entry.candidate, entry.rung): entry for entry in done}
    total = rounds_trained(search.rungs)
    engines = search.engines = Engines(total, -(-total // search.rungs[0].candidates), choices, tell.say)
    setup_of = functools.cache(lambda number: apply(search.setup, search.candidates[number].values))
    finished = _rounds_done(search, done)
    tell.start(search.label, finished, total)

    def go_on(numbers: Sequence[int], rung: int) -> None:
        nonlocal finished
        for news in _train(search, numbers, rung, known, folder, setup_of, engines, train or train_until):
            finished += news["rounds"]
            tell.round({**news, "round": finished}, search.metric)

    try:
        first = range(search.rungs[0].candidates)
        for numbers in (first[start : start + AT_ONCE] for start in first[::AT_ONCE]):
            tried = search.tried()
            for number in numbers:
                entry = known.get((number, 0))
                pending = [each.values for each in search.candidates[numbers[0] :]]
                values = entry.values if entry else _values(search, number, tried, pending)
                search.candidates.append(Candidate(number, values))
            go_on(numbers, 0)
        for rung in range(1, len(search.rungs)):
            leaders = search.leaders(rung - 1)
            promoted = [each.number for each in leaders[: search.rungs[rung].candidates]]
            for loser in leaders[search.rungs[rung].candidates :]:
                folder.forget(search.label, loser.number)
            best = search.candidates[promoted[0]]
            tell.say(
                f"{search.label}: {len(promoted)} of {len(leaders)} candidates go on after round "
                f"{search.rungs[rung - 1].rounds}; the best so far has {in_words(best.values)}"
            )
            for start in range(0, len(promoted), AT_ONCE):
                go_on(promoted[start : start + AT_ONCE], rung)
    finally:
        tell.stop()


def _values(search: MethodSearch, number: int, tried: Tried, pending: Sequence[Values]) -> Values:
    if number == 0:
        return defaults_of(search.setup, search.space)
    return propose(search.space, tried, number, search.setup.config.seed, search.label, pending)


def _train(
    search: MethodSearch,
    numbers: Sequence[int],
    rung: int,
    known: Mapping[tuple[int, int], Entry],
    folder: SearchFolder,
    setup_of: Callable[[int], Setup],
    engines: Engines,
    train: Train,
) -> list[dict[str, Any]]:
    """Do a rung of some candidates, unless the journal has it; return news of those that were trained."""
    begun, until = search.rungs[rung - 1].rounds if rung else 0, search.rungs[rung].rounds
    missing = [number for number in numbers if (number, rung) not in known]
    # If a stop has left the lines of some of them, all are trained again: others at their side would round differently.
    alive = [number for number in numbers if not search.candidates[number].diverged] if missing else []
    trainees = [_trainee(search, number, begun, folder, setup_of) for number in alive]
    done = train(trainees, until, engines, keep=rung + 1 < len(search.rungs)) if trainees else []
    results = dict(zip(alive, done, strict=True))
    made = []
    for number in missing:
        candidate = search.candidates[number]
        curve, seconds, diverged = results.get(number, Trained((), 0.0, candidate.diverged))
        curve = tuple(point for point in curve if point.round > begun)
        made.append(Entry(search.label, number, rung, candidate.values, curve, seconds, diverged))
    if made:
        folder.add(made)
    new = {entry.candidate: entry for entry in made}
    for number in numbers:
        search.candidates[number].add(new.get(number) or known[number, rung])
    return [_news(search, entry, until - begun) for entry in made]


def _trainee(
    search: MethodSearch, number: int, begun: int, folder: SearchFolder, setup_of: Callable[[int], Setup]
) -> Trainee:
    states = folder.states(search.label, number)
    start = begun if begun in states.checkpoints() else 0  # a state that was lost is made again
    return Trainee(setup_of(number), states, search.candidates[number].values, start)


def _news(search: MethodSearch, entry: Entry, rounds: int) -> dict[str, Any]:
    best = search.best(search.candidates[entry.candidate])
    news: dict[str, Any] = {"rounds": rounds, "info": {}, "seconds": entry.seconds}
    return news if best is None else {**news, "validation": {search.metric: [best.value]}}


def _rounds_done(search: MethodSearch, done: Sequence[Entry]) -> int:
    ends = [0, *(rung.rounds for rung in search.rungs)]
    return sum(ends[entry.rung + 1] - ends[entry.rung] for entry in done)


def by_method(entries: Sequence[Entry]) -> Mapping[str, list[Entry]]:
    """Group the entries of a journal by method."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.method, []).append(entry)
    return found
