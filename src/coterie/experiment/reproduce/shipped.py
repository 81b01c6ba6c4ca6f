"""Results that come with the library: a file of JSON lines, one result each, in `docs/reproduce/`.

They count as done, so that on another machine a table continues where it was left here. Of a run's rounds only those
are kept that a table can ask for: the best ones by any protocol, the one that validation selected, and the last. A
result whose method has changed since is shown, and said to be older, until it is run again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import coterie
from coterie.core.errors import CheckpointError
from coterie.experiment.reproduce.identity import FORMAT, Identity, Record
from coterie.experiment.reproduce.scores import at_protocol, at_selected
from coterie.experiment.reproduce.tables import Protocol
from coterie.storage import files

METRICS = ("accuracy", "balanced_accuracy")
BEST = tuple(Protocol("", metric, "best", over) for metric in METRICS for over in ("clients", "examples"))


def here() -> Path | None:
    """Return the file of the source tree that this code is run from; None if it is installed without one."""
    path = Path(coterie.__file__).parents[2] / "docs" / "reproduce" / "results.jsonl"
    return path if path.exists() else None


class Shipped:
    """Read results from such a file; None, or no such file: there are none."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @functools.cached_property
    def results(self) -> dict[str, Record]:
        """The results by the hash of their configuration.

        Raises:
            CheckpointError: a line is not a result.
        """
        if self.path is None or not self.path.exists():
            return {}
        found = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                found[record["of"]] = record
            except (ValueError, KeyError, TypeError):
                raise CheckpointError(f"'{self.path}', line {number}, is not a result: delete the line") from None
        return found

    def find(self, wanted: Identity) -> Record | None:
        """Return the result of a configuration, of whatever code, unless it is of other data files than those here."""
        found = self.results.get(wanted.config)
        if found is None or found["format"] != FORMAT:
            return None
        there = [tuple(each) for each in found["data_files"]]
        return found if not wanted.files or there == wanted.files else None

    def code_of(self, wanted: Identity) -> str | None:
        """Return with which code a result was made; None if there is none."""
        found = self.find(wanted)
        return None if found is None else found["code"]


def slim(record: Record, of: str) -> Record:
    """Return what a table needs of a result.

    Args:
        record: the result, with all its rounds.
        of: the hash of its configuration.
    """
    kept: set[int] = {at_selected(record), len(record["rounds"]) - 1}
    for which in ("", "global_"):
        scored = record["rounds"][0].get(f"{which}test", {})
        kept |= {at_protocol(record, which, protocol) for protocol in BEST if protocol.metric in scored}
    rounds = [_scored(record["rounds"][k]) for k in sorted(kept)]
    same = {key: record[key] for key in ("data_files", "code", "date", "seconds", "selected", "bytes", "model_bytes")}
    tests = [{"test": row["test"]} for row in record["clients"]]
    return {"of": of, "format": FORMAT, "key": record["key"], **same, "clients": tests, "rounds": rounds}


def _scored(row: Record) -> Record:
    """Return a round with those metrics that tables have."""
    parts = {part: {m: v for m, v in row[part].items() if m in METRICS} for part in row if part.endswith("test")}
    return {"round": row["round"], **parts}


def write(path: Path, results: Iterable[Record]) -> None:
    """Write such a file: a line each, in the order of the results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, "".join(f"{files.to_json(record)}\n" for record in results))
