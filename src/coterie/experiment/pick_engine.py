"""Which engine runs a run, or several runs abreast; the choice is written into the run folder, and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from coterie import paged, tree
from coterie.data import Federation
from coterie.engine import Choice, Engine, choose, shape
from coterie.engine.team import Rows
from coterie.engine.workers import can_fork
from coterie.experiment import files
from coterie.experiment.config import parse_bytes
from coterie.experiment.folder import RunFolder
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.processor import cores
from coterie.spans import timed


class Work(NamedTuple):
    """What `Engine.map` is asked for."""

    fn: Callable[..., Any]
    federation: Federation
    ids: Sequence[int]
    rows_of: Callable[[list[int]], Rows]
    purpose: str


class Begin(NamedTuple):
    """A run before its first round."""

    setup: Setup
    sim: Simulation
    folder: RunFolder | None
    rounds: int  # to go

    def probe(self) -> Work:
        """What `choose` measures."""
        fn, ids, rows_of = self.sim.probe()
        return Work(fn, self.sim.federation, ids, rows_of, "probe")


def stacked_shape(setup: Setup, sim: Simulation, participants: int) -> tuple[int, tuple[int, int]]:
    """(clients at once, lanes without and with compiling) of a stacked engine."""
    model = tree.nbytes(setup.task.init())
    client = tree.nbytes(paged.take(sim.state.clients, 0)) + 4 * model
    sizes = [sim.plan.num_steps(len(split.train)) for split in sim.federation.clients.values()]
    # As many chunks as there are cores, however many workers there are: that changes nothing, bit for bit (law 11).
    parts = cores() if can_fork() else 1
    return shape(sizes, client, model, participants, parse_bytes(setup.config.memory), parts)


@timed("choose")
def pick_engine(runs: Sequence[Begin], probe: Callable[[], Work], say: Callable[[str], None]) -> Engine:
    """The engine of a run, or of runs abreast: the one it began with, the one asked for, or the fastest measured."""
    setup, sim, _, rounds = runs[0]
    config = setup.config
    paths = [run.folder.path / "engine.json" for run in runs if run.folder]
    participants = sum(run.sim.participants for run in runs)
    if paths and paths[0].exists():
        return Engine(**files.read_json(paths[0])["engine"]).fitted(participants)
    chunk, lanes = stacked_shape(setup, sim, participants)
    kind, compiled, workers = config.engine, config.compile, config.workers
    # Stacked and compiled, it is to be found out whether the workers are threads.
    if kind == "auto" or compiled is None or workers is None or (kind == "stacked" and compiled):
        fn, federation, ids, rows_of, _ = probe()
        choice = choose(
            fn,
            federation,
            list(ids),
            rows_of,
            client_steps=sum(run.sim.client_steps(run.rounds) for run in runs),
            rounds=rounds,
            chunk=chunk,
            lanes=lanes,
            workers=workers,
            kinds=("loop", "stacked") if kind == "auto" else (kind,),
            compiled=compiled,
            convolves=setup.task.convolves,
        )
    else:
        choice = Choice(Engine(kind, compiled, chunk, workers, lanes[compiled]), {})
    told = {
        field.name: getattr(choice.engine, field.name) for field in dataclasses.fields(Engine) if field.name[0] != "_"
    }
    measured = {name: round(value, 1) for name, value in choice.microseconds.items()}
    for path in paths:
        files.write_json(path, {"engine": told, "microseconds_a_client_step": measured, "notes": list(choice.notes)})
    say(f"{config.method}: {choice.engine.describe()}" + "".join(f"; {note}" for note in choice.notes))
    return choice.engine
