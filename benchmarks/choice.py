"""What `auto` costs against every fixed choice of engine: the time of a run of a given length, choosing and compiling
included.

A run's time is that of its first round, in which steps are compiled, and of the others at the fastest one measured.
Every choice is measured in a process of its own that has compiled nothing, with an empty cache on disk.

    python benchmarks/choice.py [--quick] [--json FILE] [--case 1|2|3]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import seconds
from telling import bar, parser, plot, target, tell

import coterie
from coterie.engine import Engine, chunk_size
from coterie.engine.engine import cores
from coterie.engine.workers import can_fork
from coterie.experiment.pick import Begin, pick_engine
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.models import Factory, cnn, linear, mlp
from coterie.tree import nbytes

SLACK = 1.2
CLIENTS = 20
BATCH = 10


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


def whole(setup: Setup, engine: Callable[[], Engine], rounds: int) -> tuple[float, str]:
    """(the time of a run of so many rounds, its engine in words), in a process in which nothing was compiled before.

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
                told.write_text(json.dumps(_timed(setup, engine, rounds)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit("a measurement failed")
        taken, chosen = json.loads(told.read_text())
        return float(taken), str(chosen)


def _timed(setup: Setup, engine: Callable[[], Engine], rounds: int) -> tuple[float, str]:
    sim = start(setup)
    begin = time.perf_counter()
    chosen = engine()
    sim.train(1, chosen)
    first = time.perf_counter() - begin
    later = min(seconds(lambda: sim.train(2 + number, chosen)) for number in range(3))  # noqa: B023
    return first + (rounds - 1) * later, chosen.describe()


def measure(case: Case, quick: bool) -> tuple[str, dict[Engine, float], float]:
    """(what auto chose, the times of fixed choices, the time of auto)."""
    rounds = 2 if quick else case.rounds
    setup = setup_of(case, 2 if quick else CLIENTS, rounds)
    size = nbytes(setup.task.init())
    chunk = chunk_size(4 * size, size, len(setup.federation.names), 2 * 2**30)
    processes = [1, cores()] if can_fork() and cores() > 1 and not quick else [1]
    fixed = {}
    for kind, number in (("loop", 1), ("stacked", chunk)):
        for compiled in (False,) if quick or kind == "loop" else (False, True):
            # One chunk has no use for a second process: that would be the same choice twice.
            for workers in processes if number < len(setup.federation.names) else [1]:
                engine = Engine(kind, compiled, number, workers)  # type: ignore[arg-type]
                fixed[engine] = whole(setup, lambda engine=engine: engine, rounds)[0]  # type: ignore[misc]
                print(f"{case.name}, {short(engine)}: {fixed[engine]:.1f} s", flush=True)
    begun = Begin(setup, start(setup), None, rounds)
    auto, chosen = whole(setup, lambda: pick_engine([begun], begun.probe, lambda _: None), rounds)
    return chosen, fixed, auto


def short(engine: Engine) -> str:
    return f"{engine.kind}{' compiled' * engine.compiled}, {engine.workers} process{'es' * (engine.workers > 1)}"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="only this case")
    asked = asking.parse_args(arguments)
    torch.set_num_threads(1)  # a fork does not survive its parent's threads; client work runs on one anyway
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
