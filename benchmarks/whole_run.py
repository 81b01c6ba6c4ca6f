"""Whole runs against the ordinary way: rounds of training, combining and evaluating every client.

    python benchmarks/whole_run.py [--model NAME] [--method NAME] [--json FILE] [--quick]

20 clients share 14,000 examples of Fashion-MNIST (Dirichlet 0.3); minibatches of 10, one local epoch a round, and every
client's model is evaluated on its test data in every round. The other side is `ordinary.py`: the same methods with
the same data and minibatches of the same size. Ours is what `coterie run` does: `auto` picks the engine
for a run of 100 rounds, and every round is scored, recorded and checkpointed in a run folder.

A round of ours is the median of the rounds from 10 on, by the wall clock between the ends of rounds, so that whatever
is compiled then counts. What was paid before (choosing, compiling) is shown apart, with the round from which on a whole
run, all of it included, is faster than the ordinary one by the target. Ordinary rounds are timed before and after ours.

The breakdown is of all rounds from 10 on, in all processes. Useful work is 6 x the multiply-adds of the network's
layers for each example of a gradient; the machine's own rate is that of 1024 x 1024 float32 products on all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from local_training import Busy, matmul_rate, multiply_adds
from ordinary import METHODS, Ordinary
from rich.console import Console
from rich.table import Table
from torch.utils.data import TensorDataset

import coterie
from coterie.engine.engine import cores
from coterie.experiment.run import run_setup
from coterie.experiment.setup import Setup, num_outputs
from coterie.models import find_model
from coterie.spans import recording

LR, BATCH, CLIENTS = 0.01, 10, 20
SHARE = 14_000 / 70_000
RUN = 100  # rounds, for the choice of an engine
FIRST = 10  # the first round that counts


@dataclass(frozen=True)
class Case:
    model: str
    name: str
    rounds: int  # of ours
    target: float  # ratio to the ordinary way
    of_matmul: float | None  # target of the share of the matmul rate, FedAvg


CASES = (
    Case("linear", "softmax regression", 40, 30.0, None),
    Case("dnn", "784-100-10", 30, 10.0, 0.25),
    Case("cnn", "pFedVMP CNN", 14, 2.5, 0.40),
)


class Enough(Exception):
    """Ends our run: what is left of its rounds would be like those before."""


class Clock:
    """The end of each round, by the wall clock."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.begin, self.ends, self.said = rounds, time.perf_counter(), list[float](), list[str]()
        self.records: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, label: str, done: int, rounds: int) -> None: ...
    def stop(self) -> None: ...

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.ends.append(time.perf_counter())
        self.records.append(record)
        if len(self.ends) == self.rounds:
            raise Enough


@dataclass(frozen=True)
class Measured:
    case: Case
    method: str
    engine: str
    ordinary: float  # seconds a round
    ours: float
    startup: float  # seconds beyond rounds like the later ones
    training: float  # seconds a round, of all processes over their number
    share: dict[str, float]  # of our rounds
    flops: float  # a round
    accuracy: tuple[float, float]  # mean over clients: ordinary, ours, after as many rounds
    others: float

    @property
    def ratio(self) -> float:
        return self.ordinary / self.ours

    @property
    def pays_from(self) -> float:
        """The round from which a whole run, start-up included, is faster by the target."""
        gain = self.ordinary / self.case.target - self.ours
        return math.ceil(self.startup / gain) if gain > 0 else math.inf

    @property
    def work(self) -> float:
        return self.share.get("train", 0.0) + self.share.get("evaluate", 0.0)


def setup_of(case: Case, method: str, clients: int, share: float) -> Setup:
    return coterie.prepare(
        method,
        "fashion-mnist",
        model=case.model,
        partition=f"dirichlet:0.3:share={share}",
        clients=clients,
        rounds=RUN,
        local_epochs=1,
        batch_size=BATCH,
        optimizer={"name": "sgd", "lr": LR},
        validation=0.02,
        test=0.2,
        reference=False,
    )


def other_side(setup: Setup, method: str) -> Ordinary:
    federation = setup.federation
    x = federation.x if federation.decode is None else federation.decode(federation.x)

    def part(name: Any) -> list[TensorDataset]:
        indices = [torch.from_numpy(split[name]) for split in federation.clients.values()]
        return [TensorDataset(x[index], federation.y[index]) for index in indices]

    torch.manual_seed(0)
    module = find_model(setup.config.model)(tuple(x.shape[1:]), num_outputs(federation))
    return METHODS[method](module, part("train"), part("test"), BATCH, LR)


def measure(case: Case, method: str, clients: int, share: float) -> Measured:
    setup, busy = setup_of(case, method, clients, share), Busy()
    ordinary = other_side(setup, method)
    spent = list[float]()
    accuracy: list[float] = []

    def one_round() -> None:
        nonlocal accuracy
        begin = time.perf_counter()
        accuracy = ordinary.round()
        spent.append(time.perf_counter() - begin)

    one_round()
    clock = Clock(case.rounds)
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as folder, recording(True) as profile:
        clock.begin = time.perf_counter()
        with contextlib.suppress(Enough):
            run_setup(setup, Path(folder) / "run", progress=clock, report=False)
    one_round()
    assert profile is not None
    first = min(FIRST, case.rounds - 1)
    rounds = [b - a for a, b in zip(clock.ends[first - 1 :], clock.ends[first:], strict=False)]
    ours = statistics.median(rounds)
    steps = ordinary.steps
    module = ordinary.modules[0]
    shape = tuple(setup.federation.x.shape[1:])
    rows = {row.name: row for row in profile.table(rounds=True, first=first + 1)}
    counted = max(case.rounds - first, 1)
    train = (rows["train"].seconds + rows["train"].elsewhere) / counted
    workers = max((span.process for span in profile.spans), default=0) + 1
    return Measured(
        case,
        method,
        next((text for text in clock.said if text.startswith(method)), "").removeprefix(f"{method}: "),
        statistics.mean(spent),
        ours,
        max(clock.ends[-1] - clock.begin - case.rounds * ours, 0.0),
        train / min(workers, cores()),
        {name: row.share for name, row in rows.items()},
        6.0 * multiply_adds(module, shape) * BATCH * steps,
        (statistics.mean(accuracy), float(torch.tensor(clock.records[1]["test"]["accuracy"]).nanmean())),
        busy.others(),
    )


def tell(results: Sequence[Measured], rate: float, console: Console) -> tuple[list[str], list[list[Any]]]:
    columns = ["model", "method", "ordinary s", "ours s", "ratio", "target", "start-up s", "pays from round"]
    columns += ["train + evaluate", "of matmul rate", "accuracy after 2 rounds"]
    rows: list[list[Any]] = []
    for m in results:
        pays = "never" if math.isinf(m.pays_from) else f"{m.pays_from:,.0f}"
        rows.append(
            [
                *(m.case.name, m.method, f"{m.ordinary:.3g}", f"{m.ours:.3g}", f"{m.ratio:.1f}x"),
                *(f"{m.case.target:g}x", f"{m.startup:.1f}", pays, f"{m.work:.0%}"),
                *(f"{m.flops / m.training / rate:.0%}", f"{m.accuracy[0]:.3f} / {m.accuracy[1]:.3f}"),
            ]
        )
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for m in results:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in m.share.items() if share >= 0.005)
        console.print(f"{m.case.name}, {m.method}: {m.engine}; a round is {parts}", highlight=False)
    others = max(m.others for m in results)
    trusted = ": too much for these ratios to be trusted" if others > 0.1 else ""
    console.print(f"Matmul {rate / 1e9:.0f} GFLOP/s on {cores()} cores. Others took {others:.0%}{trusted}.")
    return columns, rows


def targets(results: Sequence[Measured], rate: float) -> list[dict[str, Any]]:
    told = []
    for m in results:
        about = f"{m.case.name}, {m.method}"
        told.append((f"{about}: ratio to the ordinary way", m.ratio, m.case.target))
        told.append((f"{about}: share of training and evaluation", m.work, 0.9))
        if m.method == "fedavg" and m.case.of_matmul:
            told.append((f"{about}: share of the matmul rate", m.flops / m.training / rate, m.case.of_matmul))
    return [{"name": n, "value": round(v, 3), "target": t, "reached": v >= t} for n, v, t in told]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    parser.add_argument("--method", choices=list(METHODS), help="only this one")
    parser.add_argument("--json", type=Path, help="write the table and the targets here, too")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small, and no target is judged")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(cores())
    console = Console(width=max(Console().width, 150))
    rate = statistics.median(matmul_rate() for _ in range(3))
    results = []
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as empty:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", empty)  # so that compiling is really compiling
        for case in CASES:
            for method in METHODS:
                if asked.model in (None, case.model) and asked.method in (None, method):
                    if asked.quick:
                        case = Case(case.model, case.name, 4, case.target, case.of_matmul)
                    results.append(
                        measure(case, method, 3 if asked.quick else CLIENTS, 0.005 if asked.quick else SHARE)
                    )
                    last = results[-1]
                    console.print(f"{case.name}, {method}: {last.ratio:.1f}x", highlight=False)
    columns, rows = tell(results, rate, console)
    judged = targets(results, rate)
    if asked.json:
        title = "Whole runs against the ordinary way"
        asked.json.write_text(
            json.dumps({"title": title, "columns": columns, "rows": rows, "targets": judged}, indent=2)
        )
    missed = [target for target in judged if not target["reached"]]
    for target in [] if asked.quick else missed:
        print(f"not reached: {target['name']}: {target['value']} of {target['target']}")
    return int(bool(missed) and not asked.quick)


if __name__ == "__main__":
    sys.exit(main())
