"""Run the seeds of a comparison in lockstep, with their clients stacked together.

Each run is an ordinary one in a thread of its own, with its own folder, checkpoints and results. The threads take
turns, so no two of them compute at once: a run continues until it asks its engine for something (`RunThread.map`).
When all have asked, the main thread does what they asked for as one piece of work on the clients of all seeds, and
then lets them continue. A client computes the same as in a run alone, up to float rounding, as between chunks of any
size.

So that clients of different seeds can share a chunk, the runs must have the same task (but for its initial values),
method and schedule, and one pool of examples: `share_pool` lays the pools end to end where they differ.
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

from coterie.core import tree
from coterie.core.batches import Batches, Withheld
from coterie.core.errors import CoterieError
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import ClientRunner, Engine, Rows, chunk_size
from coterie.engine.engine import Results
from coterie.engine.fork_jobs import do_all
from coterie.experiment.config import parse_bytes
from coterie.experiment.pick_engine import Choices, RunStart, Work, pick_engine
from coterie.experiment.progress import Progress
from coterie.experiment.result import Result
from coterie.experiment.run import run_setup
from coterie.experiment.scored_examples import EVALUATION_BYTES
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import POOL_PURPOSE
from coterie.storage import files


def seeds_at_once(setups: Sequence[Setup], seeds: int) -> int:
    """Return how many seeds of these methods to run in lockstep: as many as a chunk and --memory have room for.

    Returns:
        At least 1, which means one after another.
    """
    config, federation, task = setups[0].config, setups[0].federation, setups[0].task
    if seeds == 1 or config.engine == "loop" or config.track or setups[0].held_out:
        return 1
    size = len(federation.names)
    participants, model = config.participants(size), tree.nbytes(task.init())
    client = max(tree.nbytes(setup.method.init_client(task.init())) for setup in setups)
    memory = parse_bytes(config.memory)
    room = chunk_size(client + 4 * model, model, participants * seeds, memory) // participants
    # A run holds three states: the current, the best and the next one. The server's may have a row per client, too.
    held = federation.x.nbytes + federation.y.nbytes + 3 * size * (client + model)
    held += min(EVALUATION_BYTES, 4 * federation.x.numel())  # the examples that are evaluated, decoded
    return max(1, min(room, memory // held))


def share_pool(setups: Sequence[Setup]) -> list[Setup] | None:
    """Give the setups one pool of examples, in which different pools lie end to end.

    Returns:
        The same setups on the shared pool, or None if their clients cannot be stacked.
    """
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
    """Return what else must be equal for stacking: the shapes of inputs, targets and minibatches."""
    federation = setup.federation
    width = min(setup.config.batch_size, max(len(split.train) for split in federation.clients.values()))
    guard = getattr(getattr(setup.method, "optimizer", None), "guard", None)  # its noise is part of the steps
    return width, guard, *((part.shape[1:], part.dtype) for part in (federation.x, federation.y))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def _moved(federation: Federation, start: int, x: Tensor, y: Tensor) -> Federation:
    """Return the same clients with their examples at `start` in a larger pool."""
    clients = {
        name: Split(split.train + start, split.validation + start, split.test + start)
        for name, split in federation.clients.items()
    }
    weights = federation.weights
    if weights is not None:
        own, weights = weights, weights.new_ones(len(x))
        weights[start : start + len(own)] = own
    return replace_unchecked(federation, x=x, y=y, clients=clients, weights=weights)


class Jobs(NamedTuple):
    """Ask for jobs that only write files; those of all runs are done together."""

    jobs: Sequence[Callable[[], None]]


Request = RunStart | Work | Jobs


class Run(NamedTuple):
    """Describe a run that is to be done."""

    label: str
    setup: Setup  # in lockstep, from `share_pool`
    folder: Path | None
    resuming: bool


class RunEnd(NamedTuple):
    """Report that a run has ended, with a result or an error."""

    result: Result | None
    error: BaseException | None = None


class RunThread(ClientRunner):
    """Run an experiment in a thread of its own.

    To the run, this object is its engine: it passes each request on to the main thread and waits for the answer.
    """

    def __init__(self, run: Run, tell: Progress, number: int) -> None:
        self.number = number  # how many runs share the time
        self._requests: SimpleQueue[Request | RunEnd] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, run, tell), daemon=True)
        self._thread.start()

    def engine(self, start: RunStart) -> ClientRunner:
        """Wait until the engine of all runs has been picked; return what this run uses in its place."""
        self._ask(start)
        return self

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        """Ask for the work of `Engine.map`, and wait for its results."""
        return cast(Results, self._ask(Work(fn, federation, ids, rows_of, purpose)))

    def do(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Ask for jobs that write files, and wait until they are done."""
        own = [functools.partial(contextvars.copy_context().run, job) for job in jobs]  # another thread calls them
        self._ask(Jobs(own))

    def advance(self, answer: Any) -> Request | RunEnd:
        """Let the run continue with the answer to its last request, until its next request or its end."""
        self._answers.put(answer)
        return self._requests.get()

    def _ask(self, request: Request) -> Any:
        self._requests.put(request)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run(self, run: Run, tell: Progress) -> None:
        self._answers.get()  # until it is this run's turn
        try:
            options: dict[str, Any] = {"resuming": run.resuming, "report": False, "thread": self}
            end = RunEnd(run_setup(run.setup, run.folder, progress=tell, **options))
        except BaseException as error:
            if type(error) is CoterieError:
                error = CoterieError(f"{run.label}: {error}").with_traceback(error.__traceback__)
            end = RunEnd(None, error)
        self._requests.put(end)


def group_by_engine(runs: Sequence[Run]) -> list[list[Run]]:
    """Group new runs, and resumed runs with the same engine; those in a loop stay alone, as they gain nothing."""
    groups: dict[str, list[Run]] = {}
    for number, run in enumerate(runs):
        path = run.folder / "engine.json" if run.folder else None
        engine = files.read_json(path)["engine"] if path and path.exists() else {}
        key = f"alone {number}" if engine.get("kind") == "loop" else str(sorted(engine.items()))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def run_in_lockstep(label: str, runs: Sequence[Run], tell: Progress, choices: Choices | None = None) -> list[Result]:
    """Run all `runs` in lockstep. Whatever stops one of them, such as Ctrl-C, stops all; each can then be resumed.

    Args:
        label: names the runs together.
        runs: with setups from `share_pool`, and in one group of `group_by_engine`.
        tell: receives news of the runs, merged into one.
        choices: engines already chosen for similar runs; the one chosen here is added.

    Returns:
        Their results, in order.

    Raises:
        CoterieError: training diverged in one of them, which the message names.
    """
    merged = MergedFederation([run.setup.federation for run in runs], choices)
    together = MergedProgress(tell, label, len(runs))
    threads = [RunThread(run, together, len(runs)) for run in runs]
    stop = Interrupt()
    asked: list[Request | RunEnd] = []
    answers: list[Any] = [None] * len(threads)
    while True:
        with stop.postponed():
            turns = zip(threads, asked or threads, answers, strict=True)
            asked = [each if isinstance(each, RunEnd) else thread.advance(answer) for thread, each, answer in turns]
        ends = [each for each in asked if isinstance(each, RunEnd)]
        error = next((end.error for end in ends if end.error), None)
        if len(ends) == len(asked):
            break
        try:
            stop.deliver()
            answers = [error] * len(threads) if error else merged.answer(asked, together.say)
        except BaseException as raised:  # each run writes a checkpoint before it ends
            answers = [raised] * len(threads)
    if error:
        raise error
    stop.deliver()
    return [cast(Result, end.result) for end in ends]


class Interrupt:
    """Postpone Ctrl-C until all runs have made a request, since it must not come between their turns."""

    def __init__(self) -> None:
        self._usual = signal.getsignal(signal.SIGINT)
        self._mine = threading.current_thread() is threading.main_thread() and callable(self._usual)
        self._came: list[tuple[int, Any]] = []

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Hold back Ctrl-C in this context."""
        if not self._mine:
            yield
            return
        signal.signal(signal.SIGINT, lambda *came: self._came.append(came))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._usual)

    def deliver(self) -> None:
        """Do now what would have been done when Ctrl-C came, if it did."""
        if self._came and callable(self._usual):
            self._usual(*self._came.pop())


class MergedProgress:
    """Merge the news of runs in lockstep: the scores of a round are those of the clients of all runs."""

    def __init__(self, inner: Progress, label: str, number: int) -> None:
        self.inner, self.label, self.number = inner, label, number
        self.begun = self.stopped = 0
        self.records: dict[int, list[dict[str, Any]]] = {}  # of rounds that not all runs have reported yet

    def say(self, text: str) -> None:
        self.inner.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.begun += 1
        if self.begun == 1:
            self.inner.start(self.label, done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        reported = self.records.setdefault(record["round"], [])
        reported.append(record)
        if len(reported) == self.number:
            self.inner.round(_merge_records(self.records.pop(record["round"])), metric)

    def stop(self) -> None:
        self.stopped += 1
        if self.stopped == self.begun:
            self.inner.stop()


def _merge_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge records of the same round: concatenate the lists that have a number per client, and add the seconds."""
    parts = [key for key, value in records[0].items() if isinstance(value, dict) and key != "server"]
    lists = {part: {n: [v for each in records for v in each[part][n]] for n in records[0][part]} for part in parts}
    return {**records[0], **lists, "seconds": sum(each["seconds"] for each in records)}


class MergedFederation:
    """Hold the clients of all runs as one federation, and the engine that they share."""

    def __init__(self, federations: Sequence[Federation], choices: Choices | None = None) -> None:
        self.choices = choices
        named = [(f"{k}/{name}", each) for k, one in enumerate(federations) for name, each in one.clients.items()]
        self.federation = replace_unchecked(federations[0], clients=dict(named))
        self.first = np.cumsum([0, *(len(one.names) for one in federations)]).tolist()  # client of each run
        self.engine = Engine()

    def answer(self, asked: Sequence[Request | RunEnd], say: Callable[[str], None]) -> list[Any]:
        """Return the answer to each run's request, computed for all of them together."""
        answers: list[Any] = [None] * len(asked)
        starts = [each for each in asked if isinstance(each, RunStart)]
        if starts:  # then all of them: an engine is what a run asks for first
            self.engine = pick_engine(starts, lambda: self._union(_probes(starts)), say, self.choices)
            return [self.engine] * len(asked)
        do_all([job for each in asked if isinstance(each, Jobs) for job in each.jobs])
        works = {k: each for k, each in enumerate(asked) if isinstance(each, Work)}
        for purpose in dict.fromkeys(work.purpose for work in works.values()):
            alike = {k: work for k, work in works.items() if work.purpose == purpose}
            # On a pool of all test examples each run has enough work of its own, and the pools differ in size.
            for some in [{k: work} for k, work in alike.items()] if purpose == POOL_PURPOSE else [alike]:
                for k, results in self._map(some).items():
                    answers[k] = results
        return answers

    def _map(self, works: dict[int, Work]) -> dict[int, Results]:
        fn, federation, ids, rows_of, purpose = self._union(works)
        mapped = self.engine.map(fn, federation, ids, rows_of, purpose=purpose)
        results: dict[int, Results] = {k: [] for k in works}
        for group, rows in mapped:
            for k, own, at in self._owners(group):
                results[k].append(
                    (own, tree.rows(rows, torch.tensor(at)))
                )  # copied: the other runs make requests before it is used
        return results

    def _union(self, works: dict[int, Work]) -> Work:
        """Return the work of several runs as one, on the merged federation."""
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
        """Return, for each run with clients in `group`: (its number, its clients' own numbers, their places)."""
        run = (np.searchsorted(self.first, group, side="right") - 1).tolist()
        at = {k: [place for place, owner in enumerate(run) if owner == k] for k in sorted(set(run))}
        return [(k, [group[place] - self.first[k] for place in places], places) for k, places in at.items()]


def _probes(starts: Sequence[RunStart]) -> dict[int, Work]:
    return {k: start.probe() for k, start in enumerate(starts)}


def _joined(parts: list[Rows], order: Tensor) -> Rows:
    """Return the rows of several runs as one, in `order`; shorter ones are padded."""
    if len(parts) == 1:
        return parts[0]
    rows = tree.map(lambda *leaf: _end_to_end(leaf)[order], *(rows for rows, _ in parts))
    each = [batches for _, batches in parts]
    index, key = (_end_to_end([getattr(b, name) for b in each])[order] for name in ("index", "key"))
    mask = _end_to_end([b.mask for b in each], filled=0.0)[order]
    count = torch.cat([b.count for b in each])[order]
    withheld, everyone = (_joined_apart([getattr(b, name) for b in each], order) for name in ("withheld", "everyone"))
    return rows, Batches(each[0].x, each[0].y, index, mask, key, count, withheld, everyone)


def _joined_apart(parts: Sequence[Withheld | tuple[()]], order: Tensor) -> Withheld | tuple[()]:
    """Return the minibatches that several runs have beside those of training as one; nothing if they have none."""
    found = [part for part in parts if isinstance(part, Withheld)]
    if not found:
        return ()
    mask = _end_to_end([part.mask for part in found], filled=0.0)[order]
    return Withheld(_end_to_end([part.index for part in found])[order], mask)


def _end_to_end(leaves: Sequence[Tensor], filled: float | None = None) -> Tensor:
    """Concatenate leaves along their first axis, padding those that are shorter along another axis.

    The padding is `filled` or, if that is None, a repetition of the last entry. It is never used: it stands for
    minibatches that are masked out, or for examples whose outputs are not read.
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
