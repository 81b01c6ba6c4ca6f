"""Run the seeds of a comparison in lockstep, with their clients stacked together.

Each run is an ordinary one in a thread of its own, with its own folder, checkpoints and results. The threads take
turns (`turns.py`), and what they ask their engine for is done as one piece of work on the clients of all seeds
(`merged.py`). A client computes the same as in a run alone, up to float rounding, as between chunks of any size.

So that clients of different seeds can share a chunk, the runs must have the same task (but for its initial values),
method and schedule, and one pool of examples: `share_pool` lays the pools end to end where they differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.units import parse_bytes
from coterie.data.federation import Federation, Split, replace_unchecked
from coterie.engine import chunk_size
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.result import Result
from coterie.experiment.run import run_setup
from coterie.experiment.scored_examples import EVALUATION_BYTES
from coterie.experiment.setup import Setup
from coterie.experiment.several.merged import MergedFederation
from coterie.experiment.several.turns import RunThread, take_turns
from coterie.experiment.stopping import Stop
from coterie.storage import files


def seeds_at_once(setups: Sequence[Setup], seeds: int) -> int:
    """Return how many seeds of these methods to run in lockstep: as many as a chunk and --memory have room for.

    Returns:
        At least 1, which means one after another.
    """
    config, federation, task = setups[0].config, setups[0].federation, setups[0].task
    if seeds == 1 or config.engine == "loop" or config.track or setups[0].held_out or setups[0].mixed:
        return 1
    participants, model = config.participants(len(federation.names)), tree.nbytes(task.init())
    client = max(tree.nbytes(setup.method.init_client(task.init())) for setup in setups)
    room = chunk_size(client + 4 * model, model, participants * seeds, parse_bytes(config.memory)) // participants
    return max(1, min(room, memory_for(setups)))


def memory_for(setups: Sequence[Setup]) -> int:
    """Return for how many runs of these methods at a time --memory has room; 0 if not even for one."""
    config, federation, task = setups[0].config, setups[0].federation, setups[0].task
    size, model = len(federation.names), tree.nbytes(task.init())
    client = max(tree.nbytes(setup.method.init_client(task.init())) for setup in setups)
    # A run holds three states: the current, the best and the next one. The server's may have a row per client, too.
    held = federation.x.nbytes + federation.y.nbytes + 3 * size * (client + model)
    held += min(EVALUATION_BYTES, 4 * federation.x.numel())  # the examples that are evaluated, decoded
    return parse_bytes(config.memory) // held


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
    groups = federation.groups
    if groups is not None:
        own_groups, groups = groups, np.zeros(len(x), np.int64)
        groups[start : start + len(own_groups)] = own_groups
    return replace_unchecked(federation, x=x, y=y, clients=clients, weights=weights, groups=groups)


class Run(NamedTuple):
    """Describe a run that is to be done."""

    label: str
    setup: Setup  # in lockstep, from `share_pool`
    folder: Path | None
    resuming: bool
    until: Stop | None = None  # stop as another run did


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
    works = [functools.partial(_do, run, together.of(k)) for k, run in enumerate(runs)]
    return take_turns(works, lambda asked: merged.answer(asked, together.say))


def _do(run: Run, tell: Progress, thread: RunThread) -> Result:
    how: dict[str, Any] = {"progress": tell, "resuming": run.resuming, "report": False, "until": run.until}
    try:
        return run_setup(run.setup, run.folder, **how, thread=thread)
    except CoterieError as error:
        if type(error) is not CoterieError:  # others name a file or a setting, which is the same for all
            raise
        raise CoterieError(f"{run.label}: {error}") from error


class MergedProgress:
    """Merge the news of runs in lockstep: the scores of a round are those of the clients of all runs that have it.

    A run that has stopped early, or that was resumed after this round, does not have it.
    """

    def __init__(self, inner: Progress, label: str, number: int) -> None:
        self.inner, self.label, self.number = inner, label, number
        self.begun = self.stopped = 0
        self.records: dict[int, list[dict[str, Any]]] = {}  # of rounds that not all runs have reported yet
        self.reached: dict[int, float] = {}  # the last round of each run; infinity if it has ended
        self.metric = ""

    def of(self, run: int) -> OneOfMerged:
        """Return what receives the news of one of the runs."""
        return OneOfMerged(self, run)

    def say(self, text: str) -> None:
        self.inner.say(text)

    def start(self, run: int, done: int, rounds: int) -> None:
        self.begun += 1
        self.reached[run] = done
        if self.begun == 1:
            self.inner.start(self.label, done, rounds)

    def round(self, run: int, record: dict[str, Any], metric: str) -> None:
        self.reached[run], self.metric = record["round"], metric
        self.records.setdefault(record["round"], []).append(record)
        self._tell()

    def stop(self, run: int) -> None:
        self.stopped += 1
        self.reached[run] = math.inf
        self._tell()
        if self.stopped == self.begun:
            self.inner.stop()

    def _tell(self) -> None:
        """Report the rounds that no run will report any more."""
        over = min((self.reached.get(run, 0) for run in range(self.number)), default=0)
        for number in sorted(number for number in self.records if number <= over):
            self.inner.round(_merge_records(self.records.pop(number)), self.metric)


class OneOfMerged(NamedTuple):
    """Pass on news of one of the merged runs."""

    merged: MergedProgress
    run: int

    def say(self, text: str) -> None:
        self.merged.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.merged.start(self.run, done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.merged.round(self.run, record, metric)

    def stop(self) -> None:
        self.merged.stop(self.run)


def _merge_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge records of the same round: concatenate the lists that have a number per client, and add the seconds."""
    parts = [key for key, value in records[0].items() if isinstance(value, dict) and key != "server"]
    lists = {part: {n: [v for each in records for v in each[part][n]] for n in records[0][part]} for part in parts}
    return {**records[0], **lists, "seconds": sum(each["seconds"] for each in records)}
