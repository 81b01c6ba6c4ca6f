"""What a recommendation says, as it is in memory and in its folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import CheckpointError
from coterie.core.toml import to_toml
from coterie.evaluation import Benefit
from coterie.evaluation.benefit import with_current_verdicts
from coterie.experiment.tuning.choice import Choice
from coterie.experiment.tuning.evidence import Difference
from coterie.storage import files


@dataclasses.dataclass(frozen=True)
class Look:
    """What the sites have; distances are medians over the sites, beside what chance would give."""

    sites: int
    least: int  # examples of the smallest site, test examples not counted
    median: int
    most: int
    labels: tuple[float, float] | None  # None: a regression, or nobody has looked
    inputs: tuple[float, float] | None  # None: as labels, nobody has looked


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a whole run of a method costs."""

    bytes_a_site: float
    minutes: float  # of training, on this machine


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What `coterie.recommend` found.

    Attributes:
        method: the method to use; "local" if nothing is known to beat training alone.
        settings: of `coterie.run`, for this method as it was tuned.
        look: what the sites have.
        choice: scores, differences, and who gains and loses.
        costs: of a whole run, by method.
        left_out: methods that were not tried, and why.
        budget: the rounds of training that each method had in the search of each fold.
        folds: how often examples were held out.
        metric: what was compared.
        path: the file with the settings, if there is one.
    """

    method: str
    settings: dict[str, Any]
    look: Look
    choice: Choice
    costs: dict[str, Cost]
    left_out: dict[str, str]
    budget: int
    folds: int
    metric: str
    path: Path | None

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        about = dataclasses.asdict(dataclasses.replace(self, path=None, choice=None))  # type: ignore[arg-type]
        choice = {
            field.name: getattr(self.choice, field.name)
            for field in dataclasses.fields(Choice)
            if field.name not in ("benefit", "over_local", "over_second")
        }
        choice["over_local"] = {label: dataclasses.asdict(each) for label, each in self.choice.over_local.items()}
        choice["over_second"] = None if self.choice.over_second is None else dataclasses.asdict(self.choice.over_second)
        choice["benefit"] = None if self.choice.benefit is None else self.choice.benefit.to_json()
        del about["path"]
        return {"format": 1, **about, "choice": choice}


def write(found: Recommendation, out: Path) -> None:
    """Write what was found into a folder."""
    files.write_text(out / "federation.toml", to_toml(found.settings))
    files.write_json(out / "recommendation.json", found.to_json())


def read_recommendation(out: Path) -> Recommendation:
    """Read what `write` wrote.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = out / "recommendation.json"
    told = files.read_json(path)
    try:
        choice = told["choice"]
        over_local = {label: _difference(each) for label, each in choice["over_local"].items()}
        over_second = None if choice["over_second"] is None else _difference(choice["over_second"])
        made = Choice(**{**choice, "over_local": over_local, "over_second": over_second, "benefit": None})
        if choice["benefit"] is not None:
            values = {field.name: choice["benefit"][field.name] for field in dataclasses.fields(Benefit)}
            made = dataclasses.replace(made, benefit=Benefit(**with_current_verdicts(values)))
        look = Look(
            **{**told["look"], "labels": _pair(told["look"]["labels"]), "inputs": _pair(told["look"]["inputs"])}
        )
        costs = {label: Cost(**each) for label, each in told["costs"].items()}
        known = {key: told[key] for key in ("method", "settings", "left_out", "budget", "folds", "metric")}
        return Recommendation(**known, look=look, choice=made, costs=costs, path=out / "federation.toml")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{path}' is not a recommendation of this version: {error}") from error


def _difference(values: Mapping[str, float | None]) -> Difference:
    return Difference(**{key: math.nan if value is None else value for key, value in values.items()})


def _pair(values: Sequence[float | None] | None) -> tuple[float, float] | None:
    if values is None:
        return None
    low, high = (math.nan if value is None else value for value in values)
    return low, high
