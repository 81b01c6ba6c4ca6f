"""What every method's defaults are worth: the gain over training alone on federations of different kinds.

    COTERIE_DATA=... python benchmarks/defaults.py [--quick] [--only NAME] [--cache FOLDER] [--out FILE]

Every method of `METHODS` runs with its own defaults, on the same splits and for the same schedule as `local`, which is
every client alone, and `fedavg-ft`. Nothing is tuned. The result of each method on each federation is kept under
--cache (by default build/defaults), named by its configuration and the method's defaults: started again, the script
only runs what is missing. Delete the folder after a change of code that changes results. The page is written from what
was measured, never by hand.
It is no part of `make bench`, since it measures no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
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
HEART = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
SEEDS = (0, 1)


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


def fingerprint(case: Case, method: str, seeds: Sequence[int], quick: bool) -> str:
    """Return a name for the result: it changes with the settings and with the method's defaults."""
    asked = [case.metric, dict(case.settings), method, values_of(METHODS[method]()), list(seeds), quick]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def measure(case: Case, method: str, seeds: Sequence[int], cache: Path, quick: bool) -> dict[str, Any]:
    """Return the test metric of every seed and client, or why there is none; from the cache if it is there."""
    key = fingerprint(case, method, seeds, quick)
    kept = cache / f"{key}.json"
    if kept.exists():
        return _read(kept)
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


def page(results: dict[str, dict[str, dict[str, Any]]], chosen: Sequence[Case], seeds: Sequence[int]) -> str:
    """Return docs/defaults.md."""
    told = [
        "# What the defaults are worth",
        "",
        "Written by `benchmarks/defaults.py`: not by hand. Every method runs with its own defaults on the same splits",
        f"and schedule, with {len(seeds)} seeds; nothing was tuned for any of them.",
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
        told.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(told) + "\n"


def _alone(local: dict[str, Any]) -> str:
    return f"{100 * mean([mean(each) for each in local['scores']]):.1f}" if "scores" in local else "failed"


def _cell(found: dict[str, Any] | None, local: dict[str, Any]) -> str:
    got = gain(found, local) if found else None
    if got is None:
        return "failed" if found else ""
    points, spread, share = got
    return f"{100 * points:+.1f} ± {100 * spread:.1f}, {100 * share:.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    asking = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    asking.add_argument("--quick", action="store_true", help="a smoke test: two rounds of two steps, one seed; no page")
    asking.add_argument("--only", help="only federations whose name contains this; no page is written", metavar="NAME")
    asking.add_argument("--methods", help="only these beside local, separated by commas; no page is written")
    asking.add_argument("--cache", type=Path, default=ROOT / "build" / "defaults", metavar="FOLDER")
    asking.add_argument("--out", type=Path, default=ROOT / "docs" / "defaults.md", metavar="FILE")
    asked = asking.parse_args(arguments)
    seeds = SEEDS[:1] if asked.quick else SEEDS
    wanted = [case for case in cases() if not asked.only or asked.only.lower() in case.name.lower()]
    for case in wanted:
        if not case.available():
            print(
                f"{case.name}: left out, {data_folder() / str(case.needs)} is not here (COTERIE_DATA)", file=sys.stderr
            )
    chosen = [case for case in wanted if case.available()]
    names = list(METHODS) if not asked.methods else ["local", *asked.methods.split(",")]
    asked.cache.mkdir(parents=True, exist_ok=True)
    results = {
        case.name: {method: measure(case, method, seeds, asked.cache, asked.quick) for method in names}
        for case in chosen
    }
    text = page(results, chosen, seeds)
    whole = not asked.quick and not asked.only and not asked.methods and len(chosen) == len(wanted)
    if whole:
        files.write_text(asked.out, text)
    print(f"written to {asked.out}" if whole else text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
