"""A run folder holds what a run leaves on disk, and what it resumes from.

config.toml       the configuration, as resolved        rounds.jsonl    one line a round, every client's metrics
environment.json  versions and machine                  clients.csv     one line a client, at the selected round
engine.json       the engine chosen, and why            summary.json    the selected round and the averages
data.json         each client's examples by class       report.html     the run in pictures; it needs nothing else
features.safetensors   test examples as the clients' models see them; embedding.json, the same in two dimensions
predictions.safetensors     what every client's model says of its test examples, at the selected round
validation.safetensors      the same of its validation examples, if clients choose what they take home; then also
held-out.safetensors        the same of examples that were held out, of clients with few for validation
references.json             what usual models of tables reach on the same splits, if they were asked for
take_home.json              what every client keeps, why, and what that is worth
benefit.json                every client's gain over training alone, with its interval and verdict
checkpoints/round-00007/    state.safetensors + state.json, with a checksum; the last two and the best are kept;
                            of many clients also checkpoints/rows-*.safetensors, which they share (see segments.py)
clients/NAME/               model.safetensors + model.json, which says how to rebuild the model; card.json, card.md; of
                            sites' own files also preprocessing.json, which says how a row becomes an input
onboarded.csv               one line a client that took no part and was onboarded
files.json                  of sites' own files: what they were (SHA-256)
reference/                  the run of local training that this one is compared with, in the same form
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import platform
import re
import shutil
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from coterie.core import tree
from coterie.core.errors import CheckpointError, CoterieWarning
from coterie.core.tree import Params
from coterie.evaluation import Predictions
from coterie.evaluation.benefit import current_verdict
from coterie.profiling import Profile, timed
from coterie.storage import files, segments
from coterie.storage.state import State

FORMAT = 1
PAGED = 2  # the format of a checkpoint whose rows are in files of their own
SHARED = 3  # the format of a checkpoint in which a tensor that the state has twice is written once
KEPT_CHECKPOINTS = 2  # the newest ones; the best round's is kept beside them
HELD_OUT = "held-out"  # the name of the file with predictions for examples held out in a cross-validation
VALIDATION = "validation"  # the name of the file with predictions for validation examples
COMPLETE = ("summary.json", "clients.csv", "predictions.safetensors")  # what a finished run has
FORMULA = re.compile(
    "'*[=+\\-@\\t\\r]"
)  # how text begins that a spreadsheet takes for a formula, or that is marked as none
MAX_NAME_LENGTH = 150  # of a folder; most systems have 255 bytes for a name, some of which files in it take
DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{number}" for port in ("COM", "LPT") for number in range(10))}
TEXT_COLUMNS = ("client", "verdict", "kept", "kept_verdict")  # of clients.csv
INTEGER_COLUMNS = ("train", "validation", "test", "round")  # of clients.csv; all others are floats


class RunFolder:
    """Reads and writes a run folder. What cannot be read or written raises a `CheckpointError` that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, config_toml: str) -> None:
        """Begin the folder of a new run.

        Raises:
            CheckpointError: the folder already holds a run.
        """
        if (self.path / "config.toml").exists():
            raise CheckpointError(
                f"'{self.path}' already holds a run: 'coterie resume {self.path}' continues it, "
                "or name another folder with --out"
            )
        files.write_text(self.path / "config.toml", config_toml)
        files.write_json(self.path / "environment.json", environment())

    def append_round(self, record: dict[str, Any]) -> None:
        self.append_lines([line_of(record)])

    def append_lines(self, lines: list[bytes]) -> None:
        """Append records as `line_of` makes them: all of them, or none if that fails."""
        files.append(self.path / "rounds.jsonl", lines)

    def read_rounds(self, until: int) -> list[dict[str, Any]]:
        """Read the records up to round `until`, without rounds after it, which have no checkpoint."""
        path = self.path / "rounds.jsonl"
        records = []
        for line in path.read_bytes().splitlines() if path.exists() else []:  # names may have other ends of lines
            try:
                record = json.loads(line)
            except ValueError:
                break  # the line that was being written when the run stopped
            if record["round"] <= until:
                records.append({key: _with_nan(key, value) for key, value in record.items()})
        return records

    def rewrite_rounds(self, records: list[dict[str, Any]]) -> None:
        files.write_text(self.path / "rounds.jsonl", b"".join(map(line_of, records)).decode())

    @timed("write")
    def save(self, round: int, state: State, best: int | None) -> None:
        """Write the checkpoint of a round, then drop those that are neither recent nor the best."""
        target = self._checkpoint(round)
        building = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(building, ignore_errors=True)
        try:
            rows = self._build(building, round, state, best)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)  # of a full disk, for example
            raise
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
        rounds = self.checkpoints()
        for old in rounds[:-KEPT_CHECKPOINTS]:
            if old != best:
                shutil.rmtree(self._checkpoint(old), ignore_errors=True)
        if rows:
            segments.prune(target.parent, [self._checkpoint(kept) for kept in self.checkpoints()])

    def _build(self, building: Path, round: int, state: State, best: int | None) -> Any:
        """Write a checkpoint into a folder of another name; return what it says of rows in shared files."""
        flat, rows = segments.write(building.parent, state)
        flat, same = _once(flat)
        files.write_tensors(building / "state.safetensors", flat)
        digest = files.checksum(building / "state.safetensors")
        about: dict[str, Any] = {"format": FORMAT, "round": round, "best": best, "checksum": digest}
        about |= {"format": PAGED, "rows": rows} if rows else {}
        about |= {"format": SHARED, "same": same} if same else {}
        files.write_checked_json(building / "state.json", about)
        return rows

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("round-")) for path in (self.path / "checkpoints").glob("round-*"))

    def load(self, round: int, like: State) -> tuple[State, int | None]:
        """Read the checkpoint of a round.

        Args:
            round: the round.
            like: a state of the same structure.

        Returns:
            (the state after the round, the best round known then)

        Raises:
            CheckpointError: it is not intact, or of another run.
        """
        folder = self._checkpoint(round)
        about = files.read_checked_json(folder / "state.json")
        if about.get("format", 0) > SHARED:
            raise CheckpointError(f"'{folder}' was written by a newer version of Coterie: update Coterie to read it")
        flat = files.read_tensors(folder / "state.safetensors", about.get("checksum", ""))
        try:
            flat |= {path: flat[first] for path, first in about.get("same", {}).items()}
            return segments.read(folder.parent, flat, about.get("rows", {}), like), about["best"]
        except CheckpointError as error:
            raise CheckpointError(f"'{folder}' is not whole: {error}") from error
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"'{folder}' does not fit this run: {error}") from error

    def load_last(self, like: State) -> tuple[int, State, int | None]:
        """Read the newest intact checkpoint; damaged ones are named in a warning and passed over.

        Returns:
            (the round, the state after it, the best round known then); round 0 and `like` if there is no checkpoint.
        """
        rounds = self.checkpoints()
        for round in reversed(rounds):
            try:
                state, best = self.load(round, like)
                return round, state, best
            except CheckpointError as error:
                if round == rounds[0]:
                    raise
                warnings.warn(f"{error}. Using the checkpoint before it.", CoterieWarning, stacklevel=2)
        return 0, like, None

    def write_trace(self, profile: Profile) -> None:
        """Write trace.json for chrome://tracing."""
        files.write_text(self.path / "trace.json", files.to_json(profile.trace()) + "\n")

    def write_clients(self, rows: list[dict[str, Any]], file: str = "clients.csv") -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows({key: csv_text(each) for key, each in row.items()} for row in rows)
        files.write_text(self.path / file, text.getvalue())

    def read_clients(self) -> list[dict[str, Any]]:
        path = self.path / "clients.csv"
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"'{path}' cannot be read: {error}") from error
        if not rows or any(name not in rows[0] for name in ("client", *INTEGER_COLUMNS)):
            raise CheckpointError(f"'{path}' is damaged: 'coterie resume {self.path}' writes it anew")
        return rows

    def write_predictions(self, found: Predictions, name: str = "predictions") -> None:
        files.write_tensors(self.path / f"{name}.safetensors", found._asdict())

    def write_held_out(self, found: Predictions | None) -> None:
        """Write predictions for held-out examples; without any, delete those that were there."""
        if found is not None:
            self.write_predictions(found, HELD_OUT)
        else:
            (self.path / f"{HELD_OUT}.safetensors").unlink(missing_ok=True)

    def read_held_out(self) -> Predictions | None:
        """Read them; None if there are none."""
        there = (self.path / f"{HELD_OUT}.safetensors").exists()
        return self.read_predictions(HELD_OUT) if there else None

    def read_predictions(self, name: str = "predictions") -> Predictions:
        path = self.path / f"{name}.safetensors"
        flat = files.read_tensors(path)
        if missing := [name for name in Predictions._fields if name not in flat]:
            raise CheckpointError(f"'{path}' has no {', '.join(missing)}: 'coterie resume {self.path}' writes it anew")
        found = Predictions(**{name: flat[name] for name in Predictions._fields})
        sizes, owner = {len(each) for each in found}, found.owner
        if len(sizes) > 1 or owner.dtype != torch.int64 or not len(owner) or bool((owner.diff() < 0).any()):
            raise CheckpointError(f"'{path}' is damaged: 'coterie resume {self.path}' writes it anew")
        return found

    def write_model(self, client: str, view: tree.Tree, about: dict[str, Any]) -> None:
        folder = self.path / "clients" / safe_name(client)
        files.write_tensors(folder / "model.safetensors", tree.pack(view))
        files.write_json(folder / "model.json", {"format": FORMAT, "client": client, **about})

    def write_preprocessing(self, client: str, record: dict[str, Any]) -> None:
        files.write_json(self.path / "clients" / safe_name(client) / "preprocessing.json", record)

    def _checkpoint(self, round: int) -> Path:
        return self.path / "checkpoints" / f"round-{round:05d}"


@timed("write")
def line_of(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON, in which what is not finite is null.

    A record has some numbers for every client, so the faster writer is worth it.
    """
    try:
        return to_json(record, inf_nan_mode="null") + b"\n"
    except ValueError:  # a name that is not Unicode, as files can have
        return files.to_json(record).encode() + b"\n"


def _once(flat: Params) -> tuple[Params, dict[str, str]]:
    """Leave out tensors that occur twice (a model that a client keeps, and the server too).

    Returns:
        (the others, {path that was left out: path of the same tensor})
    """
    known: dict[Any, str] = {}
    own, same = Params(), dict[str, str]()
    for path, leaf in flat.items():
        first = known.setdefault((leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride(), leaf.device), path)
        if first == path or not leaf.numel():
            own[path] = leaf
        else:
            same[path] = first
    return own, same


def model_file(run: Path, client: str) -> Path:
    """Return where a client's model is in a run folder."""
    return run / "clients" / safe_name(client) / "model.safetensors"


def safe_name(client: str) -> str:
    """Return a client's name as a folder's name that every system can have; other names give other folders.

    What is not a letter, digit, '.', '-' or '_' becomes %XX, or %uXXXXXX beyond Latin-1; so do dots at either end and
    two in a row, and the first letter of a name that Windows keeps for devices. A long name ends with its digest.
    """
    text = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else _percent(c) for c in client)
    text = text.replace("..", "%2E%2E") if text.strip(".") else text.replace(".", "%2E") or "%00"
    text = f"%2E{text[1:]}" if text[0] == "." else text
    text = f"{text[:-1]}%2E" if text[-1] == "." else text
    text = f"{_percent(text[0])}{text[1:]}" if text.partition(".")[0].upper() in DEVICES else text
    if len(text) <= MAX_NAME_LENGTH:
        return text
    digest = hashlib.blake2b(client.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return f"{text[: MAX_NAME_LENGTH - 34]}%h{digest}"


def _percent(letter: str) -> str:
    return f"%{ord(letter):02X}" if ord(letter) < 256 else f"%u{ord(letter):06X}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read what `write_clients` wrote; no rows where there is no such file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            read = [{key: from_csv_text(text) for key, text in row.items()} for row in rows]
            return [row | {"verdict": current_verdict(row["verdict"])} if "verdict" in row else row for row in read]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}") from error


def csv_text(cell: Any) -> Any:
    """Return a cell as it is written to CSV: text that a spreadsheet would run as a formula gets an apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def from_csv_text(cell: str) -> str:
    """Return the text that `csv_text` was given."""
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _value(key: str, text: str) -> str | int | float:
    if key == "verdict":
        return current_verdict(text)
    if key in TEXT_COLUMNS:
        return from_csv_text(text)
    if key in INTEGER_COLUMNS:
        return int(text)
    number = float(text)
    return math.nan if math.isnan(number) else number  # one NaN, so that equal rows compare equal


def _with_nan(key: str, value: Any) -> Any:
    """Turn null, which undefined metrics are in JSON, into NaN."""
    if not key.removeprefix("global_").startswith(("validation", "test")):
        return value
    return {name: [math.nan if each is None else each for each in values] for name, values in value.items()}


def environment() -> dict[str, Any]:
    """Return the versions and the machine, for environment.json."""
    packages = ("coterie", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic")
    return {
        "format": FORMAT,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch_config": torch.__config__.show().splitlines()[:8],
        "packages": {name: _version(name) for name in packages},
    }


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
