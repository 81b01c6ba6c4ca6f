"""Five seeds of `coterie compare` against five runs of `coterie run`, one after another in one process.

Both sides choose their engine, train, evaluate every round and write their run folders; reports are left out. The
compared clients' metrics must agree. A target is a ratio of whole times, measured in turn.

    python benchmarks/seeds.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from telling import bar, parser, plot, target, tell

import coterie

SEEDS = 5
TARGET = 2.0
TURNS = 2


@dataclass(frozen=True)
class Case:
    name: str
    method: str
    data: str | None  # None: random images
    settings: dict[str, Any]
    clients: int = 20
    examples: int = 700  # of a client

    def given(self) -> Any:
        if self.data:
            return self.data
        draw = torch.Generator().manual_seed(0)
        shape = (self.clients, self.examples)
        x, y = torch.randn(*shape, 784, generator=draw), torch.randint(10, shape, generator=draw)
        return list(zip(x, y, strict=True))

    def quick(self) -> Case:
        return replace(
            self, settings={**self.settings, "rounds": 1, "local_epochs": 1, "batch_size": 512}, clients=2, examples=20
        )


SOFTMAX = {"rounds": 10, "local_epochs": 1, "batch_size": 10, "model": "linear"}
CASES = (
    Case("FedMAP, MLP 30-32-16-2", "fedmap", "synthetic-label-skew", {"rounds": 10, "local_epochs": 5}),
    Case("FedAvg, softmax regression", "fedavg", None, SOFTMAX),
)


def measure(case: Case, turns: int, **settings: Any) -> tuple[float, float]:
    """(seconds of five runs, seconds of five seeds), the medians."""
    data, options = case.given(), {**case.settings, "report": False, **settings}
    times: list[tuple[float, float]] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="coterie-benchmark-") as folder:
            begin = time.perf_counter()
            runs = [
                coterie.run(case.method, data, seed=seed, reference=False, out=Path(folder) / f"run-{seed}", **options)
                for seed in range(SEEDS)
            ]
            between = time.perf_counter()
            found = coterie.compare((case.method,), SEEDS, data, out=Path(folder) / "seeds", **options)
            times.append((between - begin, time.perf_counter() - between))
            check(case, runs, found)
    first, second = zip(*times, strict=True)
    return statistics.median(first), statistics.median(second)


def check(case: Case, runs: Sequence[coterie.Result], found: coterie.Comparison) -> None:
    """The same results, to rounding: a tie in validation may fall to another round."""
    alone, together = statistics.mean(run.mean() for run in runs), found.mean(case.method)
    if abs(alone - together) > 0.01:
        raise SystemExit(f"{case.name}: {alone:.4f} in five runs, but {together:.4f} with five seeds")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser(__doc__).parse_args(arguments)
    fixed = {"engine": "stacked", "compile": False, "workers": 1} if asked.quick else {}
    rows: list[list[Any]] = []
    for case in CASES:
        measure(case.quick(), 1, engine="stacked", compile=False, workers=1)  # what is slow once only
        runs, seeds = measure(case.quick() if asked.quick else case, 1 if asked.quick else TURNS, **fixed)
        rows.append([case.name, runs, seeds, runs / seeds])
    columns = ["case", f"{SEEDS} runs, s", f"{SEEDS} seeds, s", "ratio"]
    targets = [target(f"{row[0]}: ratio", row[3], TARGET) for row in rows]
    drawn = plot(
        f"time of {SEEDS} runs over that of {SEEDS} seeds in lockstep", [bar(row[0], row[3], TARGET) for row in rows]
    )
    return tell(asked, "Seeds in lockstep", columns, rows, targets, drawn)


if __name__ == "__main__":
    sys.exit(main())
