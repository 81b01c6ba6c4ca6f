"""Compare finished runs from their folders alone: nothing is trained, no data set is read."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from coterie.core.errors import CheckpointError, ConfigError, CoterieError, CoterieWarning
from coterie.core.losses import find_loss
from coterie.core.targets import Classes
from coterie.core.task import Task
from coterie.core.toml import read_toml
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import judge, measure_each
from coterie.evaluation.metrics import add
from coterie.evaluation.predictions import check_same_data
from coterie.evaluation.scoring import names_of
from coterie.experiment.given import OWN_LOSS
from coterie.experiment.several.comparison import Comparison
from coterie.experiment.take_home.load import target_of
from coterie.storage import files
from coterie.storage.run_folder import COMPLETE, RunFolder


class Run(NamedTuple):
    """Hold what a comparison needs of a finished run."""

    path: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    predictions: Predictions

    @property
    def metric(self) -> str:
        """Return the metric that selected its round."""
        return str(files.read_json(self.path / "summary.json")["selected_by"]).split()[-1]

    @property
    def rounds(self) -> int:
        """Return how many rounds were trained."""
        return int(files.read_json(self.path / "summary.json")["last_round"]["round"])

    @property
    def names(self) -> list[str]:
        """Return the clients' names."""
        return [row["client"] for row in self.rows]


def compare_runs(paths: Sequence[str | Path]) -> Comparison:
    """Compare run folders, one for each method and seed.

    The runs are compared with a run of `local` among them or else with the local reference in a run of the same seed.

    Raises:
        ConfigError: a method lacks a seed, or two runs are of the same method and seed, of different data, or selected
            by different metrics.
        CheckpointError: a folder is not a finished run.
        DataError: the runs have different test data.
        CoterieError: the runs have different clients, or none has a local reference.

    Examples:
        `first` and `second` are folders of runs of different methods on the same data:

        >>> import coterie
        >>> coterie.compare_runs(["first", "second"]).methods
        ('local', 'fedavg', 'ditto')
    """
    runs = [read_run(Path(path)) for path in paths]
    if not runs:
        raise ConfigError(["name at least one run folder"])
    by = _by_method_and_seed(runs)
    seeds = tuple(dict.fromkeys(seed for _, seed in by))
    for seed in seeds:
        if ("local", seed) not in by:
            by["local", seed] = _reference([run for (_, other), run in by.items() if other == seed])
    methods = ("local", *dict.fromkeys(method for method, _ in by if method != "local"))
    if missing := [f"{method} with seed {seed}" for method in methods for seed in seeds if (method, seed) not in by]:
        raise ConfigError([f"every method needs every seed; there is no run of {', '.join(missing)}: run it first"])
    task, metric = _task_and_metric(runs)
    for seed in seeds:
        _check_rounds(by["local", seed], [by[method, seed] for method in methods[1:]])
        those = [by[method, seed] for method in methods]
        check_same_data({f"'{run.path}'": (run.names, run.predictions) for run in those})
    names = runs[0].names
    for run in runs:
        if run.names != names:
            raise CoterieError(
                f"'{runs[0].path}' and '{run.path}' do not have the same clients: compare them separately"
            )
    trials = []  # one per seed
    for seed in seeds:
        several = {method: by[method, seed].predictions for method in methods[1:]}
        trials.append(measure_each(task, metric, several, by["local", seed].predictions, names, seed=seed))
    benefits = {
        method: judge(metric, names, [trial[method] for trial in trials], seed=seeds[0]) for method in methods[1:]
    }
    rows = [
        {"method": method, "seed": seed, **row} for seed in seeds for method in methods for row in by[method, seed].rows
    ]
    return Comparison(metric, methods, seeds, rows, None, benefits)


def read_run(path: Path) -> Run:
    """Read a finished run; raise `CheckpointError` if it is not one."""
    if not (path / "config.toml").exists():
        raise CheckpointError(f"'{path}' is not a run folder: it has no config.toml")
    if missing := [name for name in COMPLETE if not (path / name).exists()]:
        raise CheckpointError(f"'{path}' has no {', '.join(missing)}: 'coterie resume {path}' completes it")
    folder = RunFolder(path)
    return Run(path, read_toml(path / "config.toml"), folder.read_clients(), folder.read_predictions())


def _by_method_and_seed(runs: list[Run]) -> dict[tuple[str, int], Run]:
    data = {run.config["data"]: run for run in runs}
    if len(data) > 1:
        listed = ", ".join(f"'{run.path}' of {name}" for name, run in data.items())
        raise ConfigError([f"the runs are of different data ({listed}): compare the runs of each separately"])
    by: dict[tuple[str, int], Run] = {}
    for run in runs:
        key = run.config["method"], run.config["seed"]
        if key in by:
            raise ConfigError([f"'{by[key].path}' and '{run.path}' are both of {key[0]} with seed {key[1]}: name one"])
        by[key] = run
    return by


def _check_rounds(alone: Run, others: Sequence[Run]) -> None:
    """Warn of training alone that was shorter than what it is compared with: a gain may then be more training."""
    longest = max(others, key=lambda run: run.rounds, default=alone)
    if longest.rounds > alone.rounds:
        words = f"'{alone.path}' trained alone for {alone.rounds} rounds, '{longest.path}' for {longest.rounds}"
        warnings.warn(
            f"{words}: what seems a gain may be more training. 'coterie compare --methods' gives both as many rounds",
            CoterieWarning,
            stacklevel=3,
        )


def _reference(runs: list[Run]) -> Run:
    found = [read_run(run.path / "reference") for run in runs if (run.path / "reference" / "config.toml").exists()]
    if found:
        return max(found, key=lambda run: run.rounds)  # runs may have stopped early, each with its reference
    where = ", ".join(f"'{run.path}'" for run in runs)
    raise CoterieError(
        f"{where}: no local reference, so nobody can tell who gains. Run it again without --no-reference, or add a run "
        f"of --method local with the same data and seed {runs[0].config['seed']}"
    )


def _task_and_metric(runs: list[Run]) -> tuple[Task, str]:
    """Return a task, of which scoring needs the target and what is the user's own, and the metric of the runs."""
    about = next((files.read_json(path) for path in sorted((runs[0].path / "clients").glob("*/model.json"))), None)
    target = Classes() if about is None else target_of(about)
    metrics = {run.metric for run in runs}
    if len(metrics) > 1:
        raise ConfigError([f"the runs' rounds were selected by different metrics ({', '.join(sorted(metrics))})"])
    metric, config = metrics.pop(), runs[0].config
    own = () if metric in names_of(target) else add(config.get("metric", ()))
    loss = config.get("loss") if metric == "loss" else None
    if loss == OWN_LOSS:
        words = "the loss of these runs came from Python; gains are of the task's own loss"
        warnings.warn(words, CoterieWarning, stacklevel=3)
        loss = None
    loss = None if loss is None else find_loss(loss, target)
    return Task(nn.Linear(1, 1), target, loss=loss, metrics=own), metric  # any model: none is called
