"""Whole runs against the ordinary way: rounds of training, combining and evaluating every client.

    python benchmarks/whole_run.py [--model NAME] [--method NAME] [--json FILE] [--quick]

20 clients share 14,000 examples of Fashion-MNIST (Dirichlet 0.3); minibatches of 10, one local epoch a round, and every
client's model is evaluated on its test data in every round. The other side is `ordinary.py`: the same methods from the
same initial model, with the same data and as many gradients of as many examples, counted on both sides: nothing is
compared otherwise. Ours is what `coterie run` does: `auto` picks the engine for a run of 100 rounds, and every
round is scored (on validation data, too), recorded and checkpointed in a run folder.

A round of ours is the median of the rounds from 10 on, by the wall clock between the ends of rounds, so that whatever
is compiled then counts; two of them at least, and as many as there is time for. pFedBreD takes seven gradients a
minibatch; with the CNN, both sides have a quarter of the examples. An ordinary round is timed before ours and, unless
it is long, once more after. What was paid beyond those (choosing, compiling)
is shown apart; a run of 100 rounds has all of it in it. As many ordinary rounds as were timed, and ours, lead to mean
accuracies that are close.

The breakdown is of all rounds from 3 on, when nothing is compiled any more, in all processes and threads: checkpoints
are seldom, so that few rounds may have none or too many. Useful work is 6 x the multiply-adds of the network's
layers for each example of a gradient, 2 x for one that is only scored: so many are *credited*, though a convolution may
be computed with fewer (`winograd.py`), so that the share of the CNN can be above 100 %. The machine's own rate is that
of 1024 x 1024 float32 products on all cores.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from local_training import multiply_adds
from machine import Busy, matmul_rate
from ordinary import METHODS, STUDY, Ordinary, Work
from telling import bar, cell, parser, plot, target, tell
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import TensorDataset

import coterie
from coterie.cli.memory import keep_freed_memory
from coterie.compute.cpu import cores
from coterie.compute.inductor import compile_graph
from coterie.data.minibatches import draw
from coterie.experiment.building import num_outputs
from coterie.experiment.run import run_setup
from coterie.experiment.setup import Setup
from coterie.methods import Ditto, FedMAP, PFedBreD
from coterie.models import find_model
from coterie.profiling import WORK, recording

LR, BATCH, CLIENTS = 0.01, 10, 20
SHARE = 14_000 / 70_000
RUN = 100  # rounds, for the choice of an engine
FIRST = 10  # the first round that counts
COMPILED = 3  # the first one of the breakdown: by then, all is compiled
SECONDS = 3.0  # of rounds of ours that count; but two of them, at least
LONG = 5.0  # seconds of an ordinary round that is timed once only
CLOSE = 0.1  # mean accuracies of the two sides, whose minibatches are drawn apart, after a round or two
PARTS = ("dispatch", "gather", "train", "aggregate", "evaluate", "write", "workers", "other")


@dataclass(frozen=True)
class Case:
    model: str
    name: str
    target: float  # ratio to the ordinary way
    of_matmul: float | None  # target of the share of the matmul rate, FedAvg
    rounds: int = 60  # of ours, at most
    clients: int = CLIENTS
    share: float = SHARE  # of the data

    def of(self, method: str) -> Case:
        return replace(self, share=self.share / 4) if (self.model, method) == ("cnn", "pfedbred") else self

    def quick(self) -> Case:
        return replace(self, rounds=3, clients=3, share=0.005)


CASES = (
    Case("linear", "softmax regression", 30.0, None),
    Case("dnn", "784-100-10", 10.0, 0.25),
    Case("cnn", "pFedVMP CNN", 2.5, 0.40),
)


class Enough(Exception):
    """Ends our run: what is left of its rounds would be like those before."""


class Clock:
    """The end of each round, by the wall clock."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.begin, self.ends, self.said = time.perf_counter(), list[float](), list[str]()
        self.records: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def start(self, label: str, done: int, rounds: int) -> None: ...
    def stop(self) -> None: ...

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.ends.append(time.perf_counter())
        self.records.append(record)
        late = len(self.ends) > FIRST and self.ends[-1] - self.ends[FIRST - 2] > SECONDS
        if late or len(self.ends) == self.rounds:
            raise Enough


@dataclass(frozen=True)
class Measured:
    case: Case
    method: str
    engine: str
    work: Work  # a round, of either side
    counted: tuple[int, int]  # the first and the last round of ours that counts
    ordinary: float  # seconds a round
    ours: float
    startup: float  # seconds beyond rounds like the later ones
    training: float  # seconds a round, of all processes over their number
    share: dict[str, float]  # of our rounds
    flops: float  # a round
    rounds: int  # of the ordinary side: so many led to the accuracies
    accuracy: tuple[float, float]  # mean over clients: ordinary, ours
    others: float

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.method}"

    @property
    def ratio(self) -> float:
        return self.ordinary / self.ours

    @property
    def whole(self) -> float:
        """The ratio of whole runs, start-up included."""
        return RUN * self.ordinary / (RUN * self.ours + self.startup)

    @property
    def pays_from(self) -> str:
        """The round from which a whole run, start-up included, is faster by the target."""
        gain = self.ordinary / self.case.target - self.ours
        return f"{math.ceil(self.startup / gain):,}" if gain > 0 else "never"

    @property
    def useful(self) -> float:
        """The share of the time that is training and evaluation."""
        return sum(self.share.get(name, 0.0) for name in WORK)


def setup_of(case: Case, method: str) -> Setup:
    return coterie.prepare(
        method,
        "fashion-mnist",
        model=case.model,
        partition=f"dirichlet:0.3:share={case.share}",
        clients=case.clients,
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

    module = find_model(setup.config.model)(tuple(x.shape[1:]), num_outputs(federation))
    module.load_state_dict(setup.task.init())
    return {**STUDY, **METHODS}[method](module, part("train"), part("test"), BATCH, LR)


def work_of(setup: Setup) -> Work:
    """A round of ours: its minibatches, and how often the method takes the gradient of each and scores it."""
    config, method = setup.config, setup.method
    everybody = range(len(setup.federation.names))
    batches = draw(setup.federation, everybody, config.plan(), seed=config.seed, purpose="minibatches", round=1)
    minibatches, examples = int(batches.mask.any(-1).sum()), int(batches.mask.sum())
    each, scored = 1, 0
    if isinstance(method, PFedBreD):  # two of the step that makes the prior personal, then those towards theta
        each = 2 + method.prox_steps
    if isinstance(method, Ditto):  # the model for all, and the client's own
        each = 2
    if isinstance(method, FedMAP):  # the likelihood in a client's weight, and those of the two models to begin at
        scored = examples * ((method.weighting == "omega") + 2 * (method.start == "better"))
    return Work(each * minibatches, each * examples, scored)


def same_work(about: str, theirs: Work, ours: Work) -> Work:
    if theirs != ours:
        raise SystemExit(f"{about}: not the same work: ordinary {theirs}, ours {ours}")
    return ours


def measure(case: Case, method: str) -> Measured:
    setup, busy = setup_of(case, method), Busy()
    ordinary = other_side(setup, method)
    spent, accuracy = list[float](), list[float]()

    def one_round() -> None:
        begin = time.perf_counter()
        accuracy[:] = ordinary.round()
        spent.append(time.perf_counter() - begin)

    one_round()
    work = same_work(f"{case.name}, {method}", ordinary.work, work_of(setup))
    clock = Clock(case.rounds)
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as folder, recording(True) as profile:
        clock.begin = time.perf_counter()
        with contextlib.suppress(Enough):
            run_setup(setup, Path(folder) / "run", progress=clock, report=False)
    if spent[0] < LONG:
        one_round()
    assert profile is not None
    done = len(clock.ends)
    first = min(FIRST, done - 1)  # fewer in a smoke test
    ours = statistics.median(b - a for a, b in zip(clock.ends[first - 2 :], clock.ends[first - 1 :], strict=False))
    warm = min(COMPILED, first)
    rows = {row.name: row for row in profile.table(rounds=True, first=warm)}
    workers = max((span.process for span in profile.spans), default=0) + 1
    train = (rows["train"].seconds + rows["train"].elsewhere) / (done - warm + 1)
    each = multiply_adds(ordinary.modules[0], tuple(setup.federation.x.shape[1:]))
    reached = clock.records[len(spent) - 1]["test"]["accuracy"]
    return Measured(
        case,
        method,
        next((text for text in clock.said if text.startswith(method)), "").removeprefix(f"{method}: "),
        work,
        (first, done),
        statistics.mean(spent),
        ours,
        max(clock.ends[-1] - clock.begin - done * ours, 0.0),
        train / min(workers, cores()),
        {name: row.share for name, row in rows.items()},
        each * (6.0 * work.examples + 2.0 * work.scored),
        len(spent),
        (statistics.mean(accuracy), float(torch.tensor(reached).nanmean())),
        busy.others(),
    )


def rows_of(results: Sequence[Measured], rate: float) -> tuple[list[str], list[list[Any]]]:
    columns = ["model", "method", "gradients a round", "ordinary s", "ours s", "rounds", "ratio", "target"]
    columns += [
        "start-up s",
        f"ratio of {RUN} rounds with start-up",
        "pays from round",
        "of matmul rate",
        "accuracy after",
    ]
    rows = []
    for m in results:
        times: list[Any] = [m.work.gradients, m.ordinary, m.ours, f"{m.counted[0]}-{m.counted[1]}", f"{m.ratio:.1f}x"]
        whole = [m.startup, f"{m.whole:.1f}x", m.pays_from, f"{m.flops / m.training / rate:.0%}"]
        after = f"{m.rounds} round{'s' * (m.rounds > 1)}: {m.accuracy[0]:.3f} / {m.accuracy[1]:.3f}"
        rows.append([m.case.name, m.method, *times, f"{m.case.target:g}x", *whole, after])
    return columns, rows


def targets_of(results: Sequence[Measured], rate: float) -> list[dict[str, Any]]:
    told = []
    for m in results:
        told.append(target(f"{m.name}: ratio to the ordinary way", m.ratio, m.case.target))
        told.append(target(f"{m.name}: share of training and evaluation", m.useful, 0.9))
        if m.method == "fedavg" and m.case.of_matmul:
            told.append(target(f"{m.name}: share of the matmul rate", m.flops / m.training / rate, m.case.of_matmul))
    apart = max(abs(m.accuracy[0] - m.accuracy[1]) for m in results)
    return [*told, target("largest difference of the sides' mean accuracies", apart, CLOSE, at_most=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--model", choices=[case.model for case in CASES], help="only this one")
    asking.add_argument("--method", choices=list(METHODS), help="only this one")
    asked = asking.parse_args(arguments)
    keep_freed_memory()  # as the command does
    torch.set_num_threads(cores())
    rate = statistics.median(matmul_rate() for _ in range(3))
    results = list[Measured]()
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as empty:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", empty)  # so that compiling is really compiling
        if not asked.quick:  # once a machine, the compiler finds out what the processor can do: no run's own cost
            compile_graph(make_fx(lambda x: [x + 1])(torch.zeros(64)), [torch.zeros(64)])
        for case in CASES:
            for method in METHODS:
                if asked.model in (None, case.model) and asked.method in (None, method):
                    begin = time.perf_counter()
                    results.append(measure(case.quick() if asked.quick else case.of(method), method))
                    taken = time.perf_counter() - begin
                    print(f"{results[-1].name}: {cell(results[-1].ratio)}x, in {taken:.0f} s", flush=True)
    breakdown = [[m.case.name, m.method, *(f"{m.share.get(part, 0.0):.1%}" for part in PARTS)] for m in results]
    others = max(m.others for m in results)
    return tell(
        asked,
        "Whole runs against the ordinary way",
        *rows_of(results, rate),
        targets_of(results, rate),
        plot("ordinary time over ours, a round", [bar(m.name, m.ratio, m.case.target) for m in results], log=True),
        tables=[
            {"title": "Where our rounds spend their time", "columns": ["model", "method", *PARTS], "rows": breakdown},
            {"title": "What auto chose", "columns": ["case", "engine"], "rows": [[m.name, m.engine] for m in results]},
        ],
        notes=[f"Matmul {rate / 1e9:.0f} GFLOP/s on {cores()} cores. Others took at most {others:.0%} in a case."],
    )


if __name__ == "__main__":
    sys.exit(main())
