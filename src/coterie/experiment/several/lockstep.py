"""Runs abreast: the seeds of a comparison in step with each other, their clients stacked together.

Each run is the ordinary one, in a thread of its own, with its own folder, checkpoints and results. The threads take
turns, so never two of them run at once: a run goes on until it asks its engine for something (`Seat.map`). When all
have asked, this thread does what they asked for as one piece of work on the clients of all seeds, and they go on. What
a client computes is the same as in a run alone, up to float rounding, as between chunks of any size.

So that clients of different seeds can share a chunk, the runs must have the same task (but for its initial values),
method and schedule, and one pool of examples: `join` lays the pools end to end where they differ.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.data.federation import Federation, Split, unchecked
from coterie.engine import Engine, chunk_size
from coterie.engine.team import Rows
from coterie.engine.workers import all_done
from coterie.errors import CoterieError
from coterie.experiment import files
from coterie.experiment.config import parse_bytes
from coterie.experiment.pick import Begin, Work, pick_engine
from coterie.experiment.result import Result
from coterie.experiment.run import Progress, run_setup
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import POOL
from coterie.tree import Tree

Results = list[tuple[list[int], Tree]]  # of `Engine.map`


def at_once(setups: Sequence[Setup], seeds: int) -> int:
    """How many seeds of these methods to run abreast: as many as a chunk has room for, within --memory; 1 if none."""
    config, federation, task = setups[0].config, setups[0].federation, setups[0].task
    if seeds == 1 or config.engine == "loop" or config.track or setups[0].held_out:
        return 1
    size = len(federation.names)
    participants, model = config.participants(size), tree.nbytes(task.init())
    client = max(tree.nbytes(setup.method.init_client(task.init())) for setup in setups)
    memory = parse_bytes(config.memory)
    room = chunk_size(client + 4 * model, model, participants * seeds, memory) // participants
    # A run holds its state, the best one and the one being made; the server's can have a row for each client, too.
    held = federation.x.nbytes + federation.y.nbytes + 3 * size * (client + model)
    return max(1, min(room, memory // held))


def join(setups: Sequence[Setup]) -> list[Setup] | None:
    """The same setups with one pool of examples, the same one or all end to end; None if they cannot be stacked."""
    first = setups[0]
    if any(_kind(each) != _kind(first) or each.task != first.task for each in setups):
        return None
    pools: list[Federation] = []
    starts: list[int] = []
    for each in setups:
        start = 0
        for pool in pools:
            if _same(pool.x, each.federation.x) and _same(pool.y, each.federation.y):
                break
            start += len(pool.x)
        else:
            pools.append(each.federation)
        starts.append(start)
    x, y = (torch.cat(part) if len(pools) > 1 else part[0] for part in ([p.x for p in pools], [p.y for p in pools]))
    moved = [_moved(each.federation, start, x, y) for each, start in zip(setups, starts, strict=True)]
    return [dataclasses.replace(each, federation=one) for each, one in zip(setups, moved, strict=True)]


def _kind(setup: Setup) -> tuple[Any, ...]:
    """What else must be equal: the shapes of inputs, targets and minibatches."""
    federation = setup.federation
    width = min(setup.config.batch_size, max(len(split.train) for split in federation.clients.values()))
    return width, *((part.shape[1:], part.dtype) for part in (federation.x, federation.y))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def _moved(federation: Federation, start: int, x: Tensor, y: Tensor) -> Federation:
    """The same clients with their examples at `start` in a larger pool."""
    clients = {
        name: Split(split.train + start, split.validation + start, split.test + start)
        for name, split in federation.clients.items()
    }
    weights = federation.weights
    if weights is not None:
        own, weights = weights, weights.new_ones(len(x))
        weights[start : start + len(own)] = own
    return unchecked(federation, x=x, y=y, clients=clients, weights=weights)


class Jobs(NamedTuple):
    """What only writes files: those of all runs are done at once."""

    jobs: Sequence[Callable[[], None]]


Question = Begin | Work | Jobs


class Run(NamedTuple):
    label: str
    setup: Setup  # of `join`
    folder: Path | None
    resuming: bool


class End(NamedTuple):
    """A run has ended."""

    result: Result | None
    error: BaseException | None = None


class Seat:
    """A run's side: it stands for the engine."""

    def __init__(self, run: Run, tell: Progress, number: int) -> None:
        self.number = number  # of runs that share the time
        self._questions: SimpleQueue[Question | End] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, run, tell), daemon=True)
        self._thread.start()

    def engine(self, begun: Begin) -> Engine:
        self.compiled = cast(Engine, self._ask(begun)).compiled
        return cast(Engine, self)  # of an engine, a simulation uses `map`, and whether it compiles

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        return cast(Results, self._ask(Work(fn, federation, ids, rows_of, purpose)))

    def do(self, jobs: Sequence[Callable[[], None]]) -> None:
        own = [functools.partial(contextvars.copy_context().run, job) for job in jobs]  # in another thread, soon
        self._ask(Jobs(own))

    def go_on(self, answer: Any) -> Question | End:
        """Let the run go on until it asks again."""
        self._answers.put(answer)
        return self._questions.get()

    def _ask(self, question: Question) -> Any:
        self._questions.put(question)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self, run: Run, tell: Progress) -> None:
        self._answers.get()  # until it is this run's turn
        try:
            options: dict[str, Any] = {"resuming": run.resuming, "report": False, "seat": self}
            end = End(run_setup(run.setup, run.folder, progress=tell, **options))
        except BaseException as error:
            if type(error) is CoterieError:
                error = CoterieError(f"{run.label}: {error}").with_traceback(error.__traceback__)
            end = End(None, error)
        self._questions.put(end)


def alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Those that begin now, and those that go on with the same engine; a loop gains nothing by company."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        path = run.folder / "engine.json" if run.folder else None
        engine = files.read_json(path)["engine"] if path and path.exists() else {}
        key = f"alone {number}" if engine.get("kind") == "loop" else str(sorted(engine.items()))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def run_abreast(label: str, runs: Sequence[Run], tell: Progress) -> list[Result]:
    """The results of all `runs`. What stops one (Ctrl-C, too) stops all; each can then be gone on with."""
    joint = Joint([run.setup.federation for run in runs])
    together = Chorus(tell, label, len(runs))
    seats = [Seat(run, together, len(runs)) for run in runs]
    stop = Interrupt()
    asked: list[Question | End] = []
    answers: list[Any] = [None] * len(seats)
    while True:
        with stop.postponed():
            turns = zip(seats, asked or seats, answers, strict=True)
            asked = [each if isinstance(each, End) else seat.go_on(answer) for seat, each, answer in turns]
        ends = [each for each in asked if isinstance(each, End)]
        error = next((end.error for end in ends if end.error), None)
        if len(ends) == len(asked):
            break
        try:
            stop.heard()
            answers = [error] * len(seats) if error else joint.answer(asked, together.say)
        except BaseException as raised:  # each run leaves a checkpoint before it goes
            answers = [raised] * len(seats)
    if error:
        raise error
    stop.heard()
    return [cast(Result, end.result) for end in ends]


class Interrupt:
    """Ctrl-C, which must not break into the giving and taking of turns: it is postponed until all have asked."""

    def __init__(self) -> None:
        self._usual = signal.getsignal(signal.SIGINT)
        self._mine = threading.current_thread() is threading.main_thread() and callable(self._usual)
        self._came: list[tuple[int, Any]] = []

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        if not self._mine:
            yield
            return
        signal.signal(signal.SIGINT, lambda *came: self._came.append(came))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._usual)

    def heard(self) -> None:
        """What would have happened when it came."""
        if self._came and callable(self._usual):
            self._usual(*self._came.pop())


class Chorus:
    """A progress for runs abreast, told as one: the scores of a round are those of the clients of all."""

    def __init__(self, inner: Progress, label: str, number: int) -> None:
        self.inner, self.label, self.number = inner, label, number
        self.begun = self.stopped = 0
        self.records: dict[int, list[dict[str, Any]]] = {}  # of rounds that not all runs have told of yet

    def say(self, text: str) -> None:
        self.inner.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.begun += 1
        if self.begun == 1:
            self.inner.start(self.label, done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        told = self.records.setdefault(record["round"], [])
        told.append(record)
        if len(told) == self.number:
            self.inner.round(_told_as_one(self.records.pop(record["round"])), metric)

    def stop(self) -> None:
        self.stopped += 1
        if self.stopped == self.begun:
            self.inner.stop()


def _told_as_one(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Where a record has a list with a number for each client, all of them; the seconds are added up."""
    parts = [key for key, value in records[0].items() if isinstance(value, dict) and key != "server"]
    lists = {part: {n: [v for each in records for v in each[part][n]] for n in records[0][part]} for part in parts}
    return {**records[0], **lists, "seconds": sum(each["seconds"] for each in records)}


class Joint:
    """The clients of all runs as one federation, and the engine that they share."""

    def __init__(self, federations: Sequence[Federation]) -> None:
        named = [(f"{k}/{name}", each) for k, one in enumerate(federations) for name, each in one.clients.items()]
        self.federation = unchecked(federations[0], clients=dict(named))
        self.first = np.cumsum([0, *(len(one.names) for one in federations)]).tolist()  # client of each run
        self.engine = Engine()

    def answer(self, asked: Sequence[Question | End], say: Callable[[str], None]) -> list[Any]:
        answers: list[Any] = [None] * len(asked)
        begun = [each for each in asked if isinstance(each, Begin)]
        if begun:  # then all of them: it is what a run asks first
            self.engine = pick_engine(begun, lambda: self._union(dict(enumerate(each.probe() for each in begun))), say)
            return [self.engine] * len(asked)
        all_done([job for each in asked if isinstance(each, Jobs) for job in each.jobs])
        works = {k: each for k, each in enumerate(asked) if isinstance(each, Work)}
        for purpose in dict.fromkeys(work.purpose for work in works.values()):
            alike = {k: work for k, work in works.items() if work.purpose == purpose}
            # On a pool of all test examples there is much to do at once anyway, and the pools differ in size.
            for some in [{k: work} for k, work in alike.items()] if purpose == POOL else [alike]:
                for k, results in self._map(some).items():
                    answers[k] = results
        return answers

    def _map(self, works: dict[int, Work]) -> dict[int, Results]:
        fn, federation, ids, rows_of, purpose = self._union(works)
        mapped = self.engine.map(fn, federation, ids, rows_of, purpose=purpose)
        results: dict[int, Results] = {k: [] for k in works}
        for group, rows in mapped:
            for k, own, at in self._owners(group):
                results[k].append((own, tree.rows(rows, torch.tensor(at))))  # copied: all others ask before it is used
        return results

    def _union(self, works: dict[int, Work]) -> Work:
        ids = [self.first[k] + i for k, work in works.items() for i in work.ids]

        def rows_of(group: list[int]) -> Rows:
            parts, places = [], list[int]()
            for k, own, at in self._owners(group):
                parts.append(works[k].rows_of(own))
                places += at
            return _joined(parts, torch.tensor(places).argsort())

        first = next(iter(works.values()))
        return Work(first.fn, self.federation, ids, rows_of, first.purpose)

    def _owners(self, group: list[int]) -> list[tuple[int, list[int], list[int]]]:
        """For each run that has clients in `group`: (which, its clients by their numbers in it, their places)."""
        run = (np.searchsorted(self.first, group, side="right") - 1).tolist()
        at = {k: [place for place, owner in enumerate(run) if owner == k] for k in sorted(set(run))}
        return [(k, [group[place] - self.first[k] for place in places], places) for k, places in at.items()]


def _joined(parts: list[Rows], order: Tensor) -> Rows:
    """The rows of several runs as one, in `order`; shorter ones are filled up."""
    if len(parts) == 1:
        return parts[0]
    rows = tree.map(lambda *leaf: _end_to_end(leaf)[order], *(rows for rows, _ in parts))
    each = [batches for _, batches in parts]
    index, key = (_end_to_end([getattr(b, name) for b in each])[order] for name in ("index", "key"))
    mask = _end_to_end([b.mask for b in each], filled=0.0)[order]
    count = torch.cat([b.count for b in each])[order]
    return rows, Batches(each[0].x, each[0].y, index, mask, key, count)


def _end_to_end(leaves: Sequence[Tensor], filled: float | None = None) -> Tensor:
    """[clients of all, ...]: leaves that are shorter along another axis are filled up, by their last if not `filled`.

    These are positions of examples: minibatches that a client does not have, which are masked out, and examples to
    evaluate, whose outputs are not read.
    """
    shape = [max(sizes) for sizes in zip(*(leaf.shape[1:] for leaf in leaves), strict=True)]
    wide = []
    for leaf in leaves:
        for axis, size in enumerate(shape, 1):
            if missing := size - leaf.shape[axis]:
                last = leaf.narrow(axis, leaf.shape[axis] - 1, 1)
                last = last if filled is None else torch.full_like(last, filled)
                leaf = torch.cat([leaf, last.expand(*last.shape[:axis], missing, *last.shape[axis + 1 :])], axis)
        wide.append(leaf)
    return torch.cat(wide)
