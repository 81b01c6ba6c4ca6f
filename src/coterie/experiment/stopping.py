"""Runs that stop before their planned rounds: early stopping on validation data, and what is kept of a stop.

Early stopping ends a run when the score that selects rounds has not become better for so many evaluated rounds. It
depends on the records of the rounds alone, so a run that is resumed stops where it would have stopped. The local
reference trains for as many rounds, so both have taken the same number of steps; in a comparison of several methods,
for as many as the longest of them. A method that asked for the number of rounds (`Method.scheduled`) was told the
planned one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import CheckpointError
from coterie.experiment.config import Config
from coterie.experiment.records import better, score_of
from coterie.storage import files

FILE = "stopped.json"
FORMAT = 1
EARLY = "early_stop"


@dataclasses.dataclass(frozen=True)
class Stop:
    """Say after which round a run stopped, and why."""

    round: int
    planned: int
    by: str  # early_stop, or a callback
    why: str

    def sentence(self) -> str:
        """Return it in words."""
        return f"Stopped after round {self.round} of {self.planned} by {self.by}: {self.why}."

    def of_reference(self, method: str) -> Stop:
        """Return the stop of the run of training alone that this one is compared with."""
        return dataclasses.replace(self, by=method, why="as many rounds as the run that it is compared with")

    def to_json(self) -> dict[str, Any]:
        """Return the content of stopped.json and of `stopped` in summary.json."""
        return dataclasses.asdict(self)


def early_stop(config: Config, metric: str, records: Sequence[Mapping[str, Any]]) -> Stop | None:
    """Return the stop that is due after the last of `records`; None if the run goes on.

    Args:
        config: says after how many evaluated rounds without a better score (`early_stop`).
        metric: what selects rounds.
        records: of all rounds so far.
    """
    patience, standing, best, evaluated = config.early_stop, 0.0, None, 0
    if patience is None or "validation" not in records[-1] or records[-1]["round"] >= config.rounds:
        return None
    for record in records:
        if "validation" in record:
            score = score_of(metric, config.average, record)
            evaluated += 1
            if best is None or better(score, standing):
                best, standing, since = record["round"], score, evaluated
    if best is None or evaluated - since < patience:
        return None
    times = f"{patience} evaluated round{'s' * (patience != 1)}"
    why = f"validation {metric} has not become better than in round {best} for {times}"
    return Stop(records[-1]["round"], config.rounds, EARLY, why)


def write(out: Path, stop: Stop) -> None:
    """Write stopped.json, and say in config.toml, which is there already, that the run stopped."""
    files.write_json(out / FILE, {"format": FORMAT, **stop.to_json()})
    files.write_text(out / "config.toml", with_note(_without_note(out), stop))


def read(out: Path | None) -> Stop | None:
    """Read stopped.json of a run folder; None if the run has not been stopped.

    Raises:
        CheckpointError: the file is damaged, or of a newer version.
    """
    if out is None or not (out / FILE).exists():
        return None
    content = files.read_json(out / FILE)
    try:
        found = Stop(**{key: content[key] for key in ("round", "planned", "by", "why")})
        if content["format"] > FORMAT or not 1 <= found.round <= found.planned:
            raise ValueError("it is of a newer version, or has other numbers than a run can have")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"'{out / FILE}' does not say when the run stopped: {error}") from error
    return found


def lengthen(out: Path, until: Stop | None) -> bool:
    """Let a run that stopped go on until another stop, or all planned rounds; return False if it has them already."""
    stop = read(out)
    if stop is None or (until is not None and until.round <= stop.round):
        return False
    (out / "summary.json").unlink(missing_ok=True)  # the run is not complete any more
    if until is None:  # else `write` replaces what is said of the old one
        files.write_text(out / "config.toml", with_note(_without_note(out), None))
        (out / FILE).unlink()
    return True


def _without_note(out: Path) -> str:
    lines = (out / "config.toml").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(itertools.dropwhile(lambda line: line.startswith("#"), lines))


def with_note(config_toml: str, stop: Stop | None) -> str:
    """Return the content of config.toml, beginning with a comment if the run stopped."""
    note = (
        "" if stop is None else f"# {_one_line(stop.sentence())}\n# 'coterie resume' does not go on after that round.\n"
    )
    return note + config_toml


def _one_line(text: str) -> str:
    """Return text as a comment of TOML can hold it."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
