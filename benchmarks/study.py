"""Whole commands, from the prompt to the prompt: the default run, one of 20 clients, and a study against ordinary code.

    python benchmarks/study.py [--quick] [--json FILE]

Every command is a process of its own, twice: with an empty cache of compiled steps (cold) and with the one that the
first left (warm). The study is `coterie compare` of eight methods with three seeds: ten rounds of 784-100-10 on all of
Fashion-MNIST, 20 clients, Dirichlet 0.3, minibatches of 10, evaluated in every round, with run folders, model cards,
intervals and the report.

The other side is `ordinary.py`: the same methods from the same initial model with the same data and as many gradients
of as many examples, counted on both sides. It is charged for its rounds only: not for importing PyTorch, reading data
or writing anything. The first round of each method is timed before each of our two studies, and the mean is multiplied
by the rounds and seeds of the study. After that round, the mean accuracies of both sides must be close.

Processor time is that of all processes and threads; where others keep the machine busy, its ratio says more than that
of the wall clock. The first round begins when the engine is told; the end begins when the last round is told.
"""

from __future__ import annotations

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import Busy
from ordinary import STUDY, Work
from telling import bar, parser, plot, target, tell
from whole_run import BATCH, LR, other_side, same_work, work_of

import coterie
from coterie.compute.cpu import cores
from coterie.experiment.setup import Setup
from coterie.storage.run_folder import RunFolder

COLD, WARM = "cold", "warm"
STUDY_TARGETS = {COLD: 6.0, WARM: 10.0}  # times the ordinary way
START, END = 3.0, 2.0  # seconds, warm: to the first round, and from the last one
CLOSE = 0.1  # mean accuracies of the two sides
ENGINE = re.compile(r"\S+: (stacked|loop): ")
LAST_ROUND = re.compile(r" round (\d+)/\1 ")


class Spent(NamedTuple):
    wall: float
    processor: float

    def __add__(self, other: Any) -> Spent:
        return Spent(self.wall + other.wall, self.processor + other.processor)

    def times(self, factor: float) -> Spent:
        return Spent(factor * self.wall, factor * self.processor)


@dataclass(frozen=True)
class Timed:
    """A command."""

    spent: Spent
    start: float  # seconds until the engine was told
    end: float  # seconds after the last round


@dataclass(frozen=True)
class Size:
    rounds: int = 10
    seeds: int = 3
    methods: tuple[str, ...] = tuple(STUDY)
    partition: str = "dirichlet:0.3"
    clients: int = 20

    def settings(self) -> dict[str, Any]:
        about = {"data": "fashion-mnist", "model": "dnn", "partition": self.partition, "clients": self.clients}
        return {**about, "rounds": self.rounds, "batch_size": BATCH, "lr": LR}

    def flags(self) -> list[str]:
        return [f"--{key.replace('_', '-')}={value}" for key, value in self.settings().items()]

    def setup(self, method: str) -> Setup:
        return coterie.prepare(method, reference=False, **self.settings())


QUICK = Size(2, 1, ("local", "scaffold"), "dirichlet:0.3:share=0.01", 3)


def commands(size: Size, quick: bool) -> dict[str, list[str]]:
    few = ["--rounds=2"] if quick else []
    study = ["compare", f"--methods={','.join(size.methods)}", f"--seeds={size.seeds}", *size.flags()]
    return {"coterie run": ["run", *few], "a run of 20 clients": ["run", *size.flags()], "the study": study}


def command(words: Sequence[str], out: Path, cache: Path) -> Timed:
    """Run `coterie` in a process of its own, and time what it says."""
    own = {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "steps"), "PYTHONUNBUFFERED": "1"}
    # As a user's Python does, it keeps the bytecode of what it imports.
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    start = last = begin
    with subprocess.Popen(
        [sys.executable, "-m", "coterie", *words, f"--out={out}"],
        env=usual | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = list[str]()
        for line in process.stdout:
            said.append(line)
            now = time.perf_counter()
            if start == begin and ENGINE.match(line):
                start = now
            if LAST_ROUND.search(line):
                last = now
    if process.returncode:
        raise SystemExit(f"coterie {' '.join(words)} failed:\n{''.join(said[-20:])}")
    done, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timed(Spent(done - begin, processor), start - begin, done - last)


@dataclass
class Other:
    """The ordinary side of one method: its first round, timed again and again."""

    spent: list[Spent]
    work: Work
    accuracy: float


def first_round(size: Size, method: str) -> Other:
    setup = size.setup(method)
    ordinary = other_side(setup, method)
    before, begin = time.process_time(), time.perf_counter()
    accuracy = statistics.mean(ordinary.round())
    spent = Spent(time.perf_counter() - begin, time.process_time() - before)
    return Other([spent], same_work(method, ordinary.work, work_of(setup)), accuracy)


def accuracy_of(folder: Path, round: int) -> float:
    """The mean test accuracy of one of our runs after a round."""
    record = RunFolder(folder).read_rounds(round)[-1]
    return float(torch.tensor(record["test"]["accuracy"]).nanmean())


def measure(size: Size, quick: bool) -> tuple[dict[tuple[str, str], Timed], dict[str, Other], float]:
    """All commands by name and cache, the ordinary side by method, and how far accuracies are apart at most."""
    timed: dict[tuple[str, str], Timed] = {}
    apart = 0.0
    ordinary: dict[str, Other] = {}
    with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as scratch:
        for cache in (COLD, WARM):
            for name, words in commands(size, quick).items():
                plain = name.replace(" ", "-")  # TorchInductor cannot compile in a folder with a space in its name
                out = Path(scratch) / cache / plain
                if name == "the study":
                    for method in size.methods:
                        found = first_round(size, method)
                        found.spent += ordinary[method].spent if method in ordinary else []
                        ordinary[method] = found
                timed[name, cache] = command(words, out, Path(scratch) / "cache" / plain)
                print(f"{name}, {cache}: {timed[name, cache].spent.wall:.1f} s", flush=True)
        for method, other in ordinary.items():
            ours = accuracy_of(Path(scratch) / WARM / "the-study" / f"{method}-seed0", 1)
            apart = max(apart, abs(ours - other.accuracy))
    return timed, ordinary, apart


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(cores())
    size, busy = QUICK if asked.quick else Size(), Busy()
    timed, ordinary, apart = measure(size, asked.quick)
    whole = {
        method: sum(other.spent, Spent(0.0, 0.0)).times(size.rounds * size.seeds / len(other.spent))
        for method, other in ordinary.items()
    }
    theirs = sum(whole.values(), Spent(0.0, 0.0))
    rows, targets, bars = list[list[Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for (name, cache), each in timed.items():
        rows.append([name, cache, each.spent.wall, each.spent.processor, each.start, each.end, "", ""])
        if name == "the study":
            ratio = theirs.wall / each.spent.wall
            rows[-1][-2:] = [f"{ratio:.1f}x", f"{theirs.processor / each.spent.processor:.1f}x"]
            targets.append(target(f"the study, {cache}: ratio to the ordinary way", ratio, STUDY_TARGETS[cache]))
            bars.append(bar(f"the study, {cache}", ratio, STUDY_TARGETS[cache]))
    rows.append(["the study, ordinary", "", theirs.wall, theirs.processor, "", "", "1x", "1x"])
    for name in ("coterie run", "a run of 20 clients"):
        told = timed[name, WARM]
        targets.append(target(f"{name}, warm: seconds to the first round", told.start, START, at_most=True))
        if name != "coterie run":  # its clients' choices are cross-validated, which is training
            targets.append(target(f"{name}, warm: seconds after the last round", told.end, END, at_most=True))
    targets.append(target("largest difference of the sides' mean accuracies", apart, CLOSE, at_most=True))
    columns = ["command", "cache", "s", "processor s", "s to the first round", "s after the last round"]
    columns += ["ratio", "ratio of processor time"]
    by_method = [
        [method, other.work.gradients, whole[method].wall, f"{other.accuracy:.3f}"]
        for method, other in ordinary.items()
    ]
    return tell(
        asked,
        "Whole commands and a study",
        columns,
        rows,
        targets,
        plot("ordinary time over ours, from the command to the prompt", bars),
        tables=[
            {
                "title": "The ordinary side of the study",
                "columns": ["method", "gradients a round", "s of all rounds and seeds", "accuracy after a round"],
                "rows": by_method,
            }
        ],
        notes=[
            f"{len(size.methods)} methods, {size.seeds} seeds, {size.rounds} rounds; an ordinary round of each method "
            f"was timed twice and multiplied. Others took {busy.others():.0%} of the machine. What `coterie run` does "
            "after its last round is mostly training: the cross-validation by which small clients choose."
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
