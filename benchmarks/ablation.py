"""What each piece of the compute machinery is worth: whole runs without it over whole runs with it.

    python benchmarks/ablation.py [--case NAME ...] [--piece NAME ...] [--json FILE] [--quick]

It takes about ten minutes on two quiet cores.

A measured run is a process of its own, timed by its parent from its start to its end: imports, data, choosing and
compiling, rounds, and what follows the last round. (`coterie run` also writes a report, which takes the same time
whatever piece is missing, and is left out.) Every piece has a switch here (`WITHOUT`), which takes it out of the
process before the run. A piece that changes what is compiled begins with an empty cache of compiled code (cold), and is
run again with what the first run left there (warm); the others are run once.

The federation is that of `whole_run.py`: 20 clients with 14,000 examples of Fashion-MNIST, Dirichlet 0.3, minibatches
of 10, one epoch a round. The engine is fixed to what `auto` chooses for 100 rounds, so that a piece's worth is not
mixed with a choice. A run with all pieces is made before and after each piece: the ratio is to the mean of both.

The time of a run of n rounds is the end of its n-th round, and what followed the last one. Where a run was shorter,
rounds like those from the fifth on are added, and the number is marked with *. With all pieces, softmax regression and
784-100-10 are run for 1,000 rounds; without one, for as many as fit into the time.

A piece stays if a run of 100 rounds without it takes at least 1.2 times as long, cold or warm, or if such a piece needs
it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from telling import bar, parser, plot, target, tell

BAR = 1.2  # of a run of 100 rounds
LENGTHS = (20, 100, 1_000)  # rounds
SETTLED = 5  # the first round that is like the later ones
SHARE = 0.2  # of the data: 14,000 examples
TIMEOUT = 900  # seconds of one run


@dataclass(frozen=True)
class Case:
    """A run, and the pieces that it can tell about."""

    label: str
    model: str
    rounds: int  # with all pieces, cold and warm
    pieces: dict[str, int]  # {piece: rounds without it, and of a run with all pieces after it}
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "softmax": Case(
        "softmax regression",
        "linear",
        1_000,
        {"compile": 100, "replay": 1_000, "rewriting": 1_000, "processor": 100, "threads": 1_000},
    ),
    "dnn": Case("784-100-10", "dnn", 1_000, {"compile": 40, "replay": 200, "rewriting": 200, "threads": 200}),
    "cnn": Case("pFedVMP CNN", "cnn", 8, {"compile": 6, "winograd": 8, "convolution": 8}, {"engine": "loop"}),
    "plain": Case("784-100-10, not compiled", "dnn", 20, {"packing": 20}, {"compile": False}),
}
ONCE = ("compile", "threads", "packing")  # nothing else is compiled without them
SETTINGS: dict[str, dict[str, Any]] = {"compile": {"compile": False}, "threads": {"workers": 1}}
GONE = (
    "Pieces that gave less on a run of 100 rounds are gone (minibatches drawn by C++, Gram matrices by C++, joint "
    "files of kernels, pooling, common subexpressions, the garbage collector's pause and others): the table that "
    "decided it is this page's at commit 96be50b."
)
ABOUT = {
    "compile": "steps compiled by TorchInductor; without: PyTorch's own operations, two processes",
    "replay": "compiled steps repeated by C++ (replay, recording); without: called from Python",
    "processor": "what the processor can do is asked of PyTorch; without: TorchInductor compiles six small programs",
    "rewriting": "descent as one product, reciprocals (rewriting); without: as traced",
    "threads": "two threads; without: one",
    "winograd": "5 x 5 convolutions by Winograd's method (winograd, layout, custom_ops); without: PyTorch's",
    "convolution": "first layers by im2col, others with channels last; without: as they are",
    "packing": "clients of different sizes share lanes; without: they are padded",
}


def _no_replay() -> None:
    from coterie.compute import compiled

    def refuse(*_: Any) -> Any:
        raise RuntimeError("left out")

    patch.object(compiled, "record", refuse).start()


def _no_rewriting() -> None:
    from coterie.compute import compiled

    patch.object(compiled, "rewrite", lambda graph: graph).start()


def _no_processor() -> None:
    from coterie.compute import inductor

    patch.object(inductor, "_processor_known", contextlib.nullcontext).start()


def _no_winograd() -> None:
    from coterie.compute import winograd

    winograd.DECOMPOSITIONS.clear()


def _no_convolution() -> None:
    from coterie.compute import compiled
    from coterie.experiment import simulation

    patch.object(compiled, "FewChannelConvolution", lambda alone: contextlib.nullcontext()).start()
    patch.object(simulation, "faster_if_alone", contextlib.nullcontext).start()


def _no_packing() -> None:
    from coterie.compute import compiled
    from coterie.core.plain import Plain

    patch.object(compiled, "Packed", lambda width: Plain()).start()


WITHOUT: dict[str, Callable[[], None]] = {
    "replay": _no_replay,
    "rewriting": _no_rewriting,
    "processor": _no_processor,
    "winograd": _no_winograd,
    "convolution": _no_convolution,
    "packing": _no_packing,
}


def settings_of(case: Case, piece: str | None, rounds: int) -> dict[str, Any]:
    """Return the keywords of `coterie.prepare` for a case without a piece."""
    fixed = {"engine": "stacked", "compile": True, "workers": 2} | case.settings | SETTINGS.get(piece or "", {})
    return {
        "method": "fedavg",
        "data": "fashion-mnist",
        "model": case.model,
        "partition": f"dirichlet:0.3:share={SHARE}",
        "clients": 20,
        "rounds": rounds,
        "local_epochs": 1,
        "batch_size": 10,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "validation": 0.02,
        "test": 0.2,
        "reference": False,
        **fixed,
    }


def child(settings: dict[str, Any], piece: str | None, begun: float) -> None:
    """Run once without a piece, and print when each round ended, in seconds since the process was started."""
    import coterie
    from coterie.cli.memory import keep_freed_memory
    from coterie.experiment.progress import Silent
    from coterie.experiment.run import run_setup

    class Clock(Silent):
        ends: list[float]

        def round(self, record: dict[str, Any], metric: str) -> None:
            self.ends.append(time.time() - begun)

    clock = Clock()
    clock.ends = []
    keep_freed_memory()  # as the command does
    if piece in WITHOUT:
        WITHOUT[piece]()
    setup = coterie.prepare(**settings)
    with tempfile.TemporaryDirectory(prefix="coterie-ablation-") as folder:
        run_setup(setup, Path(folder) / "run", progress=clock, report=False)
    print(json.dumps(clock.ends))


@dataclass(frozen=True)
class Run:
    ends: list[float]  # seconds from the start of the process to the end of each round
    whole: float  # and to its own end

    def at(self, rounds: int) -> float:
        """Return the seconds of a whole run of so many rounds."""
        tail = self.whole - self.ends[-1]
        if rounds <= len(self.ends):
            return self.ends[rounds - 1] + tail
        first = min(SETTLED, max(1, len(self.ends) // 2))
        mean = (self.ends[-1] - self.ends[first - 1]) / max(1, len(self.ends) - first)
        return self.ends[-1] + (rounds - len(self.ends)) * mean + tail

    @property
    def steady(self) -> float:
        """The median seconds of a settled round."""
        settled = self.ends[min(SETTLED, max(0, len(self.ends) - 2)) :]
        return statistics.median(b - a for a, b in itertools.pairwise(settled))


def measure(case: Case, piece: str | None, cache: Path, rounds: int) -> Run:
    """Run a case without a piece in a process of its own, with the compiled code in `cache`."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "XDG_CACHE_HOME": str(cache / "xdg")}
    begun = time.time()
    about = json.dumps([settings_of(case, piece, rounds), piece, begun])
    done = subprocess.run(
        [sys.executable, __file__, "--child", about],
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case.label} without {piece}:\n{done.stderr[-2000:]}")
    return Run(json.loads(done.stdout.splitlines()[-1]), time.time() - begun)


def ratios(without: Run, before: Run, after: Run) -> list[float]:
    """Return times without a piece over times with it, for each of `LENGTHS`, and of a settled round."""
    found = [without.at(n) / statistics.fmean([before.at(n), after.at(n)]) for n in LENGTHS]
    return [*found, without.steady / statistics.fmean([before.steady, after.steady])]


def compare(name: str, wanted: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    case = CASES[name]
    found = []
    with tempfile.TemporaryDirectory(prefix="coterie-ablation-caches-") as folder:
        caches = Path(folder)
        cold, warm = (measure(case, None, caches / "base", 2 if quick else case.rounds) for _ in range(2))
        for piece in (each for each in case.pieces if each in wanted):
            rounds = 2 if quick else case.pieces[piece]
            cache = caches / ("base" if piece in ONCE else piece)
            runs = [measure(case, piece, cache, rounds) for _ in range(1 if piece in ONCE else 2)]
            again = measure(case, None, caches / "base", rounds)
            row: dict[str, Any] = {"case": name, "piece": piece, "rounds": rounds}
            # Without compiling there is no cache: the one run is compared with both.
            row["cold"] = [] if piece in ("threads", "packing") else ratios(runs[0], cold, cold)
            row["warm"] = ratios(runs[-1], warm, again)
            print(f"{case.label} without {piece}: {json.dumps(row)}", flush=True)
            found.append(row)
            warm = again
    return found


def marked(ratio: float, length: int, rounds: int) -> str:
    return f"{ratio:.2f}" + "*" * (rounds < length)


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    asking.add_argument("--piece", nargs="+", choices=list(ABOUT), default=list(ABOUT))
    asking.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    asked = asking.parse_args(arguments)
    if asked.child is not None:
        child(*asked.child)
        return 0
    rows = [row for name in asked.case for row in compare(name, asked.piece, asked.quick)]
    heads = [f"{kind} {length:,}" for kind in ("cold", "warm") for length in LENGTHS]
    cells = [
        [
            *(row["piece"], CASES[row["case"]].label),
            *(
                marked(row[kind][place], length, row["rounds"]) if row[kind] else ""
                for kind in ("cold", "warm")
                for place, length in enumerate(LENGTHS)
            ),
            f"{row['warm'][-1]:.2f}",
        ]
        for row in rows
    ]
    best: dict[str, float] = {}
    for row in rows:
        best[row["piece"]] = max(best.get(row["piece"], 0.0), *(row[kind][1] for kind in ("cold", "warm") if row[kind]))
    targets = [target(f"{piece}: 100 rounds without it", ratio, BAR) for piece, ratio in best.items()]
    bars = [bar(piece, ratio, BAR) for piece, ratio in best.items()]
    return tell(
        asked,
        "What each piece is worth",
        ["without", "case", *heads, "a settled round"],
        cells,
        targets,
        plot("100 rounds without the piece over with it", bars),
        notes=[*(f"{piece}: {words}." for piece, words in ABOUT.items() if piece in best), GONE],
    )


if __name__ == "__main__":
    sys.exit(main())
