"""Write a model card for each client: what its model was made from, how good it is, and who it learned from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core import rng
from coterie.core.task import Task
from coterie.data import Federation
from coterie.engine.engine import one_thread
from coterie.engine.fork_jobs import DoJobs, do_all
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import LEVEL
from coterie.evaluation.benefit import intervals as percentiles
from coterie.evaluation.bootstrap import draws
from coterie.evaluation.metrics import AVERAGES
from coterie.evaluation.scoring import statistic
from coterie.experiment import training_settings
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.experiment.take_home.adopt import Adoption
from coterie.experiment.take_home.card_text import PARTS, to_markdown
from coterie.methods.fields import AnyMethod
from coterie.storage import files
from coterie.storage.run_folder import environment, safe_name

FORMAT = 1
RESAMPLES = 1000
MAX_COLLABORATORS = 200  # how many card.json names
CARDS_PER_JOB = 250  # fewer cards are not worth another process
CARDS_PER_SMALL_JOB = 3  # the same, if there are other processes already or many examples to resample: sizes differ
MANY_EXAMPLES = 5000  # of all clients: resampling more test examples than this is worth another process


def write_cards(
    result: Result,
    setup: Setup,
    out: Path,
    others: Sequence[str] = (),
    benefit: dict[str, Any] | None = None,
    population: int | None = None,
    do: DoJobs | None = None,
) -> None:
    """Write card.json and card.md into every client's folder.

    Args:
        result: has the clients' metrics and predictions.
        setup: what was run.
        out: the run folder.
        others: if the only client of `result` is a newcomer, the clients of the run that it joined.
        benefit: the content of benefit.json, which is read unless it is given.
        population: how many clients trained together, if `result` has one site only.
        do: runs the jobs that write the cards; by default, as many processes as there are cores.
    """
    if benefit is None and (out / "benefit.json").exists():
        benefit = files.read_json(out / "benefit.json")
    gains = {row["client"]: row for row in (benefit or {}).get("clients", [])}
    versions = {**environment()["packages"], "coterie": version(), "python": environment()["python"]}
    learned, names = _learning(result, others), result.names

    @one_thread()  # a client has few examples
    def write(some: range) -> None:
        for i in some:
            card = make_card(result, setup, i, others, gains.get(names[i]), versions, learned(i))
            card |= {} if population is None else {"clients": population}
            folder = out / "clients" / safe_name(names[i])
            files.write_json(folder / "card.json", card)
            files.write_text(folder / "card.md", to_markdown(card, out))

    import scipy.sparse  # noqa: F401 - intervals of AUROC need it: imported once, before processes are forked

    each = CARDS_PER_SMALL_JOB if do or len(result.predictions.y) > MANY_EXAMPLES else CARDS_PER_JOB
    jobs = [partial(write, range(i, min(i + each, len(names)))) for i in range(0, len(names), each)]
    with files.together(2 * len(names)):
        (do or do_all)(jobs)


def selected_by(result: Result) -> str:
    """Say what selected the round; the last word is the metric."""
    by = f"{AVERAGES[result.config.average or 'mean']} validation {result.metric}"
    return f"privacy, as the last round, whatever the {by}" if result.config.takes_last else by


def make_card(
    result: Result,
    setup: Setup,
    i: int,
    others: Sequence[str],
    gain: dict[str, Any] | None,
    versions: dict[str, Any],
    learned: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of a client's card.json."""
    config, federation, row = result.config, setup.federation, result.clients[i]
    return {
        "format": FORMAT,
        "client": row["client"],
        "took_part": not others,
        "clients": len(others) or len(result.clients),
        "method": {"name": config.method, "paper": _paper(result.method), "hyper": config.hyper},
        "optimizer": config.optimizer,
        "training": training_settings.to_json(config),
        "model": config.model if result.mixed is None else result.mixed.model(i),
        "input_shape": list(federation.x.shape[1:]),
        "outputs": federation.target.outputs,
        "schedule": {
            "rounds": config.rounds,
            **({"stopped_after": result.stopped.round} if result.stopped else {}),
            "selected_round": result.selected,
            "selected_by": selected_by(result),
            **({"local_steps": config.local_steps} if config.local_steps else {"local_epochs": config.local_epochs}),
            "batch_size": config.batch_size,
            "seed": config.seed,
        },
        "data": {"name": config.data, **_data(federation, i)},
        "metrics": None if result.take_home else _metrics(result, i),
        "selected_metric": result.metric,
        "level": LEVEL,
        "benefit": gain,
        "learned_from": learned,
        "holds": result.method.view_holds or None,
        "versions": versions,
        "take_home": None,
        "privacy": None if result.budget is None else result.budget.of(row["client"]),
    } | ({} if result.take_home is None else _taken(result.take_home, result.task, i, config.seed))


def rewrite_cards(adoption: Adoption, task: Task, out: Path, seed: int) -> None:
    """Say in the cards of a finished run what the clients take home, now that they have chosen."""
    with files.together(2 * len(adoption.names)):
        for i, name in enumerate(adoption.names):
            folder = out / "clients" / safe_name(name)
            card = files.read_json(folder / "card.json") | _taken(adoption, task, i, seed)
            files.write_json(folder / "card.json", card)
            files.write_text(folder / "card.md", to_markdown(card, out))


def _taken(adoption: Adoption, task: Task, i: int, seed: int) -> dict[str, Any]:
    """Return the entries of a card that depend on what the client takes home."""
    told = adoption.client(i)
    test, validation = told.pop("test"), told.pop("validation")
    names = _resampled(task, test, adoption.metric)
    bounds = intervals(task, adoption.predictions.of(i), names, seed, adoption.names[i])
    metrics = {"validation": validation, "test": test, "test_intervals": {name: list(bounds[name]) for name in names}}
    told["federated_benefit"] = adoption.before.clients[i] if adoption.before else None
    gain = adoption.benefit.clients[i] if adoption.benefit else None
    return {"metrics": metrics, "benefit": gain, "take_home": told}


def version() -> str:
    """Return the version of the code that runs, installed or not."""
    from coterie import __version__

    return __version__


def class_names(federation: Federation) -> list[str]:
    """Return the classes by name or, if they have none, by number; [] in a regression."""
    return list(federation.classes or map(str, range(federation.num_classes or 0)))


def intervals(task: Task, one: Predictions, metrics: Iterable[str], *seed: int | str) -> dict[str, tuple[float, float]]:
    """Return percentile intervals of one client's metrics, by resampling its examples with replacement."""
    names = list(metrics)
    of = [statistic(task, metric, one) for metric in names]
    weights = draws(len(one.y), RESAMPLES, rng.generator(*seed, "intervals"))
    samples = np.concatenate([[each(some) for each in of] for some in weights], axis=1)
    return dict(zip(names, percentiles(samples), strict=True))


def _resampled(task: Task, metrics: Iterable[str], selected: str) -> list[str]:
    """Return the metrics that a card has intervals of.

    Not of the calibration error: a resample repeats examples, which alone makes it larger. Nor, unless they select the
    round, of what would take minutes: users' own metrics, and losses that compare all examples.
    """
    slow = {*task.metrics, *(["loss"] if task.joint else [])} - {selected}
    return [name for name in metrics if name not in slow and name.rpartition(".")[2] != "ece"]


def _metrics(result: Result, i: int) -> dict[str, Any]:
    """Return {part: {metric: value}}, and intervals of the metrics on test data."""
    row = result.clients[i]
    metrics: dict[str, Any] = {
        part: {key.removeprefix(f"{part}_"): value for key, value in row.items() if key.startswith(f"{part}_")}
        for part in ("validation", "test")
    }
    names = _resampled(result.task, metrics["test"], result.metric)
    bounds = intervals(result.task, result.predictions.of(i), names, result.config.seed, row["client"])
    return {**metrics, "test_intervals": {name: list(bounds[name]) for name in names}}


def _data(federation: Federation, i: int) -> dict[str, Any]:
    split = federation.split(i)
    data: dict[str, Any] = {part: len(split[part]) for part in PARTS}
    if federation.num_classes is None or federation.y.ndim > 1:
        return data
    names = class_names(federation)
    counts = {part: np.bincount(federation.y[split[part]].cpu().numpy(), minlength=len(names)) for part in PARTS}
    data["classes"] = {name: {part: int(counts[part][k]) for part in PARTS} for k, name in enumerate(names)}
    return data


def _learning(result: Result, others: Sequence[str]) -> Callable[[int], dict[str, Any]]:
    """Return a function that says who a client learned from.

    It is said in words and, if the method weighs the clients, by weight at the selected round. At most
    `MAX_COLLABORATORS` are named, those with the largest weights; `more` says how many are not.
    """
    record = next(record for record in result.rounds if record["round"] == result.selected)
    names, server, words = [*others, *result.names], record.get("server", {}), result.method.learns_from
    if "collaboration" in server:
        words = "the clients below, by weight: those whose data or models are most like its own weigh most"
        rows = np.asarray(server["collaboration"])[len(names) - len(result.clients) :]
    elif "weight" in server:
        rows = np.asarray(server["weight"])  # between peers, each has a row of its own
    else:
        return lambda i: {"words": words}
    if rows.ndim == 1:
        shared = {"words": words, **_weights(names, rows)}
        return lambda i: shared
    return lambda i: {"words": words, **_weights(names, rows[i])}


def _weights(names: Sequence[str], row: np.ndarray) -> dict[str, Any]:
    """Return the positive weights by client, largest first."""
    order = [j for j in np.argsort(-row, kind="stable").tolist() if row[j] > 0]
    more = {"more": len(order) - MAX_COLLABORATORS} if len(order) > MAX_COLLABORATORS else {}
    return {"weights": {names[j]: float(row[j]) for j in order[:MAX_COLLABORATORS]}, **more}


def _paper(method: AnyMethod) -> str:
    about = (sys.modules[type(method).__module__].__doc__ or type(method).__doc__ or "").strip()
    return " ".join(about.split("\n\n")[0].split())
