"""All methods on one common benchmark: Fashion-MNIST, two kinds of clients, two models, three seeds.

    COTERIE_DATA=... python benchmarks/common.py [--quick] [--only NAME] [--methods NAMES] [--page] [--minutes N]
                                                 [--results FILE]

Every method of `METHODS`, `local` included, is tuned in the same way on the validation examples of the first seed: by
the search of `coterie tune` with `TRIALS` candidates, or with the optimisers in `TRIED` (`tuning`). What was chosen
runs on all seeds, which have the same splits, so that no test example was in the search. The result of each method on
each federation is kept in docs/benchmark.json as soon as it is there, with a hash of its settings and of the code of
the method's file: started again, the script only runs what is missing or has changed, and two may run at once, with
--only for different federations. After a change elsewhere that changes results, delete their lines. --page runs
nothing. What a method scores if clients may only predict classes that they have is measured, too. docs/benchmark.md is
written from what was measured, never by hand; why methods look odd there comes from benchmarks/common.toml. It is no
part of `make bench`: time is shown, but nothing depends on it.

Of some results only the page's row is kept ("printed"): they were measured before there was docs/benchmark.json.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from defaults import ROOT, Case, fingerprint
from numpy.typing import NDArray

from coterie import SGD, CoterieError
from coterie.evaluation import Predictions
from coterie.evaluation.metrics import mean
from coterie.experiment.several.compare import run_trials
from coterie.experiment.several.trials import Trials, prepare_trials
from coterie.experiment.tuning.space import in_words
from coterie.experiment.tuning.tune import given_names, run_tuning, searches_of, tuned
from coterie.methods import METHODS
from coterie.storage import files
from coterie.storage.run_folder import RunFolder

SEEDS = (0, 1, 2)
TRIALS = 9  # candidates of each method
PARTITIONS = {"2 classes each": "classes:2:each=50", "Dirichlet 0.1": "dirichlet:0.1:share=0.03"}
MODELS: Mapping[str, dict[str, Any]] = {
    "784-100-10": {"model": "dnn", "rounds": 27, "local_epochs": 2, "evaluate_every": 3},
    "CNN": {"model": "lenet", "rounds": 10, "local_epochs": 5, "evaluate_every": 2},
}
BATCH = 10
# Of models that learn too little in the first rounds of a search to be judged then. Without momentum, LeNet takes long
# to leave the plateau at its start.
TRIED = {"lenet": (SGD(0.01, momentum=0.9), SGD(0.03, momentum=0.9))}
SPLIT: Mapping[str, Any] = {"validation": 0.2, "test": 0.6}  # few examples to train on, so that others can help
PLACES = 5  # of a score that is kept: more than any number of test examples tells apart
SAME = 1e-9  # two methods whose scores differ by less are equal to the digit
FAR = 0.05  # below local by more than this is said
NOTES = Path(__file__).with_name("common.toml")
RESULTS = ROOT / "docs" / "benchmark.json"


def cases() -> tuple[Case, ...]:
    """Return the four federations."""
    return tuple(
        Case(
            f"{kind}, {model}",
            f"20 clients, `--partition {partition} --model {own['model']} --rounds {own['rounds']} "
            f"--local-epochs {own['local_epochs']}`; {tuning(own)}",
            "accuracy",
            {"data": "fashion-mnist", "clients": 20, "partition": partition, **own, "batch_size": BATCH, **SPLIT},
            "fashion-mnist",
        )
        for model, own in MODELS.items()
        for kind, partition in PARTITIONS.items()
    )


def tuning(settings: Mapping[str, Any]) -> str:
    """Return in words how methods are tuned."""
    tried = TRIED.get(settings.get("model", ""))
    if not tried:
        return f"{TRIALS} candidates as in `coterie tune`"
    return f"SGD with step sizes {' and '.join(str(each.lr) for each in tried)}, momentum {tried[0].momentum}"


def code(method: str) -> str:
    """Return a hash of the method's file, without comments and docstrings."""
    path = ROOT / "src" / Path(*METHODS[method].__module__.split(".")).with_suffix(".py")
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(parsed):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    return hashlib.sha256(ast.dump(parsed).encode()).hexdigest()


def key_of(case: Case, method: str, seeds: Sequence[int], quick: bool) -> str:
    """Return a hash of all that a result is kept for."""
    tried = str(TRIED.get(case.settings.get("model", ""), TRIALS))
    name = fingerprint(case, method, seeds, quick) + code(method) + tried
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def read(results: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is kept, by federation and method."""
    return dict(json.loads(results.read_text(encoding="utf-8"))) if results.exists() else {}


def keep(results: Path, case: str, method: str, found: Mapping[str, Any]) -> None:
    """Add a result to what is kept, or replace the one that is there: a line each. Two may do so at once."""
    results.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(results.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _add(results, case, method, found)
    finally:
        os.close(folder)


def _add(results: Path, case: str, method: str, found: Mapping[str, Any]) -> None:
    kept = read(results)
    kept.setdefault(case, {})[method] = dict(found)
    told = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(one)}: {json.dumps(by[one])}" for one in sorted(by))
        + "\n}"
        for name, by in sorted(kept.items())
    ]
    files.write_text(results, "{\n" + ",\n".join(told) + "\n}\n")


class Clock:
    """A run's progress that notes the processor time at the end of each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def say(self, text: str) -> None: ...
    def start(self, label: str, done: int, rounds: int) -> None: ...
    def stop(self) -> None: ...

    def round(self, record: dict[str, Any], metric: str) -> None:
        self.times.append(time.process_time())

    def typical(self) -> float:
        """Return the median processor time of a round: compiling and scoring are in a few rounds only."""
        return statistics.median(np.diff(self.times).tolist() or [float("nan")])


def measured(results: Path, case: Case, method: str, seeds: Sequence[int], quick: bool, run: bool) -> Any:
    """Return what a method scored, sent and took. If it is not kept, `run` and keep it, or return None."""
    key = key_of(case, method, seeds, quick)
    found = read(results).get(case.name, {}).get(method, {})
    if found.get("key") == key:
        return found
    if not run:
        return None
    begun = time.process_time()
    found = {"key": key, **tune_and_run(case, method, seeds, quick)}
    spent = f"{time.process_time() - begun:.0f} s of processor time"
    print(f"{case.name}: {method}: {found.get('failed', spent)}", file=sys.stderr, flush=True)
    keep(results, case.name, method, found)
    return found


def tune_and_run(case: Case, method: str, seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    """Find a method's settings on the first seed, and run what is best there on all."""
    settings = {**case.settings, "select": case.metric, "report": False, "workers": 1, "split_seed": seeds[0]}
    if quick:
        settings |= {"rounds": 2, "evaluate_every": 1, "local_steps": 2}
        settings.pop("local_epochs")
    find = best_step_size if settings.get("model") in TRIED else search
    with tempfile.TemporaryDirectory(prefix="coterie-common-") as scratch:
        try:
            chosen = find(method, seeds, settings, Path(scratch), quick)
            compared = run_trials(dataclasses.replace(chosen.trials, seeds=tuple(seeds)), chosen.folder)
        except CoterieError as error:
            return {"failed": str(error)}
        first = RunFolder(chosen.folder / f"{method}-seed{seeds[0]}")
        records, predictions = first.read_rounds(settings["rounds"]), first.read_predictions()
    per_client = compared.scores(method)
    return {
        "values": chosen.values,
        "validation": chosen.validation,
        "scores": [[None if np.isnan(one) else round(one, PLACES) for one in each] for each in per_client.tolist()],
        "worst_tenth": compared.fairness(method)["worst_decile"],
        "among_own": among_own(predictions, per_client.shape[1]),
        "bytes": float(np.mean([each["bytes_up"] + each["bytes_down"] for each in records])),
        "seconds": chosen.seconds,
    }


class Chosen(NamedTuple):
    """The settings of a method that are best on the first seed, which has been run with them."""

    values: dict[str, Any]
    validation: float
    trials: Trials
    folder: Path  # with the run of the first seed
    seconds: float


def search(method: str, seeds: Sequence[int], settings: dict[str, Any], scratch: Path, quick: bool) -> Chosen:
    """Search step sizes and the method's own hyper-parameters."""
    prepared = prepare_trials([method], seeds, **settings)
    searches = searches_of(prepared, 2 if quick else TRIALS, {}, given_names(settings))
    found = run_tuning(searches, scratch / "search", test=False, report=False)
    trials, clock, folder = tuned(prepared, found), Clock(), scratch / "runs"
    run_trials(dataclasses.replace(trials, seeds=tuple(seeds[:1])), folder, progress=clock)
    return Chosen(found.values(method), found.validation(method), trials, folder, clock.typical())


def best_step_size(method: str, seeds: Sequence[int], settings: dict[str, Any], scratch: Path, quick: bool) -> Chosen:
    """Run a method, as it is, with each step size."""
    found, failed = list[Chosen](), list[CoterieError]()
    for optimizer in TRIED[settings["model"]]:
        cls: Any = METHODS[method]
        trials, clock, folder = (
            prepare_trials({method: cls(optimizer=optimizer)}, seeds, **settings),
            Clock(),
            scratch / str(optimizer.lr),
        )
        try:
            run_trials(dataclasses.replace(trials, seeds=tuple(seeds[:1])), folder, progress=clock)
        except CoterieError as error:  # it diverged, say
            failed.append(error)
            continue
        records = RunFolder(folder / f"{method}-seed{seeds[0]}").read_rounds(settings["rounds"])
        best = max(mean(each["validation"][settings["select"]]) for each in records if "validation" in each)
        found.append(Chosen({"lr": optimizer.lr}, best, trials, folder, clock.typical()))
    if not found:
        raise failed[0]
    return max(found, key=lambda each: each.validation)


def among_own(found: Predictions, clients: int) -> float:
    """Return the accuracy, a mean over clients, if only the classes of a client's own test examples are predicted."""
    right = []
    for outputs, y, _ in map(found.of, range(clients)):
        absent = torch.bincount(y, minlength=outputs.shape[1]) == 0
        right.append(float((outputs.masked_fill(absent, -torch.inf).argmax(1) == y).float().mean()))
    return mean(right)


def scores(found: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return the test metric [seeds, clients]; a client without a score has NaN."""
    return np.array(found["scores"], dtype=float)


class Row(NamedTuple):
    """What the page says of a method on a federation: per cent, points over local, and ratios to fedavg."""

    chosen: str
    test: float
    spread: float
    worst_tenth: float
    gain: float
    gaining: float
    bytes: float
    time: float


def row_of(found: Mapping[str, Any], local: Mapping[str, Any], fedavg: Mapping[str, Any]) -> Row:
    """Return a method's row, from its result and those of `local` and `fedavg`."""
    if "printed" in found:
        return Row(**found["printed"])
    own, alone = scores(found), scores(local)
    means = [mean(each) for each in own]
    per_client, per_client_alone = (np.array([mean(each) for each in both.T]) for both in (own, alone))
    return Row(
        in_words(found["values"]),
        100 * mean(means),
        100 * float(np.std(means, ddof=1)) if len(means) > 1 else float("nan"),
        100 * found["worst_tenth"],
        100 * (mean(means) - mean([mean(each) for each in alone])),
        100 * float((per_client > per_client_alone).mean()),
        found["bytes"] / fedavg["bytes"],
        found["seconds"] / fedavg["seconds"],
    )


def line(method: str, found: Mapping[str, Any] | None, row: Row | None) -> str:
    """Return a method's row of the table."""
    if row is None:
        return f"| `{method}` | {'not run' if found is None else 'failed: ' + found['failed']} |" + " |" * 6
    compared = ["", ""] if method == "local" else [f"{row.gain:+.1f}", f"{row.gaining:.0f} %"]
    cells = [row.chosen, f"{row.test:.1f} ± {row.spread:.1f}", f"{row.worst_tenth:.1f}", *compared]
    return f"| `{method}` | " + " | ".join([*cells, f"{row.bytes:.2f}", f"{row.time:.1f}"]) + " |"


def rows(by_method: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Row]:
    """Return the rows of all methods that have a result, by name."""
    there = {name: each for name, each in by_method.items() if each and "failed" not in each}
    return {name: row_of(each, there["local"], there["fedavg"]) for name, each in there.items()}


def remarks(results: Mapping[str, Mapping[str, Mapping[str, Any] | None]]) -> dict[str, list[str]]:
    """Return what looks wrong, by method: far below local, equal to another method to the digit, or failed."""
    said: dict[str, list[str]] = {}
    for case, by_method in results.items():
        there = {name: each for name, each in by_method.items() if each and "scores" in each}
        for name, row in rows(by_method).items():
            found = by_method[name] or {}
            if name != "local" and -row.gain > 100 * FAR:
                own = f" ({100 * found['among_own']:.1f} among its own classes)" if "among_own" in found else ""
                said.setdefault(name, []).append(f"{-row.gain:.1f} points below `local` on {case}{own}")
            equal = found.get("equal", []) + [
                other
                for other in there
                if other < name in there and np.allclose(scores(there[other]), scores(found), atol=SAME, rtol=0)
            ]
            said.setdefault(name, []).extend(f"equal to `{other}` to the digit on {case}" for other in equal)
        for name, each in by_method.items():
            if each and "failed" in each:
                said.setdefault(name, []).append(f"failed on {case}")
    return {name: each for name, each in said.items() if each}


def page(results: Mapping[str, Mapping[str, Mapping[str, Any] | None]], notes: Mapping[str, str]) -> str:
    """Return docs/benchmark.md."""
    chosen = [case for case in cases() if case.name in results]
    told = [
        "# All methods on one benchmark",
        "",
        "Written by `benchmarks/common.py`: not by hand. Every method of the library runs on the same splits of",
        f"Fashion-MNIST, with {len(SEEDS)} seeds and minibatches of {BATCH}. All were tuned in the same way, `local`",
        "included, on validation data of the first seed: 784-100-10 by the search of `coterie tune`, the step size and",
        "the method's own hyper-parameters; the CNN, which learns too slowly to be judged after a search's first",
        "rounds, by trying two step sizes, with momentum. (With 2 classes each, `fedavg-ft` had 83 % of the validation",
        "data right after 100 steps of the first seed with momentum and step size 0.02, and 81 % after 250 steps",
        "without, with 0.05.) All seeds have the splits of the first. The optimiser is SGD, also where papers use",
        "others.",
        "",
        f"Of a client's examples, {SPLIT['test']:.0%} are for testing and {SPLIT['validation']:.0%} for validation, so",
        "that about 20 are left to train on, few enough that others can help: with more, there is little to gain where",
        "clients have so few classes. The CNN is LeNet; the larger `cnn` would take days for all methods.",
        "`coterie compare --tune` measures more of some methods:",
        "",
        "    coterie compare --methods fedavg,fedrep,fedpac --seeds 3 --tune 20 --data fashion-mnist --clients 20 \\",
        "        --partition dirichlet:0.1 --model cnn --rounds 200 --optimizer sgd",
        "",
        "- **chosen**: by the search",
        "- **test**: accuracy at the round that validation selects, mean over clients, ± standard deviation over seeds",
        "- **worst tenth**: mean accuracy of the worst tenth of the clients",
        "- **gain**: points over `local`, every client alone for as many steps",
        "- **gaining**: clients that gain, by their mean over seeds",
        "- **bytes**, **time**: of a round, relative to `fedavg`: both directions, and the median processor time, in",
        "  ordinary PyTorch (`COTERIE_BACKEND=plain`). The machine had other work, and an engine was chosen for each",
        "  method: an order of magnitude.",
        "",
    ]
    for case in chosen:
        found = results[case.name]
        there = rows(found)
        ranked = sorted(found, key=lambda name: -there[name].test if name in there else 0)
        told += [f"## {case.name}", "", case.about + ".", ""]
        told += ["| method | chosen | test | worst tenth | gain | gaining | bytes | time |", "|---" * 8 + "|"]
        told += [*(line(name, found[name], there.get(name)) for name in ranked), ""]
    if missing := [case.name for case in cases() if case.name not in results]:
        told += [f"Not run yet: {'; '.join(missing)}.", ""]
    told += ["## What looks odd, and why", ""]
    odd = remarks(results)
    told += [
        f"Found by the script: more than {100 * FAR:.0f} points below `local`, equal to another to the digit, or",
        "failed. What such a method scores on the first seed if each client may only predict classes that it has is",
        "measured too. The explanations are written by hand, in `benchmarks/common.toml`.",
        "",
        "| method | what | why |",
        "|---|---|---|",
        *(
            f"| `{name}` | {'; '.join(odd[name])} | {notes.get(name, '**not explained yet**')} |"
            for name in sorted(odd)
        ),
    ]
    return "\n".join(told) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--quick", action="store_true", help="a smoke test: one round of two steps, one seed; no page")
    asking.add_argument("--only", help="only federations whose name contains this; no page is written", metavar="NAME")
    asking.add_argument("--methods", help="only these beside local and fedavg, separated by commas; no page is written")
    asking.add_argument("--page", action="store_true", help="run nothing: only write the page from what is there")
    asking.add_argument("--minutes", type=float, default=math.inf, help="begin nothing later than that", metavar="N")
    asking.add_argument("--results", type=Path, help="what is kept; by default docs/benchmark.json", metavar="FILE")
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmark.md", metavar="FILE")
    asked = asking.parse_args(arguments)
    seeds = SEEDS[:1] if asked.quick else SEEDS
    chosen = [case for case in cases() if not asked.only or asked.only.lower() in case.name.lower()]
    if missing := [case for case in chosen if not case.available()]:
        print(f"{missing[0].needs} is not in the folder that COTERIE_DATA names", file=sys.stderr)
        return 1
    names = list(dict.fromkeys(["local", "fedavg", *(asked.methods.split(",") if asked.methods else METHODS)]))
    end = time.monotonic() + 60 * asked.minutes
    kept = asked.results or (ROOT / "build" / "benchmark-quick.json" if asked.quick else RESULTS)
    results: dict[str, dict[str, dict[str, Any] | None]] = {}
    for case in chosen:
        results[case.name] = {
            method: measured(kept, case, method, seeds, asked.quick, not asked.page and time.monotonic() < end)
            for method in names
        }
    for name in list(results):
        none = {"failed": "not run"}
        if absent := [each for each in ("local", "fedavg") if "failed" in (results[name][each] or none)]:
            print(f"{name}: left out, there is no result of {' and '.join(absent)}: run it first", file=sys.stderr)
            del results[name]
    if not results:
        return 1
    notes = tomllib.loads(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}
    text = page(results, notes)
    whole = not asked.quick and not asked.only and not asked.methods
    if whole:
        files.write_text(asked.out, text)
    print(f"written to {asked.out}" if whole else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
