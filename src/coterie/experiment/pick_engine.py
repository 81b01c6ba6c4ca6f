"""Pick the engine of a run, or of several runs in lockstep. The choice is written into the run folder, and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.compute.availability import unavailable
from coterie.compute.cache import folder
from coterie.compute.compiled import Outcome
from coterie.compute.cpu import cores
from coterie.core import client_rows, tree
from coterie.core.errors import CoterieError
from coterie.core.units import parse_bytes
from coterie.data import Federation
from coterie.engine import Choice, Engine, Probe, Rows, choose, shape
from coterie.engine.autotune import shaped
from coterie.engine.process_pool import can_fork
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.methods.fields import AnyMethod
from coterie.profiling import timed
from coterie.storage import files
from coterie.storage.run_folder import RunFolder


class Work(NamedTuple):
    """Hold the arguments of `Engine.map`."""

    fn: Callable[..., Any]
    federation: Federation
    ids: Sequence[int]
    rows_of: Callable[[list[int]], Rows]
    purpose: str


class RunStart(NamedTuple):
    """Describe a run that is about to train, so that an engine can be picked for it."""

    setup: Setup
    sim: Simulation
    folder: RunFolder | None
    rounds: int  # to go

    def probe(self) -> Work:
        """Return the work that `choose` times."""
        fn, ids, rows_of = self.sim.probe()
        return Work(fn, self.sim.federation, ids, rows_of, "probe")


def stacked_shape(setup: Setup, sim: Simulation, participants: int) -> tuple[int, tuple[int, int]]:
    """Return the shape of a stacked engine: clients at once, and lanes without and with compiling."""
    model = tree.nbytes(setup.task.init())
    client = tree.nbytes(client_rows.take(sim.state.clients, 0)) + 4 * model
    sizes = [sim.plan.num_steps(len(split.train)) for split in sim.federation.clients.values()]
    # As many chunks as there are cores, however many workers there are: that changes nothing, bit for bit (law 11).
    parts = cores() if can_fork() else 1
    return shape(sizes, client, model, participants, parse_bytes(setup.config.memory), parts)


@dataclass
class Choices:
    """Remember the engines chosen for similar runs, such as those of a comparison, so that each is measured once.

    Attributes:
        repeats: how often each method runs. Compiling must save time over all of these runs together.
        methods: how many methods run. The compiler is started once for all of them.
        agreed: which kinds of candidates of a search compute side by side what they compute alone.
    """

    repeats: int = 1
    methods: int = 1
    agreed: dict[Hashable, bool] = field(default_factory=dict)
    _known: dict[Hashable, list[tuple[AnyMethod, Choice]]] = field(default_factory=dict)

    def add(self, start: RunStart, choice: Choice) -> None:
        """Remember what was chosen for a run."""
        self._known.setdefault(_kind(start), []).append((start.setup.method, choice))

    def same(self, start: RunStart) -> Choice | None:
        """Return what was chosen for the same method with another seed."""
        return next((choice for method, choice in self._like(start) if method == start.setup.method), None)

    def replayed(self, start: RunStart) -> Choice | None:
        """Return what was chosen for another method, if C++ repeats its steps: nothing else is as fast."""
        return next((choice for _, choice in self._like(start) if choice.engine.threads), None)

    def _like(self, start: RunStart) -> list[tuple[AnyMethod, Choice]]:
        return self._known.get(_kind(start), [])


def _kind(start: RunStart) -> Hashable:
    """Return what the fastest engine depends on, except the method and how many examples each client has."""
    config, sim = start.setup.config, start.sim
    asked = (config.engine, config.compile, config.workers, config.memory, config.device)
    return sim.task, sim.plan, len(sim.federation.names), sim.participants, start.rounds, asked


@timed("choose")
def pick_engine(
    runs: Sequence[RunStart],
    probe: Callable[[], Work],
    say: Callable[[str], None],
    choices: Choices | None = None,
    otherwise: Callable[[], float] | None = None,
) -> Engine:
    """Pick the engine of a run, or of runs in lockstep.

    It is the engine that a resumed run began with, else the one that the configuration asks for, else the fastest.

    Args:
        runs: one run, or those in lockstep.
        probe: makes the work that engines are timed on.
        say: receives a line about the choice.
        choices: engines already chosen for similar runs; this choice is added.
        otherwise: as for `choose`.

    Returns:
        The engine, fitted to the number of clients in a round.
    """
    start, choices = runs[0], choices or Choices()
    paths = [run.folder.path / "engine.json" for run in runs if run.folder]
    participants = sum(run.sim.participants for run in runs)
    if paths and paths[0].exists():
        engine = Engine(**files.read_json(paths[0])["engine"]).fitted(participants)
        if engine.compiled and (why := unavailable()):
            _say_slower(paths, why, say)
        return engine
    chunk, lanes = stacked_shape(start.setup, start.sim, participants)
    choice = choices.same(start)
    if choice is None:
        choice = _chosen(runs, probe, chunk, lanes, choices, otherwise)
        choices.add(start, choice)
    engine = shaped(choice.engine, chunk, lanes, participants)
    notes = list(choice.notes)
    if choice.status.path != "plain" and (why := folder().why_temporary):
        notes.append(why)
    about = {
        "engine": {f.name: getattr(engine, f.name) for f in dataclasses.fields(Engine) if f.name[0] != "_"},
        "microseconds_a_client_step": {name: round(value, 1) for name, value in choice.microseconds.items()},
        "steps": {"path": choice.status.path, "why": choice.status.why, "torch": str(torch.__version__)},
        "notes": notes,
    }
    for path in paths:
        files.write_json(path, about)
    say(f"{start.setup.config.method}: {engine.describe()}" + _in_words(choice.status, notes))
    return engine


def _chosen(
    runs: Sequence[RunStart],
    probe: Callable[[], Work],
    chunk: int,
    lanes: tuple[int, int],
    choices: Choices,
    otherwise: Callable[[], float] | None,
) -> Choice:
    """Choose an engine; measure only what the configuration and earlier choices leave open."""
    setup, config = runs[0].setup, runs[0].setup.config
    kind, compiled, workers = config.engine, config.compile, config.workers
    # Whether a step can be compiled, and whether the workers can be threads, is found out by `choose`.
    if kind != "auto" and compiled is False and workers is not None:
        status = Outcome("plain", "compiling was switched off")
        return Choice(Engine(kind, False, chunk, workers, lanes[0]), {}, status=status)
    repeats = -(-choices.repeats // len(runs))
    work = probe()
    measure = functools.partial(
        choose,
        Probe(work.fn, work.federation, list(work.ids), work.rows_of),
        client_steps=repeats * sum(run.sim.client_steps(run.rounds) for run in runs),
        rounds=repeats * runs[0].rounds,
        chunk=chunk,
        lanes=lanes,
        convolves=setup.task.convolves,
        alike=choices.methods,
        otherwise=otherwise,
    )
    if (before := choices.replayed(runs[0])) is not None:
        # Compiling saved time for that method, so it does for this one. If C++ repeats its steps too, nothing is timed.
        with contextlib.suppress(CoterieError):  # this method's clients cannot be stacked
            choice = measure(workers=before.engine.workers, kinds=("stacked",), compiled=True)
            if choice.engine.threads:
                return choice
    return measure(workers=workers, kinds=("loop", "stacked") if kind == "auto" else (kind,), compiled=compiled)


def _in_words(status: Outcome, notes: list[str]) -> str:
    """Return what a user should know about the engine that was picked, beside its description."""
    reasons = [status.why] if status.why and status.why not in notes else []
    return "".join(f"; {each}" for each in [*reasons, *notes])


def _say_slower(paths: Sequence[Path], why: str, say: Callable[[str], None]) -> None:
    """Say, and note in engine.json, that a run which began with compiled steps continues without them."""
    words = f"continued without compiling, so rounding differs from here on: {why}"
    for path in paths:
        about = files.read_json(path)
        about["notes"] = [*(note for note in about.get("notes", []) if note != words), words]
        files.write_json(path, about)
    say(words)
