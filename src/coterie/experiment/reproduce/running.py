"""Runs what is missing of tables, seeds in lockstep, and stops when a budget of time is spent."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.core import tree
from coterie.core.errors import ConfigError, CoterieError
from coterie.data.loading import reading_once
from coterie.experiment.config import Config
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.reproduce.cache import Cache, record_of
from coterie.experiment.reproduce.identity import Identity, Record, identify, settled
from coterie.experiment.reproduce.tables import Entry, Size, Table
from coterie.experiment.result import Result
from coterie.experiment.run import run_setup
from coterie.experiment.setup import Setup, prepare
from coterie.experiment.several.lockstep import Run, group_by_engine, run_in_lockstep, seeds_at_once, share_pool

_UNITS = {"s": 1, "m": 60, "h": 3600}


class BudgetSpent(CoterieError):
    """The time that was given is over. What is done so far is kept."""


class Budget:
    """Measure how much is left of the time that was given; None: as much as it takes."""

    def __init__(self, seconds: float | None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        """Raise `BudgetSpent` if nothing is left."""
        if self.end is not None and time.monotonic() > self.end:
            raise BudgetSpent("the time that was given is over; the same command continues")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m or 2h.

    Raises:
        ConfigError: the text is not one.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError([f"budget = '{text}': give a time such as 90s, 30m or 2h"])
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True)
class _Stopping:
    """Pass on news of runs, and stop them at the end of a round if the budget is spent."""

    inner: Progress
    budget: Budget

    def say(self, text: str) -> None:
        self.inner.say(text)

    def start(self, label: str, done: int, rounds: int) -> None:
        self.inner.start(label, done, rounds)

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.inner.round(record, metric)
        self.budget.check()

    def stop(self) -> None:
        self.inner.stop()


@dataclass(frozen=True)
class Request:
    """Say which runs are wanted of a table.

    Attributes:
        table: the table.
        size: full or small.
        seeds: so many, counting from 0; None: as many as the table has.
        rounds: fewer rounds than the table has; None: as many.
    """

    table: Table
    size: Size = "full"
    seeds: int | None = None
    rounds: int | None = None

    def numbers(self) -> range:
        """Return the seeds."""
        return range(self.table.seeds_at(self.size) if self.seeds is None else self.seeds)

    def config(self, entry: Entry, seed: int) -> Config:
        """Return the configuration of one run."""
        settings = self.table.settings_of(entry, self.size, self.rounds)
        return settled(entry.method, {**settings, "seed": seed})[0]

    def wanted(self, entry: Entry) -> dict[int, Identity]:
        """Return what each seed's result is of."""
        seeds, first = self.numbers(), self.config(entry, 0)
        return {seed: identify(first.model_copy(update={"seed": seed})) for seed in seeds}

    def missing(self, entry: Entry, cache: Cache) -> dict[int, str]:
        """Return the keys of those that are not there, or of older code, by seed."""
        return {seed: each.key for seed, each in self.wanted(entry).items() if not cache.has(each)}

    def done(self, cache: Cache) -> tuple[int, int]:
        """Return how many of the table's results are there, and how many there are in all."""
        wanted = [each for entry in self.table.entries for each in self.wanted(entry).values()]
        return sum(map(cache.has, wanted)), len(wanted)

    def records(self, entry: Entry, cache: Cache, *, whole: bool = False) -> dict[int, Record]:
        """Return the results of an entry that are there, by seed; `whole`: those with all evaluated rounds."""
        found = {seed: cache.find(each, whole=whole) for seed, each in self.wanted(entry).items()}
        return {seed: record for seed, record in found.items() if record is not None}


def run_missing(request: Request, cache: Cache, tell: Progress, budget: Budget) -> None:
    """Run what is missing of a table. All that is complete is kept, whatever stops the rest.

    Raises:
        BudgetSpent: the time is over.
        CoterieError: training diverged, or data are missing.
    """
    with reading_once():
        for entry in request.table.entries:
            todo = request.missing(entry, cache)
            if todo:
                budget.check()
                run_seeds(request, entry, todo, cache, _Stopping(tell, budget), budget)


def run_seeds(
    request: Request, entry: Entry, todo: dict[int, str], cache: Cache, tell: Progress, budget: Budget
) -> None:
    """Run these seeds of an entry, in lockstep where that is faster and memory allows."""
    settings = request.table.settings_of(entry, request.size, request.rounds)
    seeds = list(todo)
    first = _prepare(entry, settings, seeds[0])
    number = seeds_at_once([first], len(seeds))
    choices = Choices(len(seeds))
    for some in (seeds[start : start + number] for start in range(0, len(seeds), number)):
        budget.check()
        setups = [first if seed == seeds[0] else _prepare(entry, settings, seed) for seed in some]
        joined = share_pool(setups) if len(setups) > 1 else None
        runs = [_run(entry, setup, cache.unfinished(todo[setup.config.seed])) for setup in joined or setups]
        for group in group_by_engine(runs) if joined else [[run] for run in runs]:
            _run_group(entry, group, todo, cache, tell, choices)


def _prepare(entry: Entry, settings: dict[str, Any], seed: int) -> Setup:
    setup = prepare(entry.method, **{**settings, "seed": seed, "reference": False, "report": False})
    # Checkpoints every ten rounds: a run that is stopped writes one in any case.
    return replace(setup, config=setup.config.model_copy(update={"checkpoint_every": 10}))


def _run(entry: Entry, setup: Setup, folder: Path) -> Run:
    return Run(f"{entry.label} seed {setup.config.seed}", setup, folder, (folder / "config.toml").exists())


def _run_group(
    entry: Entry, runs: Sequence[Run], todo: dict[int, str], cache: Cache, tell: Progress, choices: Choices
) -> None:
    if len(runs) == 1:
        name, setup, folder, begun, _ = runs[0]
        tell.say(name)
        results = [run_setup(setup, folder, progress=tell, resuming=begun, report=False, choices=choices)]
    else:
        seeds = ", ".join(str(run.setup.config.seed) for run in runs)
        tell.say(f"{entry.label} seeds {seeds}")
        results = run_in_lockstep(f"{entry.label} seeds {seeds}", runs, tell, choices)
    for run, result in zip(runs, results, strict=True):
        _keep(run, result, todo[run.setup.config.seed], cache)


def _keep(run: Run, result: Result, key: str, cache: Cache) -> None:
    cache.write(key, record_of(result, run.setup.config, tree.nbytes(run.setup.task.init())))
    if run.folder is not None:
        shutil.rmtree(run.folder, ignore_errors=True)
