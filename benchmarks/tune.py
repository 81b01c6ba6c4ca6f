"""What 20 candidates cost in one search, beside 20 runs of their own.

    python benchmarks/tune.py [--trials 20] [--rounds 20] [--method fedavg] [--data digits] [--repeats 3]

All ways are timed in turn, each in processes of its own, start included, after one run that leaves compiled steps on
disk. Ratios are printed first, since machines and their other work differ. The first three train the same rounds:

- runs:    `coterie run` once for each candidate, with neither report nor reference;
- one:     one search without halving, one candidate after another: one process, one federation, one choice of an
           engine, shared compiled steps;
- beside:  the same with candidates side by side, where that is what the search does (COTERIE_BACKEND=plain);
- halving: the same search as `coterie tune` does it, and one run of what it chose, with tests.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SEARCH = """
import sys
from pathlib import Path
from coterie.experiment.run import run_setup
from coterie.experiment.tuning import candidates
from coterie.experiment.tuning.tune import prepare_searches, run_tuning

method, data, trials, rounds, model, way, out = sys.argv[1:]
if way == "one":
    candidates.Engines.shared = lambda *_: None
how = {"halving": way == "halving", "report": False, "model": model or None}
found = prepare_searches([method], data, trials=int(trials), rounds=int(rounds), **how)
found.methods = {method: found.methods[method]}  # local would have a search of its own
run_tuning(found, Path(out), test=False, report=False)
if way == "halving":
    run_setup(found.chosen(method), Path(out) / "chosen")
"""


SEARCHES = ("one", "beside", "halving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="", help="by default that of the data set")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    common = ["--method", options.method, "--data", options.data, "--rounds", str(options.rounds)]
    common += ["--model", options.model] if options.model else []
    rates = [10 ** (-3 + 3 * k / max(options.trials - 1, 1)) for k in range(options.trials)]

    def one_run(rate: float, out: Path) -> None:
        quick = ["--no-report", "--no-reference", "--quiet"]
        call([sys.executable, "-m", "coterie", "run", *common, *quick, "--lr", f"{rate:g}", "--out", str(out)])

    def search(way: str, out: Path) -> None:
        words = [options.method, options.data, str(options.trials), str(options.rounds), options.model, way, str(out)]
        call([sys.executable, "-c", SEARCH, *words])

    seconds: dict[str, list[float]] = {"runs": [], **{way: [] for way in SEARCHES}}
    with tempfile.TemporaryDirectory(prefix="coterie-tune-") as scratch:
        one_run(0.01, Path(scratch) / "warm")
        search("halving", Path(scratch) / "warm-search")
        for k in range(options.repeats):
            place = Path(scratch) / str(k)
            for way in SEARCHES:
                seconds[way].append(timed(functools.partial(search, way, place / way)))
            runs = [functools.partial(one_run, rate, place / f"run-{rate:g}") for rate in rates]
            seconds["runs"].append(sum(map(timed, runs)))
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{options.trials} candidates of {options.method} on {options.data}, {options.rounds} rounds")
    print(f"rounds equal, one search (runs / one):                    {middle['runs'] / middle['one']:.1f}x")
    print(f"rounds equal, side by side (one / beside):                {middle['one'] / middle['beside']:.1f}x")
    print(f"rounds equal, both (runs / beside):                       {middle['runs'] / middle['beside']:.1f}x")
    print(f"fewer rounds, halving and a tested run (beside / halving): {middle['beside'] / middle['halving']:.1f}x")
    print(f"together (runs / halving):                                {middle['runs'] / middle['halving']:.1f}x")
    print("seconds:", ", ".join(f"{name} {value:.1f}" for name, value in middle.items()))
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": str(options.json), "seconds": seconds}, indent=2))


def timed(work: Callable[[], None]) -> float:
    """Return how many seconds something takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def call(words: list[str]) -> None:
    """Run a command; stop with what it printed if it fails, except that a run may diverge."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode and "training diverged" not in done.stderr:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
