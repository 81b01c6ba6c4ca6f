"""Let every client choose what it takes home, and write the choice into the run folder.

take_home.json                   every client's choice, why, and what the models that are kept are worth
clients/NAME/model.json          "take_home": what is kept, the temperature and the threshold
clients/NAME/local.safetensors   the model trained alone, if it is kept or averaged with

Choices, temperatures and thresholds depend on validation examples only; test examples measure what they are worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.task import Task
from coterie.core.tree import Params
from coterie.engine.engine import one_thread
from coterie.evaluation import Benefit, Predictions
from coterie.evaluation.adoption import (
    AVERAGE,
    FEDERATED,
    LOCAL,
    MIN_EXAMPLES,
    Choice,
    at_threshold,
    average,
    choose,
    not_asked,
    temperature,
    threshold,
)
from coterie.evaluation.kinds.classes import THRESHOLDED
from coterie.evaluation.metrics import with_one_nan
from coterie.evaluation.scoring import metrics_of, score
from coterie.experiment.config import Config
from coterie.storage import files
from coterie.storage.run_folder import FORMAT, safe_name

FILE = "take_home.json"
LOCAL_FILE = "local.safetensors"
SETTINGS = (
    "take_home",
    "take_home_errors",
    "take_home_folds",
    "calibrate",
    "threshold",
)  # they change nothing before a run's end


class Outputs(NamedTuple):
    """Hold what the clients' models say of their validation and of their test examples."""

    validation: Predictions
    test: Predictions


@dataclass(frozen=True)
class Adoption:
    """Hold what the clients take home; lists have one entry per client."""

    names: list[str]
    metric: str  # measures the gain
    choices: list[Choice]
    temperatures: list[float | None]
    thresholds: list[float | None]
    predictions: Predictions  # of the models that are kept, for test examples
    validation: dict[str, list[float]]  # metrics of the models that are kept
    test: dict[str, list[float]]
    at_threshold: dict[str, list[float]]  # test metrics that depend on a threshold, at the client's own; or {}
    benefit: Benefit | None  # of the models that are kept, over training alone
    before: Benefit | None  # of the federated models

    def count(self, kept: str) -> int:
        """Return how many clients keep a kind of model."""
        return sum(choice.kept == kept for choice in self.choices)

    def with_few_examples(self) -> int:
        """Return how many clients had too few validation examples to choose."""
        return sum(choice.reason == "few examples" for choice in self.choices)

    def row(self, i: int) -> dict[str, Any]:
        """Return what clients.csv has about a client's choice."""
        row: dict[str, Any] = {"kept": self.choices[i].kept}
        row |= {f"kept_test_{metric}": values[i] for metric, values in self.test.items()}
        if self.benefit:
            row |= {f"kept_{key}": self.benefit.clients[i][key] for key in ("gain", "low", "high", "verdict")}
        return row

    def about(self, i: int) -> dict[str, Any]:
        """Return what model.json has about it: all that is needed to predict."""
        return {
            "kept": self.choices[i].kept,
            "temperature": self.temperatures[i],
            "threshold": self.thresholds[i],
        }

    def client(self, i: int) -> dict[str, Any]:
        """Return what take_home.json has about a client."""
        choice = self.choices[i]
        row: dict[str, Any] = {"client": self.names[i], "validation_examples": choice.examples, "reason": choice.reason}
        row |= {"cross_validated": choice.held_out}
        row |= self.about(i)
        row |= {"federated": choice.federated._asdict(), "average": choice.average._asdict()}
        row |= {"validation": {metric: values[i] for metric, values in self.validation.items()}}
        row |= {"test": {metric: values[i] for metric, values in self.test.items()}}
        return row | {"at_threshold": {metric: values[i] for metric, values in self.at_threshold.items()}}

    def to_json(self) -> dict[str, Any]:
        """Return the content of take_home.json."""
        rows = [self.client(i) for i in range(len(self.names))]
        told: dict[str, Any] = {"format": FORMAT, "metric": self.metric, "min_examples": MIN_EXAMPLES}
        told |= {"kept": {kind: self.count(kind) for kind in (FEDERATED, AVERAGE, LOCAL)}, "clients": rows}
        told["benefit"] = self.benefit.to_json() if self.benefit else None
        return told


def wanted(config: Config) -> bool:
    """Return whether a run's clients take home anything else than the federated model as it is."""
    return config.take_home == "best" or config.calibrate or config.threshold is not None


Both = tuple[Predictions, Predictions]  # of the federated models, and of those trained alone


def both(ours: Predictions | None, alone: Predictions | None) -> Both | None:
    """Return a pair if both are there."""
    return None if ours is None or alone is None else (ours, alone)


class Decisions(NamedTuple):
    """Hold what the clients decided by their validation examples; lists have one entry per client."""

    choices: list[Choice]
    temperatures: list[float | None]
    thresholds: list[float | None]
    kept: Outputs  # of the models that are kept


@one_thread()  # a client has few examples
def decide(
    config: Config,
    task: Task,
    clients: int,
    ours: Outputs,
    alone: Outputs | None,
    held_out: Both | None = None,
) -> Decisions:
    """Choose for every client what it takes home, by its validation examples.

    Args:
        config: says what the clients may choose.
        task: the task, which defines the loss.
        clients: how many there are.
        ours: outputs of the federated models.
        alone: outputs of the models trained alone; without them, all keep the federated one.
        held_out: what both models say of held-out examples of clients with few for validation, which choose by these.
    """
    choices, temperatures, thresholds = list[Choice](), list[float | None](), list[float | None]()
    validation, test = list[Tensor](), list[Tensor]()
    classes = task.kind == "classification"
    two = classes and ours.test.outputs.shape[1] == 2 and ours.test.y.ndim == 1
    for i in range(clients):
        mine, theirs = (None if each is None else _of(each, i) for each in (ours, alone))
        assert mine is not None
        choice = not_asked(LOCAL if config.method == "local" else FEDERATED, len(mine.validation.y))
        if config.take_home == "best" and theirs is not None:
            held = None if held_out is None else [each.of(i) for each in held_out]
            many = held is not None and len(held[0].y) > 0
            seen = held if held is not None and many else [mine.validation, theirs.validation]
            choice = choose(task, *seen, errors=config.take_home_errors, held_out=many)
        kept = Outputs(*(_kept(choice.kept, *pair, task) for pair in zip(mine, theirs or mine, strict=True)))
        warm = temperature(kept.validation) if config.calibrate and classes else None
        if warm is not None:
            kept = Outputs(*(each._replace(outputs=each.outputs / warm) for each in kept))
        choices.append(choice)
        temperatures.append(warm)
        thresholds.append(threshold(task, config.threshold, kept.validation) if config.threshold and two else None)
        validation.append(kept.validation.outputs)
        test.append(kept.test.outputs)
    whole = (ours.validation._replace(outputs=torch.cat(validation)), ours.test._replace(outputs=torch.cat(test)))
    return Decisions(choices, temperatures, thresholds, Outputs(*whole))


def measured(
    decided: Decisions, task: Task, metric: str, names: Sequence[str], benefit: Benefit | None, before: Benefit | None
) -> Adoption:
    """Measure on test examples what the clients decided.

    Args:
        decided: what they decided.
        task: the task, which defines the loss.
        metric: the one that the run reports, which measures the gain.
        names: the clients.
        benefit: the benefit of the models that are kept, over training alone; None if nothing was trained alone.
        before: the benefit of the federated models.
    """
    validation, test = decided.kept
    at_cut = {}
    if any(cut is not None for cut in decided.thresholds):
        outputs = [test.of(i).outputs for i in range(len(names))]
        pairs = zip(outputs, decided.thresholds, strict=True)
        shifted = [each if cut is None else at_threshold(each, cut) for each, cut in pairs]
        scores = score(task, *test._replace(outputs=torch.cat(shifted)), len(names))
        at_cut = {name: with_one_nan(scores[name]) for name in THRESHOLDED}
    choices, temperatures, thresholds = decided[:3]
    known, found = (_scores(task, each, len(names)) for each in (validation, test))
    return Adoption(list(names), metric, choices, temperatures, thresholds, test, known, found, at_cut, benefit, before)


def _of(outputs: Outputs, i: int) -> Outputs:
    return Outputs(*(each.of(i) for each in outputs))


def _kept(kept: str, ours: Predictions, alone: Predictions, task: Task) -> Predictions:
    if kept == AVERAGE:
        mixed = average(task.target, ours.outputs, alone.outputs)
        return ours._replace(outputs=mixed)
    return ours if kept == FEDERATED else alone


def _scores(task: Task, found: Predictions, clients: int) -> dict[str, list[float]]:
    scores = score(task, *found, clients)
    return {name: with_one_nan(scores[name]) for name in metrics_of(task)}


def write(adoption: Adoption, out: Path, local: Callable[[int], Params] | None) -> None:
    """Write take_home.json into a run folder, and into each client's folder what its model now is.

    Args:
        adoption: the choices.
        out: the run folder, which already has the federated models.
        local: returns the parameters of a client's local model; None if the run is of training alone.
    """
    with files.together(2 * len(adoption.names)):
        for i, name in enumerate(adoption.names):
            folder = out / "clients" / safe_name(name)
            about = files.read_json(folder / "model.json")
            about["take_home"] = adoption.about(i)
            about["metrics"] = {
                f"{part}_{metric}": values[i]
                for part, by in (("validation", adoption.validation), ("test", adoption.test))
                for metric, values in by.items()
            }
            if local is not None and adoption.choices[i].kept != FEDERATED:
                files.write_tensors(folder / LOCAL_FILE, local(i))
            files.write_json(folder / "model.json", about)
    files.write_json(out / FILE, adoption.to_json())


def words(choice: Mapping[str, Any]) -> str:
    """Say what a client keeps and why; `choice` is a client's row in take_home.json."""
    number, held = choice["validation_examples"], choice.get("cross_validated")
    examples = f"{number} examples, cross-validated," if held else f"{number} validation examples"
    which = {
        FEDERATED: "the federated model",
        AVERAGE: "the average of the federated model and the one trained alone",
        LOCAL: "the model trained alone",
    }[choice["kept"]]
    why = {
        "better": f"its {examples} show that it is better than training alone",
        "undecided": f"its {examples} do not show that federation makes it better",
        "few examples": f"its {examples} are too few to show that federation makes it better",
    }.get(choice["reason"])
    return which if why is None else f"{which}, since {why}"
