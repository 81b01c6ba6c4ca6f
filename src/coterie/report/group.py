"""Which runs of a report belong together, and whether they may be compared at all."""

from __future__ import annotations

import dataclasses

from coterie.errors import CoterieError
from coterie.report.read import Run
from coterie.report.single import flat

# Settings that may differ between two runs of one method.
FREE = ("seed", "engine", "compile", "workers", "memory", "checkpoint_every", "report", "track", "reference")
Groups = dict[str, list[Run]]


def with_local(runs: list[Run]) -> list[Run]:
    """Local training as one of the methods, from the runs' own references if need be, and as every run's reference."""
    local = {run.seed: run for run in reversed(runs) if run.method == "local"}
    added: dict[int, Run] = {}
    for run in runs:
        if run.reference is not None and run.seed not in local:
            added.setdefault(run.seed, run.reference)
    beside = added | local
    found = [
        run if run.method == "local" or run.reference else dataclasses.replace(run, reference=beside.get(run.seed))
        for run in runs
    ]
    return found if local else [*added.values(), *found]


def check(runs: list[Run]) -> None:
    """Runs of one page must be of the same data, and of the same task."""
    first = runs[0]
    for run in runs[1:]:
        for what, ours, theirs in (
            ("data", first.config.get("data"), run.config.get("data")),
            ("share of test data", first.config.get("test"), run.config.get("test")),
            ("clients", sorted(first.names), sorted(run.names)),
        ):
            if ours != theirs:
                told = f"{ours} and {theirs}" if what != "clients" else _differing(first.names, run.names)
                raise CoterieError(_cannot(first, run, f"their {what} differ: {told}"))
        if run.metric not in first.metrics or first.metric not in run.metrics:
            raise CoterieError(_cannot(first, run, f"one has {first.metric}, the other {run.metric}"))
    by_seed: dict[int, Run] = {}
    for run in runs:
        other = by_seed.setdefault(run.seed, run)
        for part in ("train", "test"):
            if run.names == other.names and (run.column(part) != other.column(part)).any():
                raise CoterieError(_cannot(other, run, f"with seed {run.seed} their clients' {part} examples differ"))


def grouped(runs: list[Run]) -> Groups:
    """Runs that differ by their seed only are one method, labelled by its name and, if need be, what sets it apart."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        settings_ = {key: value for key, value in flat(run.config).items() if key not in FREE}
        kinds.setdefault(repr(sorted(settings_.items(), key=str)), []).append(run)
    groups: Groups = {}
    for mine in kinds.values():
        alike = [each[0] for each in kinds.values() if each[0].method == mine[0].method]
        label = mine[0].method
        if len(alike) > 1:
            label = f"{label} ({', '.join(_apart(mine[0], alike))})"
        groups.setdefault(label, []).extend(mine)
    for label, group in groups.items():
        seeds = [run.seed for run in group]
        if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            where = ", ".join(f"'{run.path}'" for run in group if run.seed == twice[0])
            raise CoterieError(f"{label} with seed {twice[0]} is there more than once ({where}): give each run once")
    return dict(sorted(groups.items(), key=lambda item: item[0] != "local"))


def _apart(run: Run, alike: list[Run]) -> list[str]:
    """The settings in which `run` differs from others of its method."""
    mine, theirs = flat(run.config), [flat(each.config) for each in alike]
    keys = list(dict.fromkeys(key for values in theirs for key in values if key not in FREE))
    return [
        f"{key.split('.')[-1]} = {mine.get(key)}" for key in keys if len({str(each.get(key)) for each in theirs}) > 1
    ]


def _differing(ours: list[str], theirs: list[str]) -> str:
    only = sorted(set(ours) ^ set(theirs))
    return f"{', '.join(only[:3])}{', ...' if len(only) > 3 else ''} {'is' if len(only) == 1 else 'are'} in one only"


def _cannot(first: Run, other: Run, why: str) -> str:
    return (
        f"'{first.path}' and '{other.path}' cannot be compared, as {why}. "
        "Report runs of the same data together, and others one by one."
    )
