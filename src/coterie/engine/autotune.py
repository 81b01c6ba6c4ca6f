"""`auto`: which engine is fastest for this task, by a short measurement on the real thing.

A few real steps are timed one client at a time and stacked; who is hopelessly slow is not looked at closely. If the
work that remains is long enough, the step is compiled and timed as well. Looking takes a small share of that work. The
choice is written into the run folder, and a resumed run keeps it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.batches import Batches
from coterie.data.federation import Federation
from coterie.engine.engine import Engine, chunks
from coterie.engine.team import Rows
from coterie.engine.workers import can_fork, fan_out
from coterie.errors import CoterieError
from coterie.lanes import fitting
from coterie.machine_code import compiling_takes, no_garbage
from coterie.processor import cores
from coterie.scan import called, compilations, refusals

CACHE = 3_500_000  # bytes of parameters in a step: beyond, it waits for memory
OWN_CACHE = 1_000_000  # the same of a compiled step, which has so little cost of its own that it may be smaller
SAVES = (0.4, 0.25)  # the share of the time that compiling saves, at least where it was measured; of the less promising
ALIKE = 0.7  # of a loop's time: from here on, stacking saves too little to be compiled first; both are looked at twice
FEW = 4  # clients to look at
PROBE = 2  # steps of the first look
LOOK = 0.3  # seconds to look at one engine, once it is warm, and at most
SHARE = 0.01  # of the work that remains
HOPELESS = 3.0  # times the fastest: no second look
TEAM, THREADS = 0.002, 0.0002  # seconds that worker processes, or threads, cost in a round, themselves


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
    lanes: tuple[int | None, int | None] = (None, None),
    workers: int | None,
    kinds: tuple[str, ...] = ("loop", "stacked"),
    compiled: bool | None = None,
    convolves: bool = False,
) -> Choice:
    """Pick an engine for `client_steps` steps of training in all. `workers` and `compiled` are fixed if given.

    `lanes` are those of steps that are not compiled, and of those that are. What `convolves` takes longer to compile.
    Where all is fixed, nothing is timed, but compiled steps may turn out to be work for threads.
    """
    settled = workers is not None and compiled is not None and len(kinds) == 1
    processes = workers or (cores() if can_fork() else 1)
    shapes: dict[str, dict[str, Any]] = {"loop": {"chunk": 1}, "stacked": {"chunk": chunk, "lanes": lanes[0]}}
    candidates = {kind: Engine(kind, **shapes[kind]) for kind in kinds}  # type: ignore[arg-type]
    for kind in kinds:
        own = lanes[1] if kind == "stacked" else None
        candidates[f"{kind}, compiled"] = replace(candidates[kind], compiled=True, lanes=own)
    times: dict[str, float] = {}
    by_threads: set[str] = set()  # those whose steps C++ repeats: they need no processes
    notes: list[str] = []

    def measure(name: str, engine: Engine) -> None:
        # One process, as a round's chunks are shared out later; a few clients, since one alone is no average.
        width = engine.lanes or engine.chunk
        group = [client for each in chunks(federation, ids, engine.chunk) for client in each][: max(FEW, width)]
        engine = replace(engine, chunk=width)
        prepared = functools.cache(lambda each: rows_of(list(each)))
        longest = min(
            int(prepared(tuple(each))[1].mask.any(-1).flatten(1).sum(1).min())
            for each in chunks(federation, group, width)
        )
        longest = max(longest, 1)

        def look(steps: int) -> float:
            begin = time.perf_counter()
            engine.map(fn, federation, group, functools.partial(_shortened, prepared, steps), purpose="probe")
            return time.perf_counter() - begin

        def fastest(first: float, enough: float) -> Tensor:
            """Seconds a step; other work on the machine can only make a look slower, so the fastest one counts."""
            best, spent = first, 0.0
            while spent < enough:
                steps = min(max(PROBE, round(enough / 3 / best)), longest)
                taken = look(steps)
                best, spent = min(best, taken / steps), spent + taken
            return torch.tensor([best], dtype=torch.float64)

        try:
            steps = min(PROBE, longest)
            before = called()
            with no_garbage():
                look(steps)  # warms up and compiles
            if name == "stacked, compiled" and called() == before:
                by_threads.add(name)
            if settled:
                times[name] = 0.0
                return
            first = look(steps) / steps
            times[name] = first / len(group) * 1e6
            enough = min(LOOK, SHARE * seconds(name))
            if seconds(name) > HOPELESS * min(map(seconds, times)):
                return
            job = functools.partial(fastest, first, enough)
            # As many at a time as there will be processes: they share the caches and the memory's bandwidth.
            looks = fan_out([job] * processes, processes) if processes > 1 else [job()]
            times[name] = float(torch.cat(looks).mean()) / len(group) * 1e6
        except Exception as error:
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            if name.startswith("stacked") and len(kinds) == 1:
                raise CoterieError(f"engine 'stacked' cannot run this task ({words}): use --engine auto") from error
            if name.startswith("loop"):
                raise
            notes.append(f"{name} cannot run this task ({words})")

    def speedup(name: str) -> float:
        """By sharing a round's chunks out among the processes, where that saves more than they cost themselves."""
        groups = len(chunks(federation, ids, candidates[name].chunk))
        most = groups / -(-groups // processes)
        alone = client_steps * times[name] / 1e6 / max(rounds, 1)  # seconds a round
        return most if workers or alone > alone / most + cost(name) else 1.0

    def cost(name: str) -> float:
        return THREADS if name in by_threads else TEAM

    def seconds(name: str) -> float:
        """What the whole run would take."""
        faster = speedup(name)
        return client_steps * times[name] / 1e6 / faster + rounds * cost(name) * (faster > 1)

    if compiled is not True:
        for kind in sorted(kinds, reverse=True):  # stacked first: a loop is often hopeless then
            measure(kind, candidates[kind])
        if len(times) == 2 and min(times.values()) > ALIKE * max(times.values()):  # other work may have decided it
            for kind, before in list(times.items()):
                measure(kind, candidates[kind])
                times[kind] = min(before, times[kind])
    order = sorted(kinds, reverse=True)
    if len(times) == len(kinds) == 2:  # a step that gains nothing by stacking is arithmetic: alone it compiles sooner
        order = sorted(kinds, reverse=times["stacked"] < ALIKE * times["loop"])
    for kind, saves in zip(order, SAVES, strict=False):
        pays = compiled
        if compiled is None and kind in times:
            # What the fastest one so far would take, less what this one would if it were compiled.
            pays = min(map(seconds, times)) - (1 - saves) * seconds(kind) > compiling_takes(convolves)
        if pays:
            before = refusals()
            measure(f"{kind}, compiled", candidates[f"{kind}, compiled"])
            if refusals() > before and not compilations():
                notes.append("steps cannot be compiled here (is there a C++ compiler?), so they run as they are")
                break
    winner = min(times, key=seconds)
    if workers is None and speedup(winner) == 1:
        processes = 1
    engine = replace(candidates[winner], workers=processes, _team=[])
    if winner in by_threads:
        # As many clients as all cores would have at a time, however many workers there are (law 11).
        many = min(chunk * (cores() if can_fork() else 1), len(ids))
        engine = replace(engine, chunk=many, threads=True).fitted(len(ids))  # as a resumed run has it
    return Choice(engine, {} if settled else times, tuple(notes))


def chunk_size(client_bytes: int, model_bytes: int, participants: int, memory: int, cache: int = CACHE) -> int:
    """Clients at a step: bounded by `memory` in bytes, and by what a processor's cache holds of their models."""
    fits = max(1, memory // max(client_bytes, 1))
    cached = max(3, cache // max(model_bytes, 1))
    number = -(-participants // min(fits, cached, participants))
    return -(-participants // number)


def shape(
    sizes: Sequence[int], client_bytes: int, model_bytes: int, participants: int, memory: int, parts: int
) -> tuple[int, tuple[int, int]]:
    """(clients at once, lanes without and with compiling) of a stacked engine: `parts` chunks, if there are so many.

    `sizes` are the numbers of steps of all clients, of which so many take part in a round.
    """
    fits = max(1, memory // max(client_bytes, 1))
    number = max(-(-participants // fits), min(parts, max(1, participants // FEW)))
    chunk = -(-participants // number)
    ordered = sorted(sizes)
    typical = [ordered[(2 * i + 1) * len(ordered) // (2 * chunk)] for i in range(chunk)]
    most = [chunk_size(client_bytes, model_bytes, participants, memory, cache) for cache in (CACHE, OWN_CACHE)]
    return chunk, (fitting(typical, most[0]), fitting(typical, most[1]))


def _shortened(prepared: Callable[[tuple[int, ...]], Rows], steps: int, group: list[int]) -> Rows:
    rows, batches = prepared(tuple(group))
    return rows, _first_steps(batches, steps)


def _first_steps(batches: Batches, steps: int) -> Batches:
    """The first steps of the round, as one epoch."""
    index, mask, key = (part.flatten(1, 2)[:, None, :steps] for part in (batches.index, batches.mask, batches.key))
    return batches._replace(index=index, mask=mask, key=key)
