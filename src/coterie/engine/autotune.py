"""`auto`: which engine is fastest for this task, by a short measurement on the real thing.

A step that an earlier run left on disk, for C++ to repeat, is taken as it is: nothing else is as fast, and nothing is
left to be compiled. Else a few real steps are timed one client at a time and stacked; an engine that is hopelessly slow
is not looked at closely. If the work that remains is long enough, the step is compiled and timed as well. Measuring
takes a small share of that work. The choice is written into the run folder, and a resumed run keeps it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.compute.availability import first_line, unavailable
from coterie.compute.compiled import Outcome, has_steps, observing, slowest, stored_only
from coterie.compute.cpu import cores
from coterie.compute.inductor import compiling_takes
from coterie.compute.packing import best_width
from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.errors import CoterieError
from coterie.core.user_code import in_user_code
from coterie.data.federation import Federation
from coterie.engine.engine import Engine, Rows, chunks
from coterie.engine.fork_jobs import fan_out
from coterie.engine.process_pool import can_fork

EAGER_STEP_BYTES = 3_500_000  # of parameters in a step: beyond, it waits for memory
COMPILED_STEP_BYTES = 1_000_000  # the same of a compiled step, which costs so little of itself that it may be smaller
# The share of the time that compiling saves at least: of the more promising engine, and of the other.
SAVINGS = (0.7, 0.4)
CONVOLUTION_SAVINGS = (0.4, 0.25)
ALIKE = 0.7  # of a loop's time: from here on, stacking saves too little to be compiled first; both are timed twice
MIN_CLIENTS = 4  # to time
PROBE_STEPS = 2  # of the first look
MAX_LOOK_SECONDS = 0.3  # for one engine, once it is warm
STORED_LOOK_SECONDS = 0.02  # the same for a step that is taken as it is; it tells how many workers pay
LOOK_SHARE = 0.01  # of the work that remains
HOPELESS = 3.0  # times the fastest: no second look
PROCESS_SECONDS, THREAD_SECONDS = 0.002, 0.0002  # that worker processes, or threads, cost in a round, themselves


@dataclass(frozen=True)
class Choice:
    engine: Engine
    microseconds: dict[str, float]  # a client's step, on one core, for each engine tried
    notes: tuple[str, ...] = ()  # what could not be tried, and why
    status: Outcome = Outcome("plain")  # how steps are taken, and why not faster


@dataclass(frozen=True)
class Probe:
    """The work that engines are timed on, as `Engine.map` takes it."""

    fn: Callable[..., Any]
    federation: Federation
    ids: list[int]
    rows_of: Callable[[list[int]], Rows]


def choose(
    probe: Probe,
    *,
    client_steps: int,
    rounds: int,
    chunk: int,
    lanes: tuple[int | None, int | None] = (None, None),
    workers: int | None,
    kinds: tuple[str, ...] = ("loop", "stacked"),
    compiled: bool | None = None,
    convolves: bool = False,
    alike: int = 1,
    otherwise: Callable[[], float] | None = None,
) -> Choice:
    """Pick an engine for `client_steps` steps of training in all.

    If everything is fixed, nothing is timed; it is only found out whether the workers can be threads.

    Args:
        probe: the work of the first round.
        client_steps: gradient steps of all clients in all rounds that remain.
        rounds: how many rounds remain.
        chunk: how many clients a stacked engine takes at once.
        lanes: how many of them share a step, when it is not compiled and when it is.
        workers: how many processes or threads; None: as many as there are cores, if that pays.
        kinds: the kinds of engines to choose from.
        compiled: whether to compile; None: if that pays.
        convolves: the model has convolutions, whose steps take longer to compile.
        alike: how many methods run one after another, this one included: the compiler is started once for all.
        otherwise: tells how many seconds all the work takes in another way, without compiling; asked if compiling seems
            to pay.

    Raises:
        CoterieError: the only engine asked for cannot run this task.
    """
    tuning = _Tuning(probe, client_steps, rounds, chunk, lanes, workers, kinds, compiled, convolves, alike, otherwise)
    possible = has_steps()
    if possible and compiled is not False and tuning.take_stored():
        return tuning.choice(None)
    if compiled is not True:
        tuning.time_uncompiled()
    cannot = None
    # To find out whether steps can be compiled starts the compiler's Python, which takes longer than a short run.
    if not possible or tuning.may_pay():
        cannot = unavailable()
        if cannot and compiled is True:
            tuning.time_uncompiled()
        elif not cannot:
            tuning.time_compiled()
    return tuning.choice(cannot)


@dataclass
class _Tuning:
    probe: Probe
    client_steps: int
    rounds: int
    chunk: int
    lanes: tuple[int | None, int | None]
    workers: int | None
    kinds: tuple[str, ...]
    compiled: bool | None
    convolves: bool
    alike: int = 1
    otherwise: Callable[[], float] | None = None
    times: dict[str, float] = field(default_factory=dict)  # microseconds of a client's step, by engine
    by_threads: set[str] = field(default_factory=set)  # engines whose steps C++ repeats: they need no processes
    notes: list[str] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # of engines that compile: how steps were taken

    def __post_init__(self) -> None:
        self.settled = self.workers is not None and self.compiled is not None and len(self.kinds) == 1
        self.processes = self.workers or (cores() if can_fork() else 1)
        shapes: dict[str, dict[str, Any]] = {
            "loop": {"chunk": 1},
            "stacked": {"chunk": self.chunk, "lanes": self.lanes[0]},
        }
        if self.otherwise is not None:
            self.otherwise = functools.cache(self.otherwise)
        self.engines = {kind: Engine(kind, **shapes[kind]) for kind in self.kinds}  # type: ignore[arg-type]
        for kind in self.kinds:
            lanes = self.lanes[1] if kind == "stacked" else None
            self.engines[f"{kind}, compiled"] = replace(self.engines[kind], compiled=True, lanes=lanes)

    def take_stored(self) -> bool:
        """Tell whether the more promising engine finds its steps on disk; it is then the only one timed."""
        name = f"{max(self.kinds)}, compiled"  # stacked
        look = self._look(name)
        try:
            steps = min(PROBE_STEPS, look.longest)
            with stored_only(), observing() as seen:
                look.seconds(steps)
        except Exception:  # nothing is on disk; or what else it is will show when it is compiled
            return False
        if slowest(seen) != Outcome("replayed"):
            return False
        self._note(name, Outcome("replayed"))
        self.times[name] = 0.0
        if not self.settled:
            self.times[name] = (
                float(look.fastest(look.seconds(steps) / steps, STORED_LOOK_SECONDS)) / len(look.group) * 1e6
            )
        return True

    def time_uncompiled(self) -> None:
        for kind in sorted(self.kinds, reverse=True):  # stacked first: a loop is often hopeless then
            self._time(kind)
        if len(self.times) == 2 and min(self.times.values()) > ALIKE * max(self.times.values()):
            for kind, before in list(self.times.items()):  # other work on the machine may have decided it
                self._time(kind)
                self.times[kind] = min(before, self.times[kind])

    def may_pay(self) -> bool:
        """Tell whether compiling may save time, before any compiled step is timed."""
        return any(self._pays(kind, saves) for kind, saves in self._order())

    def time_compiled(self) -> None:
        for kind, saves in self._order():
            name = f"{kind}, compiled"
            if self._pays(kind, saves):
                self._time(name)
                found = self.outcomes.get(name)
                if found and found.path == "plain":  # what was timed is not what it is called
                    self.times.pop(name, None)
                    self.notes.append(f"steps cannot be compiled here ({found.why})")
                    break
        if not self.times:
            self.time_uncompiled()

    def _order(self) -> list[tuple[str, float]]:
        """Return the kinds, the more promising one to compile first, and the share that compiling each saves."""
        order = sorted(self.kinds, reverse=True)
        if len(self.times) == len(self.kinds) == 2:  # a step that gains nothing by stacking compiles sooner alone
            order = sorted(self.kinds, reverse=self.times["stacked"] < ALIKE * self.times["loop"])
        return list(zip(order, CONVOLUTION_SAVINGS if self.convolves else SAVINGS, strict=False))

    def _pays(self, kind: str, saves: float) -> bool:
        """Tell whether to compile: what the fastest engine so far would take, less what this kind would, compiled."""
        if self.compiled is not None or kind not in self.times:
            return bool(self.compiled)
        fastest, compiled = min(map(self._seconds, self.times)), (1 - saves) * self._seconds(kind)
        takes = compiling_takes(self.convolves, self.alike)
        if self.otherwise is not None and fastest - compiled > takes:
            fastest = min(fastest, self.otherwise())
        return fastest - compiled > takes

    def choice(self, cannot: str | None) -> Choice:
        winner = min(self.times, key=self._seconds)
        workers = 1 if self.workers is None and self._speedup(winner) == 1 else self.processes
        engine = replace(self.engines[winner], workers=workers, threads=winner in self.by_threads)
        engine = shaped(engine, self.chunk, self.lanes, len(self.probe.ids))
        return Choice(engine, {} if self.settled else self.times, tuple(self.notes), self._status(winner, cannot))

    def _status(self, winner: str, cannot: str | None) -> Outcome:
        if self.engines[winner].compiled:
            found = self.outcomes.get(winner, Outcome("plain", "the method takes no steps"))
            return found._replace(why=f"C++ cannot repeat the step: {found.why}") if found.path == "compiled" else found
        if cannot:
            return Outcome("plain", cannot)
        if self.notes:
            return Outcome("plain", self.notes[-1])
        if self.compiled is False:
            return Outcome("plain", "compiling was switched off")
        tried = any(name.endswith("compiled") for name in self.times)
        return Outcome(
            "plain", "compiled steps were not faster" if tried else "the run is too short for compiling to pay"
        )

    def _time(self, name: str) -> None:
        """Measure a client's step by the engine of this name, on one core, as many at a time as there will be."""
        engine, look = self.engines[name], self._look(name)
        try:
            steps = min(PROBE_STEPS, look.longest)
            with observing() as seen:
                look.seconds(steps)  # warms up and compiles
            found = slowest(seen)
            if engine.compiled and found:
                self._note(name, found)
            if self.settled:
                self.times[name] = 0.0
                return
            first = look.seconds(steps) / steps
            self.times[name] = first / len(look.group) * 1e6
            enough = min(MAX_LOOK_SECONDS, LOOK_SHARE * self._seconds(name))
            if self._seconds(name) > HOPELESS * min(map(self._seconds, self.times)):
                return
            job = functools.partial(look.fastest, first, enough)
            # As many at a time as there will be processes: they share the caches and the memory's bandwidth.
            looks = fan_out([job] * self.processes, self.processes) if self.processes > 1 else [job()]
            self.times[name] = float(torch.cat(looks).mean()) / len(look.group) * 1e6
        except Exception as error:
            words = first_line(error)
            if name.startswith("stacked") and len(self.kinds) == 1:
                raise CoterieError(
                    f"engine 'stacked' cannot run this task ({words}){in_user_code(error)}: use --engine auto"
                ) from error
            if name.startswith("loop"):
                raise
            self.notes.append(f"{name} cannot run this task ({words})")

    def _look(self, name: str) -> _Look:
        engine = self.engines[name]
        width = engine.lanes or engine.chunk
        # A few clients, since one alone is no average; the largest, since a single step is mostly what a call costs.
        largest_first = sorted(self.probe.ids, key=self.probe.federation.rank.__getitem__)
        group = largest_first[: max(MIN_CLIENTS, width)]
        return _Look(self.probe, replace(engine, chunk=width), group)

    def _note(self, name: str, found: Outcome) -> None:
        self.outcomes[name] = found
        if name == "stacked, compiled" and found == Outcome("replayed"):
            self.by_threads.add(name)

    def _speedup(self, name: str) -> float:
        """By sharing a round's chunks out among the workers, where that saves more than they cost themselves."""
        groups = len(chunks(self.probe.federation, self.probe.ids, self.engines[name].chunk))
        most = groups / -(-groups // self.processes)
        alone = self.client_steps * self.times[name] / 1e6 / max(self.rounds, 1)  # seconds a round
        return most if self.workers or alone > alone / most + self._cost(name) else 1.0

    def _cost(self, name: str) -> float:
        return THREAD_SECONDS if name in self.by_threads else PROCESS_SECONDS

    def _seconds(self, name: str) -> float:
        """What the whole run would take."""
        faster = self._speedup(name)
        return self.client_steps * self.times[name] / 1e6 / faster + self.rounds * self._cost(name) * (faster > 1)


class _Look:
    """The first steps of a few clients, timed as one process runs them."""

    def __init__(self, probe: Probe, engine: Engine, group: list[int]) -> None:
        self.probe, self.engine, self.group = probe, engine, group
        self.prepared = functools.cache(lambda each: probe.rows_of(list(each)))
        shortest = min(
            int(self.prepared(tuple(each))[1].mask.any(-1).flatten(1).sum(1).min())
            for each in chunks(probe.federation, group, engine.chunk)
        )
        self.longest = max(shortest, 1)  # steps that all of them take

    def seconds(self, steps: int) -> float:
        rows_of = functools.partial(_shortened, self.prepared, steps)
        begin = time.perf_counter()
        self.engine.map(self.probe.fn, self.probe.federation, self.group, rows_of, purpose="probe")
        return time.perf_counter() - begin

    def fastest(self, first: float, enough: float) -> Tensor:
        """Seconds a step, [1]; other work on the machine can only make a look slower, so the fastest one counts."""
        best, spent = first, 0.0
        while spent < enough:
            steps = min(max(PROBE_STEPS, round(enough / 3 / best)), self.longest)
            taken = self.seconds(steps)
            best, spent = min(best, taken / steps), spent + taken
        return torch.tensor([best], dtype=torch.float64)


def chunk_size(
    client_bytes: int, model_bytes: int, participants: int, memory: int, cache: int = EAGER_STEP_BYTES
) -> int:
    """Return how many clients a step has: bounded by `memory` in bytes, and by the models that a cache holds."""
    fits = max(1, memory // max(client_bytes, 1))
    cached = max(3, cache // max(model_bytes, 1))
    number = -(-participants // min(fits, cached, participants))
    return -(-participants // number)


def shape(
    sizes: Sequence[int], client_bytes: int, model_bytes: int, participants: int, memory: int, parts: int
) -> tuple[int, tuple[int, int]]:
    """Return (clients at once, (lanes without compiling, lanes with it)) of a stacked engine.

    Args:
        sizes: the numbers of steps of all clients.
        client_bytes: what one client's state and work take.
        model_bytes: the size of a model.
        participants: how many clients take part in a round.
        memory: bytes that may be used.
        parts: how many chunks there should be, if there are so many clients.
    """
    fits = max(1, memory // max(client_bytes, 1))
    number = max(-(-participants // fits), min(parts, max(1, participants // MIN_CLIENTS)))
    chunk = -(-participants // number)
    ordered = sorted(sizes)
    typical = [ordered[(2 * i + 1) * len(ordered) // (2 * chunk)] for i in range(chunk)]
    eager, compiled = (
        chunk_size(client_bytes, model_bytes, participants, memory, cache)
        for cache in (EAGER_STEP_BYTES, COMPILED_STEP_BYTES)
    )
    return chunk, (best_width(typical, eager), best_width(typical, compiled))


def shaped(engine: Engine, chunk: int, lanes: tuple[int | None, int | None], participants: int) -> Engine:
    """Return the engine with the chunks that suit a run.

    Args:
        engine: what was chosen, for this run or for one like it.
        chunk: how many clients a stacked engine takes at once.
        lanes: how many of them share a step, when it is not compiled and when it is.
        participants: how many clients take part in a round.
    """
    if engine.kind == "loop":
        return replace(engine, chunk=1, lanes=None, _pool=[])
    if not engine.threads:
        return replace(engine, chunk=chunk, lanes=lanes[engine.compiled], _pool=[])
    # As many clients as all cores would have at a time, however many workers there are (law 11).
    many = min(chunk * (cores() if can_fork() else 1), participants)
    return replace(engine, chunk=many, lanes=lanes[True]).fitted(participants)  # as a resumed run has it


def _shortened(prepared: Callable[[tuple[int, ...]], Rows], steps: int, group: list[int]) -> Rows:
    rows, batches = prepared(tuple(group))
    return rows, first_steps(batches, steps)


def first_steps(batches: Batches, steps: int) -> Batches:
    """Keep the first steps of the round, as one epoch."""
    parts = (batches.index, batches.mask, batches.key, batches.pace)
    first = tree.map(lambda part: part.flatten(1, 2)[:, None, :steps], parts)
    index, mask, key, pace = first
    return batches._replace(index=index, mask=mask, key=key, pace=pace)
