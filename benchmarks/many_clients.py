"""Many clients: what a round, the memory and the start cost when there are 100, 1,000 or 10,000 of them.

    python benchmarks/many_clients.py                the whole of it, with its targets
    python benchmarks/many_clients.py --json FILE    also as JSON
    python benchmarks/many_clients.py --quick        a smoke test: few and small, and no target is judged

100 clients take part in a round, of a network 64-256-32-10 (25,194 parameters) with 50 training examples each, batches
of 10, for one epoch. So a round is the same work whatever the number of clients is, and should take the same time.
FedAMP attends to 10 neighbours.

- Every size of every method is a fresh process. It starts as a run does: from one pair of tensors a client to a
  simulation that could begin its first round. That, with Python and PyTorch, is the start. The sizes of a method start
  at the same time, so that the largest is measured beside the others' work.
- Then every client takes part once, as far as the server and the store can see: its state is its first one and some
  noise (it is not trained, which would take a hundred rounds), the same noise in every round but for its scale. After
  each, the new rows are written as its checkpoint would. So all rows exist, and most are on disk only.
- Rounds alternate between the sizes of a method, so that other work on the machine hits all of them; the median counts.
  Every round is followed by its checkpoint, which is timed apart.
- Resident memory is the peak of the process, and of its children if there are any, as the system counts it.

Clients are stacked, steps are not compiled, and there is one process. What else a run costs (evaluating everybody,
writing a folder for each) grows with the number of clients; see `docs/many-clients.md`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from telling import bar, parser, plot, target, tell
from torch import nn

from coterie.cli.memory import keep_freed_memory
from coterie.core import client_rows, tree
from coterie.core.units import parse_bytes
from coterie.engine import Engine, chunk_size
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAMP
from coterie.storage import paged_rows, segments
from coterie.storage.paged_rows import Paged, Store
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fedmap": {}, "pfedbred": {}, "fedamp": {"neighbours": 10}}
SIZES = (100, 1_000, 10_000)
SAMPLE = 100
EXAMPLES = 84  # a client: 50 to train, 8 to validate, 25 to test
MEMORY = "500MB"
ROUNDS = 5
SLOWER, RESIDENT, START = 1.3, 2000.0, 20.0  # the targets: a factor, MB, seconds
COLUMNS = ("method", "clients", "start s", "round ms", "x 100 clients", "checkpoint ms", "resident MB", "states MB")


def simulation(method: str, clients: int, sample: int, folder: Path) -> tuple[Simulation, Engine]:
    """As `coterie.run(method, data, ...)` makes it."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients, EXAMPLES, 64, generator=draw)
    y = (x @ torch.randn(64, 10, generator=draw)).argmax(-1)
    data = {f"client-{i}": (x[i], y[i]) for i in range(clients)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10))
    setup = prepare(
        method, data, model=model, clients_per_round=sample, batch_size=10, lr=0.01, memory=MEMORY, **METHODS[method]
    )
    config = setup.config
    store = Store(parse_bytes(config.memory) // 2, folder / "checkpoints")
    sim = Simulation.start(setup.method, setup.task, setup.federation, config.plan(), sample, config.seed, store=store)
    params = tree.nbytes(setup.task.init())
    client = tree.nbytes(client_rows.take(sim.state.clients, 0)) + 4 * params
    return sim, Engine("stacked", False, chunk_size(client, params, sample, parse_bytes(config.memory)), 1)


def age(sim: Simulation, sample: int, checkpoints: Path) -> None:
    """As if every client had taken part, in rounds of `sample`."""
    draw = torch.Generator().manual_seed(1)

    def noise(row: tree.Tree) -> tree.Tree:
        def of(leaf: torch.Tensor) -> torch.Tensor:
            if not leaf.is_floating_point():
                return torch.ones_like(leaf)  # the rounds it took part in
            return 0.02 * (torch.rand(leaf.shape, generator=draw) - 0.5)

        return tree.map(of, tree.broadcast(row, sample))

    def moved(row: tree.Tree, by: tree.Tree, number: int, scale: float) -> tree.Tree:
        def add(leaf: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
            return torch.add(leaf, some[:number], alpha=scale if leaf.is_floating_point() else 1)

        return tree.map(add, row, by)

    first, (params, _) = client_rows.take(sim.state.clients, 0), sim.task.split(sim.task.init())
    states, models = noise(first), noise(params)
    checkpoints.mkdir(parents=True, exist_ok=True)
    for k, ids in enumerate(torch.split(torch.randperm(len(sim.federation.names), generator=draw), sample)):
        server, scale = sim.state.server, 1 + k / 100
        if isinstance(sim.method, FedAMP):  # of these, the only server with rows
            server = sim.method.aggregate(server, ids, moved(params, models, len(ids), scale))
        sim.state = State(server, client_rows.put(sim.state.clients, ids, moved(first, states, len(ids), scale)))
        segments.write(checkpoints, sim.state)


def work(method: str, clients: int, sample: int, begun: float) -> None:
    """What one process does: a line of JSON when it has started, one for each line it is sent, one at the end."""

    def tell(**values: float) -> None:
        print(json.dumps(values), flush=True)

    with tempfile.TemporaryDirectory(prefix="coterie-") as out:
        folder = RunFolder(Path(out))
        sim, engine = simulation(method, clients, sample, folder.path)
        tell(start=time.time() - begun)
        age(sim, sample, folder.path / "checkpoints")
        sim.train(1, engine)
        folder.save(1, sim.state, None)
        found: list[Any] = []
        paged_rows.walk(sim.state, lambda _, leaf: found.append(leaf))
        sizes = [len(leaf) * tree.nbytes(leaf.first) if isinstance(leaf, Paged) else leaf.nbytes for leaf in found]
        tell(states=sum(sizes) / 1e6)
        for number, _ in enumerate(sys.stdin, 2):
            begin = time.perf_counter()
            sim.train(number, engine)
            trained = time.perf_counter()
            folder.save(number, sim.state, None)
            tell(round=trained - begin, checkpoint=time.perf_counter() - trained)
    kilobytes = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    tell(resident=sum(kilobytes) * 1024 / 1e6)


def measure(method: str, sizes: Sequence[int], sample: int, rounds: int) -> list[list[Any]]:
    """The rows of one method, in the order of `COLUMNS`."""

    def hear(child: subprocess.Popen[str]) -> dict[str, float]:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"a process of {method} failed: see above")
        found: dict[str, float] = json.loads(line)
        return found

    children: list[subprocess.Popen[str]] = []
    told: list[dict[str, float]] = []
    times: list[dict[str, list[float]]] = [{"round": [], "checkpoint": []} for _ in sizes]
    try:
        for size in sizes:
            command = [sys.executable, __file__, "--one", method, str(size), str(sample), str(time.time())]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        told += [hear(child) | hear(child) for child in children]
        for _ in range(rounds):
            for child, taken in zip(children, times, strict=True):
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
                for key, value in hear(child).items():
                    taken[key].append(value)
        for child, about in zip(children, told, strict=True):
            assert child.stdin is not None
            child.stdin.close()
            about |= hear(child)
            child.wait()
    finally:
        for child in children:
            child.kill()
            child.wait()
    medians = [{key: 1e3 * statistics.median(values) for key, values in taken.items()} for taken in times]
    return [
        [method, size, about["start"], mine["round"], mine["round"] / medians[0]["round"], mine["checkpoint"],
         about["resident"], about["states"]]
        for size, about, mine in zip(sizes, told, medians, strict=True)
    ]  # fmt: skip


def judge(rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    most = max(row[1] for row in rows)
    last = [row for row in rows if row[1] == most]
    targets = [
        target(f"{row[0]}: a round of {most:,} clients over one of {rows[0][1]}", row[4], SLOWER, at_most=True)
        for row in last
    ]
    targets.append(target("most resident memory, MB", max(row[6] for row in rows), RESIDENT, at_most=True))
    targets.append(target(f"longest start of {most:,} clients, s", max(row[2] for row in last), START, at_most=True))
    return targets


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--one", nargs=4, metavar=("METHOD", "CLIENTS", "SAMPLE", "BEGUN"), help=argparse.SUPPRESS)
    given = asking.parse_args(arguments)
    if given.one:
        keep_freed_memory()  # as the command does
        method, clients, sample, begun = given.one
        work(method, int(clients), int(sample), float(begun))
        return 0
    sizes, sample, rounds = ((5, 20), 5, 2) if given.quick else (SIZES, SAMPLE, ROUNDS)
    rows: list[list[Any]] = []
    for method in METHODS:
        begin = time.perf_counter()
        rows += measure(method, sizes, sample, rounds)
        print(f"{method}: measured in {time.perf_counter() - begin:.0f} s", flush=True)
    note = f"{sample} clients a round, 25,194 parameters, --memory {MEMORY}; medians of {rounds} rounds."
    bars = [
        bar(f"{row[0]}, {row[1]:,} clients", row[4], SLOWER if row[1] == sizes[-1] else None, at_most=True)
        for row in rows
    ]
    drawn = plot(f"time of a round over that with {sizes[0]} clients", bars)
    return tell(given, "Many clients", COLUMNS, rows, judge(rows), drawn, notes=[note])


if __name__ == "__main__":
    sys.exit(main())
