"""What `auto` costs against every fixed choice of engine: the time of a run of a given length, choosing and compiling
included.

A run's time is that of its first round, in which steps are compiled, and of the others at the fastest one measured.
Every kind of engine is measured in a process of its own that has compiled nothing, with an empty cache on disk; what it
compiled there counts with every number of processes. Compiled headers, once a machine, are no run's own cost.

    python benchmarks/choice.py [--quick] [--json FILE] [--case 1|2|3]
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import seconds
from telling import bar, parser, plot, target, tell
from torch.fx.experimental.proxy_tensor import make_fx

import coterie
from coterie.compute.cpu import cores
from coterie.compute.inductor import compile_graph
from coterie.engine import Engine
from coterie.engine.process_pool import can_fork
from coterie.experiment.pick_engine import RunStart, pick_engine, stacked_shape
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.models import Factory, cnn, linear, mlp

SLACK = 1.2
CLIENTS = 20
BATCH = 10
LEAST, LONG = 2, 1.0  # rounds and seconds of them to find the fastest


@dataclass(frozen=True)
class Case:
    name: str
    network: Factory
    shape: tuple[int, ...]
    steps: int  # of a client in a round
    rounds: int


CASES = (
    Case("softmax regression", linear, (784,), 40, 200),
    Case("784-100-10", lambda shape, classes: mlp(shape, classes, hidden=(100,)), (784,), 40, 100),
    Case("pFedVMP CNN", cnn, (1, 28, 28), 10, 20),
)


def compile_headers() -> list[Any]:
    compile_graph(make_fx(lambda x: [x + 1])(torch.zeros(64)), [torch.zeros(64)])
    return []


def setup_of(case: Case, clients: int, rounds: int) -> Setup:
    torch.manual_seed(0)
    size = case.steps * BATCH + 2  # an example to validate and one to test on
    x, y = torch.randn(clients, size, *case.shape), torch.randint(10, (clients, size))
    module = case.network(case.shape, 10)
    options = {"rounds": rounds, "local_steps": case.steps, "batch_size": BATCH, "lr": 0.01, "validation": 1, "test": 1}
    return coterie.prepare("fedavg", list(zip(x, y, strict=True)), model=module, **options)


def start(setup: Setup) -> Simulation:
    participants = setup.config.participants(len(setup.federation.names))
    plan, seed = setup.config.plan(), setup.config.seed
    return Simulation.start(setup.method, setup.task, setup.federation, plan, participants, seed)


def apart(work: Callable[[], list[Any]]) -> list[Any]:
    """What `work` gives in a process in which nothing was compiled before.

    A fork of its own for each: whoever compiles first in a process pays for TorchInductor's start, and later ones would
    look cheaper for it.
    """
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as empty:
        told = Path(empty) / "told.json"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
                told.write_text(json.dumps(work()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit("a measurement failed")
        return list(json.loads(told.read_text()))


def whole(setup: Setup, rounds: int, first: Engine, *others: Engine) -> list[float]:
    """The times of runs of so many rounds; the others have what the first one compiled."""
    sim = start(setup)
    begin = time.perf_counter()
    sim.train(1, first)
    once = time.perf_counter() - begin
    later = [fastest_round(sim, engine) for engine in (first, *others)]
    return [max(once - later[0], 0.0) + rounds * each for each in later]


def fastest_round(sim: Simulation, engine: Engine) -> float:
    times: list[float] = []
    while len(times) < LEAST or sum(times) < LONG:
        times.append(seconds(lambda: sim.train(2 + len(times), engine)))
    return min(times)


def choosing(setup: Setup, rounds: int) -> list[Any]:
    """(the time of a run, its engine in words)."""
    begun = RunStart(setup, start(setup), None, rounds)
    begin = time.perf_counter()
    chosen = pick_engine([begun], begun.probe, lambda _: None)
    return [time.perf_counter() - begin + whole(setup, rounds, chosen)[0], chosen.describe()]


def choices(setup: Setup, quick: bool) -> list[list[Engine]]:
    """Every sensible choice: those that differ in the number of processes, or have threads instead, are together."""
    participants = len(setup.federation.names)
    chunk, lanes = stacked_shape(setup, start(setup), participants)
    kinds = [Engine("loop", compiled, 1) for compiled in (False, True)]
    kinds += [Engine("stacked", compiled, chunk, lanes=lanes[compiled]) for compiled in (False, True)]
    kinds.append(Engine("stacked", False, participants))
    processes = [1, cores()] if can_fork() and cores() > 1 and not quick else [1]
    found = []
    for kind in dict.fromkeys(kinds):
        if quick and kind.compiled:
            continue
        # One chunk has no use for a second process: that would be the same choice twice.
        same = [replace(kind, workers=number) for number in (processes if kind.chunk < participants else [1])]
        if kind.kind == "stacked" and kind.compiled:
            same.append(replace(kind, chunk=participants, workers=cores(), threads=True))
        found.append(same)
    return found


def measure(case: Case, quick: bool) -> tuple[str, dict[Engine, float], float]:
    """(what auto chose, the times of fixed choices, the time of auto)."""
    rounds = 2 if quick else case.rounds
    setup = setup_of(case, 2 if quick else CLIENTS, rounds)
    fixed: dict[Engine, float] = {}
    for kind in choices(setup, quick):
        times = apart(functools.partial(whole, setup, rounds, *kind))
        fixed.update(zip(kind, times, strict=True))
        print("".join(f"{case.name}, {short(each)}: {fixed[each]:.1f} s\n" for each in kind), end="", flush=True)
    auto, chosen = apart(functools.partial(choosing, setup, rounds))
    print(f"{case.name}, auto: {auto:.1f} s, {chosen}", flush=True)
    return chosen, fixed, auto


def short(engine: Engine) -> str:
    many = f" {engine.lanes or engine.chunk}" * (engine.kind == "stacked")
    how = f"{engine.workers} threads" if engine.threads else f"{engine.workers} process{'es' * (engine.workers > 1)}"
    return f"{engine.kind}{many}{' compiled' * engine.compiled}, {how}"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="only this case")
    asked = asking.parse_args(arguments)
    torch.set_num_threads(1)  # a fork does not survive its parent's threads; client work runs on one anyway
    if not asked.quick:
        apart(compile_headers)
    rows, targets, bars = [], [], []
    for case in [CASES[asked.case - 1]] if asked.case else CASES:
        chosen, fixed, auto = measure(case, asked.quick)
        best = min(fixed.values())
        rows += [[case.name, case.rounds, each.describe(), value, value / best] for each, value in fixed.items()]
        rows.append([case.name, case.rounds, f"auto: {chosen}", auto, auto / best])
        targets.append(target(f"{case.name}: auto over the best", auto / best, SLACK, at_most=True))
        bars += [bar(f"{case.name}, {short(each)}", value / best) for each, value in fixed.items()]
        bars.append(bar(f"{case.name}, auto", auto / best, SLACK, at_most=True))
    title = "auto against every fixed choice"
    drawn = plot("time of a whole run over that of the best fixed choice", bars, log=True)
    return tell(asked, title, ["model", "rounds", "choice", "s", "of the best"], rows, targets, drawn)


if __name__ == "__main__":
    sys.exit(main())
