"""Local training, the ordinary way and this library's, at the same work: the ratio of their wall times.

    python benchmarks/local_training.py                  the three cases, with their targets
    python benchmarks/local_training.py --all-engines    every engine, for analysis
    python benchmarks/local_training.py --quick          a smoke test: small, and no target is judged

The ordinary way is a Python loop over the clients: a copy of an `nn.Module` each, a shuffling `DataLoader`,
`torch.optim.SGD`, and all cores as threads inside each operation. This library runs the same round of FedAvg through
`Simulation.train`, on the engine that `auto` picks for a run of the case's length.

What is done to keep it fair:
- The data are random, of the right shape, and every client has the same number; both sides take the same number of
  gradient steps at the same learning rate (counted and printed). In the first, untimed round both are given the same
  minibatches in the same order and must end with the same average model.
- Rounds alternate (ordinary, ours, ordinary, ours, ...), so that other work on the machine hits both. It does not hit
  both equally, though: threads that wait for each other at every operation suffer more. So the share of the machine
  that others took is measured too (on Linux), and the median ratio over the quieter half of the pairs counts.
- Choosing and compiling come before, with an empty cache of compiled code, and are shown apart.
- Useful work is 6 x the multiply-adds of the network's linear and convolution layers, for each example: 2 operations
  each, once forward and twice backward. The machine's own rate is that of 1024 x 1024 float32 matrix products on all
  cores, timed between the rounds.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from machine import Busy, matmul_rate, seconds
from rich.console import Console
from rich.table import Table
from telling import bar, parser, plot, target, tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import coterie
from coterie.cli.memory import keep_freed_memory
from coterie.compute.cpu import cores
from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.tree import Params
from coterie.data.federation import Split
from coterie.engine import Engine, chunk_size
from coterie.engine.process_pool import can_fork
from coterie.experiment.pick_engine import RunStart, pick_engine
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.models import Factory, cnn, mlp

LR = 0.01
PAIRS = 12  # of rounds, at most
SECONDS = 8.0  # for them, in one case; but three pairs at least
Data = Iterable[Sequence[Tensor]]  # one client's minibatches (x, y)


def perceptron(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """pFedBreD's deep network: 784-100-10 with leaky ReLU."""
    return nn.Sequential(nn.Linear(math.prod(shape), 100), nn.LeakyReLU(0.1), nn.Linear(100, outputs))


@dataclass(frozen=True)
class Case:
    name: str
    network: Factory
    shape: tuple[int, ...]
    classes: int
    clients: int
    batch: int
    steps: int  # a client's in an epoch: it has steps x batch examples
    epochs: int  # a round
    rounds: int  # of a whole run, which `auto` chooses for
    target: float

    def quick(self) -> Case:
        return dataclasses.replace(self, clients=3, steps=2, epochs=1, rounds=2)


CASES = (  # as long as in the papers: FedMAP's 1,000 epochs, pFedBreD's 200 rounds of 20 steps, pFedVMP's 1,000 rounds
    Case("10 x MLP 30-32-16-2, batch 32", mlp, (30,), 2, 10, 32, 38, 10, rounds=100, target=25.0),
    Case("100 x 784-100-10, batch 20", perceptron, (784,), 10, 100, 20, 20, 1, rounds=200, target=5.0),
    Case("50 x CNN on 28x28, batch 10", cnn, (1, 28, 28), 10, 50, 10, 8, 1, rounds=1000, target=1.6),
)


class Ordinary:
    """FedAvg as it is usually written."""

    def __init__(self, module: nn.Module, clients: Sequence[TensorDataset], batch: int) -> None:
        self.module = copy.deepcopy(module)
        self.loaders = [DataLoader(client, batch_size=batch, shuffle=True) for client in clients]
        self.sizes = [len(client) for client in clients]
        self.steps = 0  # of the last round

    def round(self, epochs: int, data: Sequence[Data] | None = None) -> None:
        """One round over the loaders, or over other minibatches if they are given."""
        self.steps = 0
        average = {name: torch.zeros_like(value) for name, value in self.module.state_dict().items()}
        for size, minibatches in zip(self.sizes, data or self.loaders, strict=True):
            model = copy.deepcopy(self.module)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(epochs):
                for x, y in minibatches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    self.steps += 1
            for name, value in model.state_dict().items():
                average[name] += value * (size / sum(self.sizes))
        self.module.load_state_dict(average)


class Ours:
    """The same round in this library."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.sim = Simulation.start(
            setup.method,
            setup.task,
            setup.federation,
            setup.config.plan(),
            setup.config.participants(len(setup.federation.names)),
            setup.config.seed,
        )
        self.done = 0

    def choose(self) -> Engine:
        """What `coterie run` would do."""
        begun = RunStart(self.setup, self.sim, None, self.setup.config.rounds)
        return pick_engine([begun], begun.probe, lambda _: None)

    def round(self, engine: Engine) -> None:
        self.done += 1
        self.sim.train(self.done, engine)

    def next_batches(self) -> Batches:
        """All clients' minibatches of the coming round."""
        _, ids, _ = self.sim.probe()
        return self.sim._draw(ids, self.sim.plan, "minibatches", self.done + 1)

    @property
    def model(self) -> Params:
        server: Params = self.sim.state.server
        return server


class Pair(NamedTuple):
    """A round of each side, one after the other."""

    ordinary: float  # seconds
    ours: float
    others: float  # share of the machine that other processes took meanwhile


@dataclass(frozen=True)
class Measured:
    case: Case
    engine: Engine
    steps: int  # client-steps a round
    difference: float  # between the two average models after the same minibatches
    startup: float  # seconds: choosing, compiling, and the first round beyond a later one
    pairs: list[Pair]  # the quieter half
    flops: float  # a round
    rate: float  # matrix products, operations a second
    memory: tuple[int, int]  # bytes: this process, the largest child

    @property
    def ordinary(self) -> float:
        return statistics.median(pair.ordinary for pair in self.pairs)

    @property
    def ours(self) -> float:
        return statistics.median(pair.ours for pair in self.pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(pair.ordinary / pair.ours for pair in self.pairs)

    @property
    def others(self) -> float:
        return statistics.median(pair.others for pair in self.pairs)


def measure(case: Case, most: int = PAIRS) -> Measured:
    module, ordinary, ours = build(case)
    begin = time.perf_counter()
    engine = ours.choose()
    startup = time.perf_counter() - begin
    steps, difference, first = same_work(case, ordinary, ours, engine)
    ours.round(engine)
    rates, pairs = [matmul_rate()], list[Pair]()
    begin = time.perf_counter()
    while len(pairs) < 3 or (len(pairs) < most and time.perf_counter() - begin < SECONDS):
        busy = Busy()
        times = seconds(lambda: ordinary.round(case.epochs)), seconds(lambda: ours.round(engine))
        pairs.append(Pair(*times, busy.others()))
        rates.append(matmul_rate())
    if ordinary.steps != steps:
        raise SystemExit(f"{case.name}: {ordinary.steps} ordinary steps a round, but {steps} of ours")
    pairs = sorted(pairs, key=lambda pair: pair.others)[: -(-len(pairs) // 2)]
    startup += max(first - statistics.median(pair.ours for pair in pairs), 0.0)
    flops = 6.0 * multiply_adds(module, case.shape) * case.batch * steps
    return Measured(case, engine, steps, difference, startup, pairs, flops, statistics.median(rates), peak_memory())


def build(case: Case) -> tuple[nn.Module, Ordinary, Ours]:
    """Both sides, with the same data and the same initial model."""
    torch.manual_seed(0)
    module = case.network(case.shape, case.classes)
    size = case.steps * case.batch
    each = size + 2  # two more, because a federation wants an example to validate and one to test on
    x = torch.randn(case.clients * each, *case.shape)
    y = torch.randint(0, case.classes, (len(x),))
    places = np.arange(len(x), dtype=np.int64).reshape(case.clients, each)
    clients = {f"client-{i}": Split(own[:size], own[size:-1], own[-1:]) for i, own in enumerate(places)}
    federation = coterie.Federation("random", x, y, clients, case.classes)
    setup = coterie.prepare(
        "fedavg",
        federation,
        model=module,
        rounds=case.rounds,
        local_epochs=case.epochs,
        batch_size=case.batch,
        optimizer={"name": "sgd", "lr": LR},
    )
    data = [TensorDataset(x[own[:size]], y[own[:size]]) for own in torch.from_numpy(places)]
    return module, Ordinary(module, data, case.batch), Ours(setup)


def same_work(case: Case, ordinary: Ordinary, ours: Ours, engine: Engine) -> tuple[int, float, float]:
    """Warm up with a round on the same minibatches: (steps a round, difference of the models, our seconds)."""
    batches = ours.next_batches()
    steps = int(batches.mask.any(-1).sum())
    data = [[(batches.x[rows], batches.y[rows]) for rows in client.flatten(0, 1)] for client in batches.index]
    ordinary.round(1, data)
    if ordinary.steps != steps:
        raise SystemExit(f"{case.name}: {ordinary.steps} ordinary steps a round, but {steps} of ours")
    first = seconds(lambda: ours.round(engine))
    theirs = ordinary.module.state_dict()
    difference = max(float((ours.model[name] - value).abs().max()) for name, value in theirs.items())
    if not difference < 1e-4:
        raise SystemExit(f"{case.name}: after the same minibatches the average models differ by {difference:.1e}")
    return steps, difference, first


def multiply_adds(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Of the linear and convolution layers, for one example."""
    found: list[int] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight: Tensor = layer.weight  # type: ignore[assignment]
        found.append(output.numel() * weight[0].numel())

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    module(torch.zeros(1, *shape))
    for hook in hooks:
        hook.remove()
    return sum(found)


def peak_memory() -> tuple[int, int]:
    """Bytes, so far: this process, and the largest of its children (workers share most of theirs with it)."""
    unit = 1 if sys.platform == "darwin" else 1024
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own * unit, children * unit


def report(asked: argparse.Namespace, results: Sequence[Measured]) -> int:
    columns = [
        "case",
        "side",
        "s a round",
        "client-steps/s",
        "of matmul rate",
        "ratio",
        "start-up, s",
        "peak memory, MB",
    ]
    rows: list[list[Any]] = []
    for m in results:
        for side, middle in (("ordinary", m.ordinary), ("coterie", m.ours)):
            cells: list[Any] = [middle, m.steps / middle, f"{m.flops / middle / m.rate:.1%}"]
            if side == "coterie":
                own, child = (size / 2**20 for size in m.memory)
                cells += [f"{m.ratio:.1f}x", m.startup, f"{own:,.0f} (child {child:,.0f})"]
            rows.append([m.case.name, side, *cells, *[""] * (6 - len(cells))])
    others = max(m.others for m in results)
    notes = [
        "Start-up: choosing the engine and compiling, paid once a run. Peak memory: so far in this process, and its "
        "largest child (a worker, which shares most with this process, or the compiler). "
        f"Work: 6 x multiply-adds an example. Matmul: {statistics.median(m.rate for m in results) / 1e9:.0f} GFLOP/s "
        f"on {cores()} cores. Other processes took {others:.0%} of the machine"
        f"{': too much for these ratios to be trusted' if others > 0.1 else ''}.",
    ]
    targets = [target(f"{m.case.name}: ratio", m.ratio, m.case.target) for m in results]
    drawn = plot(
        "ordinary time over ours, a round", [bar(m.case.name, m.ratio, m.case.target) for m in results], log=True
    )
    return tell(asked, "Local training against the ordinary way", columns, rows, targets, drawn, notes=notes)


def all_engines(case: Case, chunk: int | None, console: Console) -> None:
    """Every engine on one case, all in turn."""
    _, ordinary, ours = build(case)
    chosen = ours.choose()
    chunk = chunk or chunk_size(0, tree.nbytes(ours.model), case.clients, sys.maxsize)
    shapes: list[tuple[Literal["loop", "stacked"], int]] = [("loop", 1), ("stacked", chunk)]
    if chunk == case.clients:
        shapes.append(("stacked", -(-chunk // 2)))
    engines = [
        Engine(kind, compiled, size, workers)
        for kind, size in shapes
        for compiled in (False, True)
        for workers in (1, cores())
        if workers == 1 or (can_fork() and size < case.clients)
    ]
    if chosen not in engines:  # it has lanes, or threads
        engines.append(chosen)
    first = [seconds(partial(ours.round, engine)) for engine in engines]
    ordinary.round(case.epochs)
    busy, base, times = Busy(), list[float](), [list[float]() for _ in engines]
    for _ in range(3):
        base.append(seconds(lambda: ordinary.round(case.epochs)))
        for mine, engine in zip(times, engines, strict=True):
            mine.append(seconds(partial(ours.round, engine)))
    table = Table("engine", "us a client-step", "ratio", "first round", title=f"{case.name}; auto: {chosen.describe()}")
    table.add_row("ordinary", f"{statistics.median(base) / ordinary.steps * 1e6:,.1f}", "1.0x", "")
    for engine, mine, begun in zip(engines, times, first, strict=True):
        ratio = statistics.median(a / b for a, b in zip(base, mine, strict=True))
        mark = " <- auto" if engine == chosen else ""
        step = statistics.median(mine) / ordinary.steps * 1e6
        table.add_row(engine.describe(), f"{step:,.1f}", f"{ratio:.1f}x{mark}", f"{begun:.1f} s")
    table.caption = f"Other processes took {busy.others():.0%} of the machine."
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--all-engines", action="store_true", help="a table of every engine instead")
    asking.add_argument("--chunk", type=int, help="clients stacked in --all-engines, instead of the library's choice")
    asking.add_argument("--case", type=int, choices=range(1, len(CASES) + 1), help="only this case")
    asked = asking.parse_args(arguments)
    cases = [CASES[asked.case - 1]] if asked.case else list(CASES)
    if asked.quick:
        cases = [case.quick() for case in cases]
    console = Console(width=max(Console().width, 130))
    keep_freed_memory()  # as the command does
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as empty:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", empty)  # so that compiling is really compiling
        if asked.all_engines:
            for case in cases:
                all_engines(case, asked.chunk, console)
            return 0
        results = []
        for case in cases:
            results.append(measure(case, 3 if asked.quick else PAIRS))
            last = results[-1]
            console.print(
                f"{case.name}: auto chose {last.engine.describe()}; {last.steps:,} gradient steps a round on both "
                f"sides; models differ by {last.difference:.0e} after the same minibatches",
                highlight=False,
            )
    return report(asked, results)


if __name__ == "__main__":
    sys.exit(main())
