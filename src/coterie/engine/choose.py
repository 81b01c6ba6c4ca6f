"""`auto`: which engine is fastest for this task, by a short measurement on the real thing.

A few real steps are timed one client at a time and stacked. If the work that remains is long enough, the step is
compiled and timed as well. The choice is written into the run folder, and a resumed run keeps it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coterie.batches import Batches
from coterie.data.federation import Federation
from coterie.engine.engine import Engine, Rows, chunks, cores
from coterie.engine.workers import can_fork

COMPILING_TAKES = 15.0  # seconds, about
CACHE = 8 * 2**20  # bytes of parameters that a chunk may hold: beyond, its steps wait for memory
PROBE = 3  # steps of the first look
LOOK = 0.3  # seconds of the second
WORTH_FORKING = 0.1  # seconds a round


@dataclass(frozen=True)
class Choice:
    engine: Engine
    microseconds: dict[str, float]  # a client's step, on one core, for each engine tried
    notes: tuple[str, ...] = ()  # what could not be tried, and why


def choose(
    fn: Callable[..., Any],
    federation: Federation,
    ids: list[int],
    rows_of: Callable[[list[int]], Rows],
    *,
    client_steps: int,
    rounds: int,
    chunk: int,
    workers: int | None,
    kinds: tuple[str, ...] = ("loop", "stacked"),
    compiled: bool | None = None,
) -> Choice:
    """Pick an engine for `client_steps` steps of training in all. `workers` and `compiled` are fixed if given."""
    processes = workers or (cores() if can_fork() else 1)
    candidates = {kind: Engine(kind, chunk=chunk if kind == "stacked" else 1) for kind in kinds}  # type: ignore[arg-type]
    times: dict[str, float] = {}
    notes: list[str] = []

    def measure(name: str, engine: Engine) -> None:
        group = chunks(federation, ids, engine.chunk)[0]
        rows, batches = rows_of(group)
        longest = max(int(batches.mask.any(-1).flatten(1).sum(1).min()), 1)
        steps = min(PROBE, longest)
        try:
            for _ in range(2):  # the first warms up, compiles, and says how many steps make a fair measurement
                short = _first_steps(batches, steps)
                begin = time.perf_counter()
                engine.map(fn, federation, group, functools.partial(_same, (rows, short)), purpose="probe")
                taken = time.perf_counter() - begin
                times[name] = taken / (steps * len(group)) * 1e6
                steps = min(max(steps, round(steps * LOOK / taken)), longest) if not engine.compiled else longest
        except Exception as error:
            times.pop(name, None)
            if name == "loop" or len(kinds) == 1:
                raise
            notes.append(f"{name} cannot run this task ({str(error).splitlines()[0]})")

    if compiled is not True:
        for kind, engine in candidates.items():
            measure(kind, engine)
    seconds = client_steps * min(times.values(), default=float("inf")) / 1e6 / processes
    if compiled is True or (compiled is None and seconds > 2 * COMPILING_TAKES):
        order = sorted(candidates, key=lambda kind: times.get(kind, 0.0 if kind == "stacked" else 1.0))
        best = min(times.values(), default=0.0)
        for kind in order:
            # The second best is worth compiling too only if it is close and there is time to win.
            if compiled or kind == order[0] or (times.get(kind, 1e30) < 2.5 * best and seconds > 8 * COMPILING_TAKES):
                measure(f"{kind}, compiled", replace(candidates[kind], compiled=True))
    winner = min(times, key=lambda name: times[name])
    kind = winner.split(",")[0]
    engine = replace(candidates[kind], compiled="compiled" in winner, chunk=chunk if kind == "stacked" else 1)
    if workers is None:
        a_round = client_steps * times[winner] / 1e6 / max(rounds, 1)
        several = len(chunks(federation, ids, engine.chunk)) > 1
        processes = processes if several and a_round > WORTH_FORKING else 1
    return Choice(replace(engine, workers=processes, _warm=set()), times, tuple(notes))


def chunk_size(client_bytes: int, model_bytes: int, participants: int, memory: int) -> int:
    """Clients at once: bounded by `memory` in bytes, and by what a processor's cache holds of their models."""
    fits = max(1, memory // max(client_bytes, 1))
    cached = max(4, CACHE // max(model_bytes, 1))
    number = -(-participants // min(fits, cached, participants))
    return -(-participants // number)


def _same(rows: Rows, ids: list[int]) -> Rows:
    return rows


def _first_steps(batches: Batches, steps: int) -> Batches:
    """The first steps of the round, as one epoch."""
    index, mask, key = (part.flatten(1, 2)[:, None, :steps] for part in (batches.index, batches.mask, batches.key))
    return batches._replace(index=index, mask=mask, key=key)
