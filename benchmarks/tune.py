"""What 20 candidates cost in one search, beside 20 runs of their own.

    python benchmarks/tune.py [--trials 20] [--rounds 20] [--write]

For small models: softmax regression on digits, and an MLP on the tables of eight generated hospitals; with compiled
steps, which a run before has left on disk, and in ordinary PyTorch (COTERIE_BACKEND=plain). All ways have the same
back-end, are timed in turn, and each has a process of its own, start included. Processor time is that of all processes.

- runs:    `coterie run` for each candidate, with neither report nor reference (a quarter of them is timed, times 4);
- loop:    `coterie.run` for each candidate, in one process: what a script would do;
- search:  `coterie tune --no-halving`: as many rounds as those, so that what it saves is by sharing;
- halving: `coterie tune`, and one run of what it chose, with tests.

With --write, docs/tune.md gets the table. On two idle cores it takes about four minutes.
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
from coterie.experiment.tuning.tune import prepare_searches, run_tuning

method, data, trials, rounds, model, way, out = sys.argv[1:]
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
CASES = {
    "softmax regression on digits, compiled": ("digits", "linear", False),
    "softmax regression on digits, not compiled": ("digits", "linear", True),
    "an MLP on hospitals' tables, compiled": ("hospitals", "mlp", False),
    "an MLP on hospitals' tables, not compiled": ("hospitals", "mlp", True),
}
SEARCHES = ("search", "halving")
WAYS = {
    "runs": "{} commands `coterie run`",
    "loop": "{} calls of `coterie.run` in one process",
    "search": "one search with as many rounds (`coterie tune --no-halving`)",
    "halving": "one search (`coterie tune`), and a tested run",
}
OF_RUNS = 4  # one of so many is timed
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
    parser.add_argument("--write", action="store_true", help="put the table into docs/tune.md")
    parser.add_argument("--only", default="", help="cases with these words")
    parser.add_argument("--json", type=Path, help="keep the numbers there; cases that it has are not timed again")
    options = parser.parse_args()
    found: dict[str, dict[str, Spent]] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text())
        found = {case: {way: Spent(*each) for way, each in ways.items()} for case, ways in known.items()}
    for case, about in CASES.items():
        if options.only in case and case not in found:
            found[case] = measure(options, *about)
            if options.json:
                options.json.write_text(json.dumps(found, indent=2))
    found = {case: found[case] for case in CASES if case in found}
    lines = table(found, options)
    print("\n".join(lines))
    if options.write:
        page = PAGE.read_text()
        head, tail = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


def measure(options: argparse.Namespace, data: str, model: str, plain: bool) -> dict[str, Spent]:
    """Time all ways in turn."""
    rates = [f"{10 ** (-3 + 3 * k / max(options.trials - 1, 1)):g}" for k in range(options.trials)]
    common = ["--method", options.method, "--data", data, "--model", model, "--rounds", str(options.rounds)]

    def one_run(rate: str, out: Path, *more: str) -> None:
        quick = ["--no-report", "--no-reference", "--quiet", "--take-home", "federated", *more]
        call([sys.executable, "-m", "coterie", "run", *common, *quick, "--lr", rate, "--out", str(out)], plain)

    def script(text: str, way: str, out: Path) -> None:
        words = [options.method, data, str(options.trials), str(options.rounds), model, way, str(out)]
        call([sys.executable, "-c", text, *words], plain)

    with tempfile.TemporaryDirectory(prefix="coterie-tune-") as scratch:
        place = Path(scratch)
        if not plain:
            one_run("0.01", place / "compiles", "--compile")
        some = rates[OF_RUNS // 2 :: OF_RUNS]
        each = [timed(partial(one_run, rate, place / f"run-{rate}")) for rate in some]
        spent = {"runs": Spent(*(len(rates) * statistics.mean(part) for part in zip(*each, strict=True)))}
        spent["loop"] = timed(partial(script, LOOP, ",".join(rates), place / "loop"))
        for way in SEARCHES:
            spent[way] = timed(partial(script, SEARCH, way, place / way))
    return spent


def table(found: dict[str, dict[str, Spent]], options: argparse.Namespace) -> list[str]:
    """Return the table in Markdown."""
    head = ["", "processor s", "s", *(f"times as fast as {what}: processor, wall" for what in ("commands", "calls"))]
    lines = [
        f"{options.trials} candidates of {options.method}, {options.rounds} rounds:",
        "",
        f"| {' | '.join(head)} |",
        "|---|---:|---:|---:|---:|",
    ]
    for case, spent in found.items():
        lines.append(f"| **{case}** | | | | |")
        for way, words in WAYS.items():
            own = spent[way]
            ratios = [", ".join(f"{a / b:.1f}" for a, b in zip(reversed(spent[other]), reversed(own), strict=True))
                      if way in SEARCHES else "" for other in ("runs", "loop")]  # fmt: skip
            cells = [words.format(options.trials), f"{own.processor:.1f}", f"{own.wall:.1f}", *ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def timed(work: Callable[[], None]) -> Spent:
    """Return how many seconds something takes, and how many of processors in the processes that it starts."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(time.perf_counter() - begin, processor)


def call(words: Sequence[str], plain: bool) -> None:
    """Run a command; stop with what it printed if it fails, except that a run may diverge."""
    own = {"OMP_NUM_THREADS": "1", **({"COTERIE_BACKEND": "plain"} if plain else {})}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode and "training diverged" not in done.stderr:
        sys.exit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
