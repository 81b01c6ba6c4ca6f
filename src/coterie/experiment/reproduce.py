"""Reproduce tables of papers: the paper's numbers and the measured ones side by side.

Every entry is an ordinary run in a folder of its own, so a table that was stopped continues where it was. Two numbers
are measured: one by the paper's own protocol, which the table names, and one on test data at the round that validation
selected.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest
from coterie.experiment.notebook import Heard, listener
from coterie.experiment.progress import Progress
from coterie.experiment.result import Result
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.storage.files import read_json, write_json, write_text

Score = Callable[
    [Result, str], tuple[float, float]
]  # (result, "" or "global_") -> (paper's protocol, ours), in percent


@dataclass(frozen=True)
class Entry:
    """Describe a line of a table: a method with its settings, and the paper's number."""

    label: str
    method: str
    paper: float | None  # percent
    settings: Mapping[str, Any] = field(default_factory=dict)
    which: str = ""  # "global_" scores the global model


@dataclass(frozen=True)
class Table:
    """Describe a table of a paper, and how its numbers are measured."""

    title: str
    data: str
    protocol: str  # how the paper's number is measured, in words
    score: Score
    entries: tuple[Entry, ...]
    settings: Mapping[str, Any]
    seeds: int
    minutes: float  # for all seeds, on two cores
    note: str = ""


def last_round(result: Result, which: str) -> tuple[float, float]:
    """Score by FedMAP's protocol: balanced accuracy after the last round, averaged over clients."""
    last = result.rounds[-1][f"{which}test"]["balanced_accuracy"]
    chosen = _chosen(result)[f"{which}test"]["balanced_accuracy"]
    return 100 * float(np.mean(last)), 100 * float(np.mean(chosen))


def best_round(result: Result, which: str) -> tuple[float, float]:
    """Score by pFedBreD's protocol: correct over all clients' test examples, the maximum over rounds."""
    sizes = [row["test"] for row in result.clients]
    every = [np.average(row[f"{which}test"]["accuracy"], weights=sizes) for row in result.rounds if "test" in row]
    chosen = np.average(_chosen(result)[f"{which}test"]["accuracy"], weights=sizes)
    return 100 * float(max(every)), 100 * float(chosen)


def _chosen(result: Result) -> dict[str, Any]:
    return next(row for row in result.rounds if row["round"] == result.selected)


def _fedmap(skew: str, number: int, papers: tuple[float, ...]) -> Table:
    individual, fedmap, fedbn, fedprox, fedavg = papers
    return Table(
        title=f"FedMAP, table {number}: {skew} skew",
        data=f"synthetic-{skew}-skew",
        protocol="balanced accuracy after the last round",
        score=last_round,
        entries=(
            Entry("Individual, as many steps", "local", individual),
            Entry("FedMAP", "fedmap", fedmap, {"sigma2": 15.0, "weighting": "omega", "start": "own"}),
            Entry("FedBN", "fedbn", fedbn),
            Entry("FedProx", "fedprox", fedprox, {"mu": 2.0}),
            Entry("FedAvg", "fedavg", fedavg),
        ),
        settings={"validation": 0.02, "test": 0.3},
        seeds=10,
        minutes=15,
        note=(
            "20 rounds of 50 epochs, Adam 1e-4, sigma^2 = 15 are the authors' configuration, which may not be the one "
            "behind the tables. The paper does not say how long Individual trained; here it takes as many gradient "
            "steps as the others. Its network has no normalisation layers, so FedBN is FedAvg here."
        ),
    )


def _pfedbred(data: str, model: str, lam: float, papers: tuple[float, ...], minutes: float) -> Table:
    fedavg, pfedme, lg, meg, mh = papers
    schedule = {"outer_lr": 0.01, "lam": lam, "prox_steps": 5}
    ours = {**schedule, "eta_alpha": 0.01}
    return Table(
        title=f"pFedBreD, tables 1 and 2: {data.removeprefix('pfedbred-')}, {model}",
        data=data,
        protocol="correct over all examples, best round on test data",
        score=best_round,
        entries=(
            Entry("FedAvg -G", "fedavg", fedavg),
            Entry("pFedMe -P", "pfedme", pfedme, schedule),
            Entry("lg -P", "pfedbred", lg, {**ours, "strategy": "lg"}),
            Entry("meg -P", "pfedbred", meg, {**ours, "strategy": "meg"}),
            Entry("mh -P", "pfedbred", mh, {**ours, "strategy": "mh"}),
        ),
        settings={
            **{"model": model, "rounds": 200, "local_steps": 20, "batch_size": 20, "clients_heard": 20},
            **{"validation": 0.02, "test": 0.25, "evaluate_every": 5, "optimizer": "sgd", "lr": 0.01},
        },
        seeds=1,
        minutes=minutes,
        note=(
            "All 100 clients train every round and 20 are averaged, as in the authors' code. The data follow their "
            "generator, with draws of our own; MNIST keeps its wrong labels (see coterie.data.readers.pfedbred)."
        ),
    )


TABLES: dict[str, Table] = {
    "fedmap-1": _fedmap("label", 1, (76.63, 84.84, 63.28, 54.91, 54.66)),
    "fedmap-5": _fedmap("feature", 5, (83.38, 86.27, 65.38, 63.00, 63.10)),
    "fedmap-6": _fedmap("quantity", 6, (75.37, 79.06, 63.80, 61.54, 61.88)),
    "pfedbred-mnist-mclr": _pfedbred("pfedbred-mnist", "linear", 15, (86.59, 88.20, 88.4, 88.4, 89.83), 8),
    "pfedbred-mnist-dnn": _pfedbred("pfedbred-mnist", "dnn", 30, (88.26, 90.51, 91.0, 90.6, 92.04), 30),
    "pfedbred-fmnist-mclr": _pfedbred("pfedbred-fmnist", "linear", 15, (82.75, 97.60, 98.3, 97.8, 98.44), 8),
    "pfedbred-fmnist-dnn": _pfedbred("pfedbred-fmnist", "dnn", 30, (80.09, 98.63, 98.4, 98.6, 98.73), 30),
}


@dataclass(frozen=True)
class Row:
    """Hold the paper's number and the measured ones for one line of a table."""

    label: str
    paper: float | None
    protocol: list[float]  # one per seed
    selected: list[float]


def find_table(name: str) -> Table:
    """Return the table of that name; raise `ConfigError`, with a suggestion, if there is none."""
    if name not in TABLES:
        raise ConfigError([f"there is no table '{name}'{suggest(name, TABLES)}; there are {', '.join(TABLES)}"])
    return TABLES[name]


def reproduce(
    name: str, out: Path, *, seeds: int | None = None, rounds: int | None = None, progress: Heard = None
) -> list[Row]:
    """Run what is still missing of a table under `out`, and write table.md there.

    Args:
        name: the table's name.
        out: the folder for the runs and the table.
        seeds: fewer seeds than the table has, for a first look.
        rounds: fewer rounds than the table has, for a first look.
        progress: receives news of the runs.

    Returns:
        One row for each entry of the table.
    """
    table, tell = find_table(name), listener(progress)
    rows = []
    for entry in table.entries:
        pairs = []
        for seed in range(seeds or table.seeds):
            folder = out / name / f"{entry.label.split(',')[0].replace(' ', '').lower()}-seed{seed}"
            tell.say(f"{table.title}: {entry.label}, seed {seed}")
            pairs.append(_scores(table, entry, seed, rounds, folder, tell))
        rows.append(Row(entry.label, entry.paper, [pair[0] for pair in pairs], [pair[1] for pair in pairs]))
    write_text(out / name / "table.md", markdown(name, rows))
    return rows


def _scores(
    table: Table, entry: Entry, seed: int, rounds: int | None, folder: Path, progress: Progress
) -> tuple[float, float]:
    done = folder / "scores.json"
    if done.exists():
        by_paper, by_us = read_json(done)
        return by_paper, by_us
    settings = {**table.settings, **entry.settings, "seed": seed, "reference": False}
    if rounds is not None:
        settings["rounds"] = rounds
    setup = prepare(entry.method, table.data, **settings)
    begun = (folder / "config.toml").exists()
    scores = table.score(run_setup(setup, folder, progress=progress, resuming=begun, report=False), entry.which)
    write_json(done, scores)
    return scores


def markdown(name: str, rows: list[Row]) -> str:
    """Return the table as Markdown."""
    table = find_table(name)
    number = len(rows[0].protocol)
    today = datetime.date.today().isoformat()
    lines = [
        f"### {table.title}",
        "",
        f"`coterie reproduce {name}`, {number} seed{'s' * (number != 1)}, {today}. {table.note}",
        "",
        f"| method | paper | {table.protocol} | difference | test at the round that validation selects |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        paper = "" if row.paper is None else f"{row.paper:.2f}"
        gap = "" if row.paper is None else f"{np.mean(row.protocol) - row.paper:+.2f}"
        lines.append(f"| {row.label} | {paper} | {_mean(row.protocol)} | {gap} | {_mean(row.selected)} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}"
