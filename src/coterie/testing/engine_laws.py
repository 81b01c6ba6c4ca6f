"""The laws about how a method is run: laws 1, 10, 11 and 12. No engine, worker or kill may change what it computes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from coterie.compute.availability import unavailable
from coterie.compute.compiled import Outcome, observing, slowest
from coterie.core.tree import Tree
from coterie.engine import Engine
from coterie.engine.process_pool import can_fork
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.methods.fields import AnyMethod
from coterie.storage.journal import at_once
from coterie.testing.kit import (
    LOOP,
    STACKED,
    KillAfter,
    Killed,
    LawBroken,
    federation,
    module,
    result,
    same,
    simulate,
    views,
    without_times,
)
from coterie.testing.options import contexts, plain

# Under plain SGD. A strong penalty on a small network grows one rounding a thousandfold (to 1e-13 in float64).
ROUNDING = 1e-4
# Adam divides tiny gradients by their own size, so rounding grows to a fraction of the learning rate.
ADAM_ROUNDING = 2e-3

UNCOMPILED = {"engine": "loop", "compile": False, "workers": 1}
# With threads, where C++ repeats the steps; where it does not, two workers are processes.
COMPILED = {"engine": "stacked", "compile": True, "workers": 2 if can_fork() else 1}

REPEATED = "compiled steps were repeated by C++"
CALLED = "compiled steps were called from Python"
REFUSED = "steps could not be compiled, so engines that compile ran them as they are"
NO_STEPS = "the method takes no steps"
NO_PROCESSES = "worker processes were left out: they need Linux"
NO_THREADS = "threads were left out"  # and why


def stacked_equals_one_at_a_time(method: AnyMethod) -> None:
    """Law 1, in every context, with the method's own optimiser and with plain SGD."""
    for context in contexts(method):
        stacking_changes_nothing(context, ADAM_ROUNDING)
        stacking_changes_nothing(plain(context), ROUNDING)


def stacking_changes_nothing(method: AnyMethod, tolerance: float) -> None:
    """Law 1 of the method as it is."""
    one, many = (simulate(method, engine, rounds=3, participants=3) for engine in (LOOP, STACKED))
    same(result(one), result(many), "loop and stacked differ", tolerance)


def resuming_changes_nothing(method: AnyMethod, norm: bool = True) -> None:
    """Law 10: one client at a time, and then stacked, compiled and shared out among two workers.

    As in all laws that compile, `norm` False is for a network without BatchNorm and dropout, which compiles sooner.
    """
    _resumes(method, norm, UNCOMPILED, "")
    _resumes(plain(method), norm, COMPILED, " (compiled)")


def _resumes(method: AnyMethod, norm: bool, how: dict[str, object], words: str) -> None:
    setup = prepare(
        method, federation(), model=module(norm), rounds=4, batch_size=4, clients_per_round=3, reference=False,
        report=False, checkpoint_every=2, **how,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, at_once():
        whole = run_setup(setup, Path(folder) / "whole")
        # Killed after round 3 was logged and before its checkpoint: round 3 is done again, from round 2's.
        try:
            run_setup(setup, Path(folder) / "killed", progress=KillAfter(3))
        except Killed:
            resumed = run_setup(setup, Path(folder) / "killed", resuming=True)
        else:
            raise LawBroken("the run was not killed")
        same(whole.views, resumed.views, f"a resumed run ends with other models{words}", tolerance=0)
        if without_times(whole.rounds) != without_times(resumed.rounds):
            raise LawBroken(f"a resumed run has another history{words}")


def workers_change_nothing(method: AnyMethod, norm: bool = True) -> str | None:
    """Law 11: for worker processes, and for threads that take compiled steps.

    Returns:
        In words, which of the two were left out: only steps that C++ repeats are shared out among threads.
    """
    some, words = (1, 2, 3), list[str]()
    threads = [Engine("stacked", compiled=True, chunk=3, lanes=2, workers=each, threads=True) for each in some]
    with observing() as seen:
        _workers_agree(plain(method), norm, threads, "threads")
    path = slowest(seen)
    if cannot := unavailable():
        words.append(f"{NO_THREADS}: nothing is compiled, since {cannot}")
    elif path is None:
        words.append(f"{NO_THREADS}: {NO_STEPS}")
    elif path.path != "replayed":
        words.append(f"{NO_THREADS}: {CALLED if path.path == 'compiled' else REFUSED} ({path.why})")
    if can_fork():
        _workers_agree(method, norm, [Engine("stacked", chunk=1, workers=each) for each in some], "processes")
    else:
        words.append(NO_PROCESSES)
    return "; ".join(words) or None


def _workers_agree(method: AnyMethod, norm: bool, engines: list[Engine], kind: str) -> None:
    base, *others = (result(simulate(method, engine, rounds=2, participants=3, norm=norm)) for engine in engines)
    for engine, other in zip(engines[1:], others, strict=True):
        same(base, other, f"{engine.workers} {kind} give other results than one", tolerance=0)


def every_engine_agrees(method: AnyMethod, norm: bool = True) -> str:
    """Law 12, under plain SGD, which keeps rounding small."""
    return engines_agree(plain(method), ROUNDING, norm)


def engines_agree(method: AnyMethod, tolerance: float, norm: bool = True) -> str:
    """Law 12 of the method as it is.

    Returns:
        How compiled steps were run, in words: a step that was not compiled proves nothing about compiled ones.

    Raises:
        LawBroken: an engine gives other states, models or predictions than one client at a time, not compiled.
    """
    base, seen = _outcome(method, norm, LOOP), list[Outcome]()
    for name, engine in engines():
        with observing() as scans:
            other = _outcome(method, norm, engine)
        seen += scans
        same(base, other, f"{name} and one client at a time differ", tolerance)
    path = slowest(seen)
    how = {"replayed": REPEATED, "compiled": CALLED, "plain": REFUSED}[path.path] if path else NO_STEPS
    if cannot := unavailable():
        how = f"nothing was compiled: {cannot}"
    return how if can_fork() else f"{how}; {NO_PROCESSES}"


def engines() -> Iterator[tuple[str, Engine]]:
    """Yield every way to run a round but the reference, for rounds of three clients."""
    yield "one client at a time, compiled,", Engine("loop", compiled=True)
    yield "stacked, compiled,", Engine("stacked", compiled=True, chunk=3, lanes=2)
    yield "two threads, compiled,", Engine("stacked", compiled=True, chunk=3, lanes=2, workers=2, threads=True)
    yield "stacked in fewer lanes", Engine("stacked", chunk=3, lanes=2)
    if can_fork():
        yield "two processes", Engine("stacked", chunk=2, workers=2)
        yield "two processes, compiled,", Engine("stacked", compiled=True, chunk=2, lanes=2, workers=2)


def _outcome(method: AnyMethod, norm: bool, engine: Engine) -> Tree:
    """Return all that `engine` computes for the method: states, what clients deploy, and what that predicts."""
    sim = simulate(method, engine, rounds=2, participants=3, norm=norm)
    deployed = views(sim, engine)
    return sim.state, deployed, sim.predictions(2, engine).outputs
