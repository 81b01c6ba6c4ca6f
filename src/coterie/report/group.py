"""Groups the runs of a report by method, and checks that they can be compared."""

from __future__ import annotations

import dataclasses

from coterie.core.errors import CoterieError
from coterie.report.read import RunData
from coterie.report.single import flatten_settings

# Settings that may differ between runs of the same method.
MAY_DIFFER = (
    "seed",
    "engine",
    "compile",
    "workers",
    "debug",
    "memory",
    "checkpoint_every",
    "report",
    "track",
    "reference",
    "references",
    "take_home",
    "calibrate",
    "threshold",
)
Groups = dict[str, list[RunData]]


def with_local(runs: list[RunData]) -> list[RunData]:
    """Add training alone as a method, from the runs' references if necessary, and as every run's reference."""
    local = {run.seed: run for run in reversed(runs) if run.method == "local"}
    added: dict[int, RunData] = {}
    for run in runs:
        if run.reference is not None and run.seed not in local:
            added.setdefault(run.seed, run.reference)
    beside = added | local
    found = [
        run if run.method == "local" or run.reference else dataclasses.replace(run, reference=beside.get(run.seed))
        for run in runs
    ]
    return found if local else [*added.values(), *found]


def check(runs: list[RunData]) -> None:
    """Raise `CoterieError` unless all runs use the same data and task."""
    first = runs[0]
    for run in runs[1:]:
        for what, ours, theirs in (
            ("data", first.config.get("data"), run.config.get("data")),
            ("share of test data", first.config.get("test"), run.config.get("test")),
            ("clients", sorted(first.names), sorted(run.names)),
        ):
            if ours != theirs:
                values = f"{ours} and {theirs}" if what != "clients" else _differing(first.names, run.names)
                raise CoterieError(_not_comparable(first, run, f"their {what} differ: {values}"))
        if run.metric not in first.metrics or first.metric not in run.metrics:
            raise CoterieError(_not_comparable(first, run, f"one has {first.metric}, the other {run.metric}"))
    by_seed: dict[int, RunData] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        for part in ("train", "test"):
            if run.names == other.names and (run.column(part) != other.column(part)).any():
                raise CoterieError(
                    _not_comparable(other, run, f"with seed {run.seed} their clients' {part} examples differ")
                )


def grouped(runs: list[RunData]) -> Groups:
    """Group runs that differ only in their seed; a label is the method and, if needed, the settings that differ."""
    kinds: dict[str, list[RunData]] = {}
    for run in runs:
        settings_ = {key: value for key, value in flatten_settings(run.config).items() if key not in MAY_DIFFER}
        kinds.setdefault(repr(sorted(settings_.items(), key=str)), []).append(run)
    groups: Groups = {}
    for mine in kinds.values():
        alike = [each[0] for each in kinds.values() if each[0].method == mine[0].method]
        label = mine[0].method
        if len(alike) > 1:
            label = f"{label} ({', '.join(_distinguishing_settings(mine[0], alike))})"
        groups.setdefault(label, []).extend(mine)
    for label, group in groups.items():
        seeds = [run.seed for run in group]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            where = ", ".join(f"'{run.path}'" for run in group if run.seed == twice[0])
            raise CoterieError(f"{label} with seed {twice[0]} occurs more than once ({where}): give each run once")
    return dict(sorted(groups.items(), key=lambda item: item[0] != "local"))


def _distinguishing_settings(run: RunData, alike: list[RunData]) -> list[str]:
    """Return the settings in which `run` differs from others of its method."""
    mine, theirs = flatten_settings(run.config), [flatten_settings(each.config) for each in alike]
    keys = list(dict.fromkeys(key for values in theirs for key in values if key not in MAY_DIFFER))
    return [
        f"{key.split('.')[-1]} = {mine.get(key)}" for key in keys if len({str(each.get(key)) for each in theirs}) > 1
    ]


def _differing(ours: list[str], theirs: list[str]) -> str:
    only = sorted(set(ours) ^ set(theirs))
    listed = ", ".join(only[:3]) + (", ..." if len(only) > 3 else "")
    return f"{listed} {'is' if len(only) == 1 else 'are'} in only one of them"


def _not_comparable(first: RunData, other: RunData, why: str) -> str:
    return f"'{first.path}' and '{other.path}' cannot be compared: {why}. Report runs of different data separately."
