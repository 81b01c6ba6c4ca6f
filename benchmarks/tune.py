"""What 20 candidates cost in one search, beside 20 runs of their own.

    python benchmarks/tune.py [--trials 20] [--rounds 20] [--repeats 1] [--write]

For small models: softmax regression on digits, and an MLP on the tables of eight generated hospitals. All ways are
timed in turn, after one run that leaves compiled steps on disk, and each has a process of its own, start included.
Processor time is that of all processes. The first five train the same rounds:

- runs:    `coterie run` once for each candidate, with neither report nor reference;
- loop:    `coterie.run` once for each candidate, in one process: what a script would do;
- one:     one search without halving, one candidate after another: one federation, one choice of an engine;
- beside:  the same with candidates side by side, where that is what the search does;
- plain:   the same where nothing is compiled (COTERIE_BACKEND=plain), so that candidates are side by side;
- halving: the same search as `coterie tune` does it, and one run of what it chose, with tests.

With --write, docs/tune.md gets the table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

SEARCH = """
import sys
from pathlib import Path
from coterie.experiment.run import run_setup
from coterie.experiment.tuning import candidates
from coterie.experiment.tuning.tune import prepare_searches, run_tuning

method, data, trials, rounds, model, way, out = sys.argv[1:]
if way == "one":
    candidates.Engines.shared = lambda *_: None
how = {"halving": way == "halving", "report": False, "model": model or None, "take_home": "federated"}
found = prepare_searches([method], data, trials=int(trials), rounds=int(rounds), **how)
found.methods = {method: found.methods[method]}  # local would have a search of its own
run_tuning(found, Path(out), test=False, report=False)
if way == "halving":
    run_setup(found.chosen(method), Path(out) / "chosen")
"""
LOOP = """
import sys
import coterie

method, data, trials, rounds, model, way, out = sys.argv[1:]
for rate in map(float, way.split(",")):
    try:
        coterie.run(method, data, model=model or None, rounds=int(rounds), lr=rate, reference=False, report=False,
                    take_home="federated", out=f"{out}/{rate:g}")
    except coterie.CoterieError as error:
        assert "diverged" in str(error)
"""
CASES = {"softmax regression on digits": ("digits", "linear"), "an MLP on hospitals' tables": ("hospitals", "mlp")}
SEARCHES = ("one", "beside", "plain", "halving")
WAYS = {
    "runs": "20 runs, a process each",
    "loop": "20 runs in one process",
    "one": "one search, one candidate after another",
    "beside": "one search, as `coterie tune --no-halving`",
    "plain": "the same where nothing is compiled",
    "halving": "one search, as `coterie tune`, and a tested run",
}
PAGE = Path(__file__).parents[1] / "docs" / "tune.md"
BEGIN, END = "<!-- benchmarks/tune.py -->", "<!-- end -->"


class Spent(NamedTuple):
    wall: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the table into docs/tune.md")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    found = {case: measure(options, *about) for case, about in CASES.items()}
    lines = table(found, options)
    print("\n".join(lines))
    if options.write:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def measure(options: argparse.Namespace, data: str, model: str) -> dict[str, list[Spent]]:
    """Time all ways in turn, `options.repeats` times."""
    rates = [f"{10 ** (-3 + 3 * k / max(options.trials - 1, 1)):g}" for k in range(options.trials)]
    common = ["--method", options.method, "--data", data, "--model", model, "--rounds", str(options.rounds)]

    def one_run(rate: str, out: Path) -> None:
        quick = ["--no-report", "--no-reference", "--quiet", "--take-home", "federated"]
        call([sys.executable, "-m", "coterie", "run", *common, *quick, "--lr", rate, "--out", str(out)])

    def script(text: str, way: str, out: Path) -> None:
        words = [options.method, data, str(options.trials), str(options.rounds), model, way, str(out)]
        call([sys.executable, "-c", text, *words], plain=way == "plain")

    spent: dict[str, list[Spent]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="coterie-tune-") as scratch:
        one_run("0.01", Path(scratch) / "warm")
        for k in range(options.repeats):
            place = Path(scratch) / str(k)
            each = [timed(partial(one_run, rate, place / f"run-{rate}")) for rate in rates]
            spent["runs"].append(Spent(sum(one.wall for one in each), sum(one.processor for one in each)))
            spent["loop"].append(timed(partial(script, LOOP, ",".join(rates), place / "loop")))
            for way in SEARCHES:
                spent[way].append(timed(partial(script, SEARCH, way, place / way)))
    return spent


def table(found: dict[str, dict[str, list[Spent]]], options: argparse.Namespace) -> list[str]:
    """Return the table in Markdown: medians, and how many times faster than the first row."""
    lines = [
        f"{options.trials} candidates of {options.method}, {options.rounds} rounds, the median of {options.repeats}; "
        "in brackets, the first row over this one:",
        "",
        f"| | {' | '.join(f'{case}: processor s | s' for case in found)} |",
        f"|---|{'---:|' * 2 * len(found)}",
    ]
    for way, words in WAYS.items():
        cells = []
        for spent in found.values():
            for part in ("processor", "wall"):
                value, runs = (statistics.median(getattr(each, part) for each in spent[key]) for key in (way, "runs"))
                cells.append(f"{value:.1f} ({runs / value:.1f}x)")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def timed(work: Callable[[], None]) -> Spent:
    """Return how many seconds something takes, and how many of processors in the processes that it starts."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(time.perf_counter() - begin, processor)


def call(words: Sequence[str], plain: bool = False) -> None:
    """Run a command; stop with what it printed if it fails, except that a run may diverge."""
    own = {"OMP_NUM_THREADS": "1", **({"COTERIE_BACKEND": "plain"} if plain else {})}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode and "training diverged" not in done.stderr:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
