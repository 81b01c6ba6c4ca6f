"""What every method's defaults are worth: the gain over training alone on federations of different kinds.

    COTERIE_DATA=... python benchmarks/defaults.py [--quick] [--only NAME] [--methods NAMES] [--renew] [--page]
                                                   [--choosing] [--cache FOLDER] [--out FILE]

Every method of `METHODS` runs with its own defaults, on the same splits and for the same schedule as `local`, which is
every client alone, and `fedavg-ft`. Nothing is tuned. The result of each method on each federation is kept under
--cache (by default build/defaults), named by its configuration and the method's defaults: started again, the script
only runs what is missing. Delete the folder after a change of code that changes results, or renew the rows of the
methods that changed: --methods NAMES --renew keeps the page's other rows as they are, if training alone still scores
what it says. --page runs nothing, and writes what was measured so far. The page is written from what was measured,
never by hand; what it says about single methods is in benchmarks/defaults.toml. --choosing runs other federations
instead, on which defaults are chosen. It is no part of `make bench`, since it measures no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coterie
from coterie import CoterieError
from coterie.evaluation.metrics import mean
from coterie.methods import METHODS
from coterie.methods.fields import values_of
from coterie.storage import files

ROOT = Path(__file__).resolve().parents[1]
NOTES = Path(__file__).with_name("defaults.toml")
HEART = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
SEEDS = (0, 1)
CHOOSING_SEEDS = (5, 6)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Case:
    """A federation and its schedule."""

    name: str
    about: str
    metric: str
    settings: Mapping[str, Any]
    needs: str | None = None  # a folder of COTERIE_DATA

    def available(self) -> bool:
        """Whether its data are here."""
        return self.needs is None or (data_folder() / self.needs).is_dir()


def data_folder() -> Path:
    return Path(os.environ.get("COTERIE_DATA", "data"))


def cases() -> tuple[Case, ...]:
    hospitals = ("cleveland", "hungarian", "switzerland", "va")
    silos = [str(data_folder() / "heart-disease" / f"processed.{name}.data") for name in hospitals]
    return (
        Case(
            "digits, Dirichlet 0.3",
            "10 clients with different labels and sizes, 30 rounds of 1 epoch, SGD 0.05: `--data digits`",
            "accuracy",
            {"data": "digits"},
        ),
        Case(
            "digits, IID",
            "10 clients that are alike, the same schedule",
            "accuracy",
            {"data": "digits", "partition": "iid", "clients": 10},
        ),
        Case(
            "label skew",
            "FedMAP's synthetic label skew: 10 clients with features of their own, 20 rounds of 5 epochs, Adam 0.001",
            "balanced_accuracy",
            {"data": "synthetic-label-skew", "rounds": 20, "local_epochs": 5, "lr": 0.001},
        ),
        Case(
            "heart disease",
            "4 hospitals of the UCI data, 100 to 300 patients each, classes balanced: `--silos`",
            "auroc",
            {"silos": silos, "columns": HEART, "target": "num>0", "class_weights": "balanced", "rounds": 20},
            "heart-disease",
        ),
        Case(
            "Fashion-MNIST, 2 classes each",
            "10 clients with 2 classes of 60 images each, 30 rounds of 1 epoch, SGD 0.05, one hidden layer",
            "accuracy",
            {
                **{"data": "fashion-mnist", "partition": "classes:2:each=60", "clients": 10, "model": "dnn"},
                **{"rounds": 30, "local_epochs": 1, "batch_size": 10, "lr": 0.05},
            },
            "fashion-mnist",
        ),
        Case(
            "FEMNIST",
            "writers, as they are: 62 characters, 20 rounds of 1 epoch, SGD 0.05, one hidden layer",
            "accuracy",
            {"data": "femnist", "model": "dnn", "rounds": 20, "batch_size": 10, "lr": 0.05},
            "femnist",
        ),
    )


def choosing_cases() -> tuple[Case, ...]:
    """Return the federations that defaults are chosen on, which are not those of the page."""
    short_adam = {"rounds": 15, "local_epochs": 5, "lr": 0.001}
    images = {"model": "dnn", "rounds": 20, "local_epochs": 1, "batch_size": 10, "lr": 0.05}
    return (
        Case(
            "digits, 3 classes each",
            "12 clients with 3 classes",
            "accuracy",
            {"data": "digits", "partition": "classes:3", "clients": 12},
        ),
        Case(
            "digits, 6 alike",
            "6 clients that are alike, 20 rounds, step size 0.1",
            "accuracy",
            {"data": "digits", "partition": "iid", "clients": 6, "lr": 0.1, "rounds": 20},
        ),
        Case(
            "breast cancer", "5 clients, Dirichlet 0.5, as `--data breast-cancer`", "auroc", {"data": "breast-cancer"}
        ),
        Case(
            "only label skew",
            "10 synthetic clients in one feature space, Adam",
            "balanced_accuracy",
            {"data": "synthetic-only-label-skew", **short_adam},
        ),
        Case(
            "feature skew",
            "10 synthetic clients with features of their own, Adam",
            "balanced_accuracy",
            {"data": "synthetic-feature-skew", **short_adam},
        ),
        Case(
            "MNIST, Dirichlet 0.5",
            "20 clients, 1500 images",
            "accuracy",
            {"data": "mnist", "partition": "dirichlet:0.5:take=1500", "clients": 20, **images},
            "mnist",
        ),
    )


def fingerprint(case: Case, method: str, seeds: Sequence[int], quick: bool) -> str:
    """Return a name for the result: it changes with the settings and with the method's defaults."""
    asked = [case.metric, dict(case.settings), method, values_of(METHODS[method]()), list(seeds), quick]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure(
    case: Case, method: str, seeds: Sequence[int], cache: Path, quick: bool, run: bool = True
) -> dict[str, Any]:
    """Return the test metric of every seed and client, or why there is none; from the cache if it is there.

    Without `run`, nothing is returned about what is not in the cache.
    """
    key = fingerprint(case, method, seeds, quick)
    kept = cache / f"{key}.json"
    if kept.exists() or not run:
        return _read(kept) if kept.exists() else {}
    settings = {**case.settings, "select": case.metric, "evaluate_every": 5, "report": False}
    settings |= {"rounds": 2, "local_steps": 2, "evaluate_every": 1} if quick else {}
    if quick:
        settings.pop("local_epochs", None)
    found: dict[str, Any] = {"method": method, "case": case.name}
    begun = time.process_time()
    try:
        compared = coterie.compare([method], seeds, **settings)
        found["scores"] = compared.scores(method).tolist()
    except CoterieError as error:  # it diverged, say: the table must tell that
        found["failed"] = str(error)
    print(f"{case.name}: {method}: {time.process_time() - begun:.1f} s", file=sys.stderr, flush=True)
    files.write_json(kept, found)
    return _read(kept)


def _read(kept: Path) -> dict[str, Any]:
    """Return a kept result. JSON has no NaN, the score of a client without examples of some class: it is null there."""
    found = dict(json.loads(kept.read_text(encoding="utf-8")))
    if "scores" in found:
        found["scores"] = [[float("nan") if one is None else one for one in row] for row in found["scores"]]
    return found


def gain(found: dict[str, Any], local: dict[str, Any]) -> tuple[float, float, float] | None:
    """Return the mean gain over local, half the range over seeds, and the share of clients that gain."""
    if "scores" not in found or "scores" not in local:
        return None
    pairs = list(zip(found["scores"], local["scores"], strict=True))
    each = [mean(ours) - mean(alone) for ours, alone in pairs]
    clients = [mean(list(theirs)) for theirs in zip(*found["scores"], strict=True)]
    alone = [mean(list(theirs)) for theirs in zip(*local["scores"], strict=True)]
    better = [a > b for a, b in zip(clients, alone, strict=True) if a == a and b == b]
    return statistics.mean(each), (max(each) - min(each)) / 2, sum(better) / max(1, len(better))


def old_rows(path: Path) -> dict[str, str]:
    """Return the rows of the page as it is, by method."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def notes() -> list[str]:
    """Return what is said about single methods, as lines of the page."""
    said = tomllib.loads(NOTES.read_text(encoding="utf-8"))["note"]
    unknown = [name for note in said for name in note["methods"] if name not in METHODS]
    if unknown:
        raise SystemExit(f"{NOTES.name} names {', '.join(unknown)}, which are no methods")
    return [f"- {', '.join(f'`{name}`' for name in note['methods'])}: {note['why'].strip()}" for note in said]


def page(
    results: dict[str, dict[str, dict[str, Any]]],
    chosen: Sequence[Case],
    seeds: Sequence[int],
    kept: Mapping[str, str] | None = None,
) -> str:
    """Return docs/defaults.md; cells without results are those of the rows `kept`."""
    kept = kept or {}
    told = [
        "# What the defaults are worth",
        "",
        "Written by `benchmarks/defaults.py`: not by hand. Every method runs with its own defaults on the same splits",
        f"and schedule, with {len(seeds)} seeds; nothing was tuned for any of them. Where defaults were chosen by what",
        "they gain, other federations were used (`--choosing`); that some were wrong was seen here.",
        "",
        "A cell is the mean gain over training alone for as many steps, in points of the federation's test metric",
        "(± half the range over seeds), and the share of clients that gain. The first line is what training alone",
        "scores. Read a column to find which method suits a federation like yours, and a row to find where a method's",
        "defaults need thought. Differences of the size of ± are chance. A method far below 0 is not wrong: in these",
        "few rounds, with these defaults, a client does better alone. One model for everybody (`fedavg`, `fedprox`,",
        "`scaffold`) must lose where clients have different labels.",
        "",
        "| federation | what it is | metric |",
        "|---|---|---|",
        *(f"| {case.name} | {case.about} | {case.metric.replace('_', ' ')} |" for case in chosen),
        "",
        "| method | " + " | ".join(case.name for case in chosen) + " |",
        "|---" * (1 + len(chosen)) + "|",
        "| `local` scores | " + " | ".join(_alone(results[case.name]["local"]) for case in chosen) + " |",
    ]
    first = ["fedavg-ft"]
    for method in [*first, *(name for name in METHODS if name not in {"local", *first})]:
        cells = [_cell(results[case.name].get(method), results[case.name]["local"]) for case in chosen]
        old = kept.get(method, "").strip("| ").split(" | ")[1:]
        if len(old) == len(cells):
            cells = [was if now in ("", NOT_MEASURED) else now for was, now in zip(old, cells, strict=True)]
        told.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join([*told, "", "## What a row cannot say", "", *notes()]) + "\n"


def _alone(local: dict[str, Any]) -> str:
    return f"{100 * mean([mean(each) for each in local['scores']]):.1f}" if "scores" in local else NOT_MEASURED


def _alike(was: str, now: str) -> bool:
    """Whether training alone scores as it did, but for rounding, which differs with the engine."""
    was, now = was.strip("| "), now.strip("| ")
    return NOT_MEASURED in (was, now) or abs(float(was) - float(now)) < 0.15


def _cell(found: dict[str, Any] | None, local: dict[str, Any]) -> str:
    if found is None:
        return ""
    got = gain(found, local)
    if got is None:
        return f"failed: {found['failed']}" if "failed" in found else NOT_MEASURED
    points, spread, share = got
    return f"{100 * points:+.1f} ± {100 * spread:.1f}, {100 * share:.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--quick", action="store_true", help="a smoke test: two rounds of two steps, one seed; no page")
    asking.add_argument("--choosing", action="store_true", help="the federations that defaults are chosen on; no page")
    asking.add_argument("--only", help="only federations whose name contains this; no page is written", metavar="NAME")
    asking.add_argument("--methods", help="only these beside local, by commas; no page without --renew")
    asking.add_argument("--renew", action="store_true", help="write these methods' rows into the page")
    asking.add_argument("--page", action="store_true", help="run nothing: only write what was measured")
    asking.add_argument("--cache", type=Path, default=ROOT / "build" / "defaults", metavar="FOLDER")
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "defaults.md", metavar="FILE")
    asked = asking.parse_args(arguments)
    seeds: Sequence[int] = CHOOSING_SEEDS if asked.choosing else SEEDS
    seeds = seeds[:1] if asked.quick else seeds
    wanted = [
        case
        for case in (choosing_cases() if asked.choosing else cases())
        if not asked.only or asked.only.lower() in case.name.lower()
    ]
    for case in wanted:
        if not case.available():
            print(
                f"{case.name}: left out, {data_folder() / str(case.needs)} is not here (COTERIE_DATA)", file=sys.stderr
            )
    chosen = [case for case in wanted if case.available()]
    names = list(METHODS) if not asked.methods else ["local", *asked.methods.split(",")]
    asked.cache.mkdir(parents=True, exist_ok=True)
    results = {
        case.name: {method: measure(case, method, seeds, asked.cache, asked.quick, not asked.page) for method in names}
        for case in chosen
    }
    old = old_rows(asked.out) if asked.renew else {}
    text = page(results, chosen, seeds, old)
    alone = next(line for line in text.splitlines() if line.startswith("| `local`"))
    pairs = zip(old.get("local", "").split(" | ")[1:], alone.split(" | ")[1:], strict=False)
    if asked.renew and not all(_alike(was, now) for was, now in pairs):
        print(f"training alone scores otherwise than in {asked.out}: measure all of it anew", file=sys.stderr)
        return 1
    if asked.renew and "local" in old:
        text = text.replace(alone, old["local"])
    complete = not (asked.choosing or asked.quick or asked.only) and len(chosen) == len(wanted)
    whole = complete and (asked.renew or not asked.methods)
    if whole:
        files.write_text(asked.out, text)
    print(f"written to {asked.out}" if whole else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
