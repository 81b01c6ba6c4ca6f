"""Stores what a site keeps on its own disk, by run and client: its state, candidates for its model, its last answer.

    STORE/RUN/CLIENT/state-00007.safetensors       the state after round 7
                     candidate-00006.safetensors   the model to deploy, as of an evaluated round
                     copy-00008.safetensors        a peer's copy of the server before round 8, with that round's mail
                     answer.safetensors            the last answer; writing it commits the round
                     about.json                    the server's key, peers' keys
                     trials/ID/                    the same of a candidate, while a method is looked for
                     held-out/fold-1/METHOD.safetensors    then also what methods predict of held-out examples
Every file is written atomically. A state after the server's `base` (the last round that it accepted from this site) did
not count, and is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from coterie.core import tree
from coterie.core.errors import CheckpointError
from coterie.core.tree import Tree
from coterie.deploy import guard
from coterie.deploy.messages import Reply
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Name, PublicKey, Strict
from coterie.deploy.seal import Card
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.storage import files
from coterie.storage.run_folder import safe_name

MAX_STATES_KEPT = 3  # the one that the server builds on, and two before it in case it goes back


class About(Strict):
    """What a site knows of the others: the keys that it saw first."""

    server: PublicKey | None = None
    peers: dict[Name, Card] = Field(default_factory=dict)


class Store:
    """The folder of one run and client."""

    def __init__(self, root: Path, run: str, client: str) -> None:
        self.path = root / safe_name(run) / safe_name(client)

    def trial(self, id: str) -> Store:
        """Return the part of the store that a candidate of a recommendation has."""
        part = copy.copy(self)
        part.path = self.path / "trials" / safe_name(id)
        return part

    def keep_trials(self, ids: Collection[str]) -> None:
        """Delete the parts of all other candidates."""
        kept = {safe_name(id) for id in ids}
        for folder in (self.path / "trials").glob("*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder: a message may arrive while the previous one is still being processed."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def states(self) -> list[int]:
        """Return the rounds whose states are stored."""
        return self._rounds("state")

    def load(self, base: int, initial: Tree, *, only_read: bool = False) -> tuple[int, Tree]:
        """Return (round, state) of the newest state up to `base`, and delete later ones; round 0 is `initial`."""
        for round in self.states():
            if round > base and not only_read:
                self._file("state", round).unlink(missing_ok=True)
        found = [round for round in self.states() if round <= base]
        if not found:
            if base > 0:
                raise Refused("state-lost", f"there is no state up to round {base} in '{self.path}'")
            return 0, initial
        try:
            return found[-1], self._read("state", found[-1], initial)
        except CheckpointError as error:
            raise Refused("state-lost", str(error)) from error

    def save(self, round: int, state: Tree) -> None:
        """Write the state after a round, and delete old ones."""
        files.write_checked(self._file("state", round), tree.pack(state))
        for old in self.states()[:-MAX_STATES_KEPT]:
            self._file("state", old).unlink(missing_ok=True)

    def keep_copy(self, round: int, copy: Tree) -> None:
        """Write a peer's copy of the server as it is before `round`, and delete older ones."""
        files.write_checked(self._file("copy", round), tree.pack(copy))
        for old in self._rounds("copy"):
            if old != round:
                self._file("copy", old).unlink(missing_ok=True)

    def copy_before(self, round: int, like: Tree) -> Tree:
        """Return that copy; raise `Refused` if it is gone."""
        if round not in self._rounds("copy"):
            raise Refused("failed", f"there is no copy of the server before round {round} in '{self.path}'")
        return self._read("copy", round, like)

    def keep_candidate(self, kind: str, round: int, content: Tree, best: int) -> None:
        """Write a candidate; keep the best round so far, the newest before it, and this one."""
        files.write_checked(self._file(kind, round), tree.pack(content))
        older = [each for each in self._rounds(kind) if each < best]
        for each in self._rounds(kind):
            if each not in (best, round, *older[-1:]):
                self._file(kind, each).unlink(missing_ok=True)

    def candidate(self, kind: str, round: int, like: Tree) -> tuple[int, Tree] | None:
        """Return (round, content) of a round or, if the site did not evaluate it, of the last one before it."""
        found = [each for each in self._rounds(kind) if each <= round]
        return (found[-1], self._read(kind, found[-1], like)) if found else None

    def commit(self, answer: Envelope) -> None:
        """Write the answer."""
        files.write_tensors(self.path / "answer.safetensors", {k: as_leaf(v) for k, v in answer._asdict().items()})

    def last_answer(self, public: str) -> tuple[Reply, Envelope] | None:
        """Return the last answer, parsed and as an envelope, or None if there is no intact one of the key's owner."""
        try:
            flat = files.read_tensors(self.path / "answer.safetensors")
            answer = Envelope(*(as_bytes(flat[key]) for key in Envelope._fields))
            message = guard.read_at_server(answer)
            guard.verify(answer, message, public)
        except (CheckpointError, KeyError, Refused):
            return None
        return (message, answer) if isinstance(message, Reply) else None

    def about(self) -> About:
        """Return what the site knows of the others."""
        path = self.path / "about.json"
        try:
            return About.model_validate_json(path.read_bytes()) if path.exists() else About()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"'{path}' cannot be read: {error}") from error

    def keep_about(self, about: About) -> None:
        """Write what the site knows of the others."""
        files.write_text(self.path / "about.json", about.model_dump_json() + "\n")

    def read(self, name: str, default: Any) -> Any:
        """Read a JSON file, or return the default if there is none."""
        path = self.path / name
        return files.read_json(path) if path.exists() else default

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        files.write_json(self.path / name, value)

    def _read(self, kind: str, round: int, like: Tree) -> Tree:
        flat = files.read_checked(self._file(kind, round))
        try:
            return tree.unpack(flat, like)
        except ValueError as error:
            raise CheckpointError(f"'{self._file(kind, round)}' does not fit this run: {error}") from error

    def _rounds(self, kind: str) -> list[int]:
        names = (re.fullmatch(rf"{kind}-(\d+)\.safetensors", path.name) for path in self.path.glob(f"{kind}-*"))
        return sorted(int(match[1]) for match in names if match)

    def _file(self, kind: str, round: int) -> Path:
        return self.path / f"{kind}-{round:05d}.safetensors"
