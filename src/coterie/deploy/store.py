"""What a site keeps on its own disk, by run and client: private state, candidates for its model, its last answer.

    STORE/RUN/CLIENT/state-00007.safetensors       the state after round 7
                     candidate-00006.safetensors   what the site would deploy, as of an evaluated round
                     answer.safetensors            the last answer, written last: it is the commit
                     about.json                    the server's key, peers' keys
Every file is written whole or not at all, with a checksum beside it in the same file's metadata where it matters. A
state beyond the server's `base` (the last round it accepted from this site) never counted, and is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie import tree
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.errors import CheckpointError
from coterie.experiment import files
from coterie.experiment.folder import safe_name
from coterie.tree import Tree

KEEP = 3  # states: the one the server builds on, and two before it in case it has to go back


class Store:
    def __init__(self, root: Path, run: str, client: str) -> None:
        self.path = root / safe_name(run) / safe_name(client)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time: a message may arrive while the one before it is still worked on."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def states(self) -> list[int]:
        return self._rounds("state")

    def load(self, base: int, initial: Tree) -> tuple[int, Tree]:
        """(round, state): the newest up to `base`; later ones are dropped. Round 0 is `initial`."""
        for round in self.states():
            if round > base:
                self._file("state", round).unlink(missing_ok=True)
        found = [round for round in self.states() if round <= base]
        if not found:
            if base > 0:
                raise Refused("state-lost", f"there is no state up to round {base} in '{self.path}'")
            return 0, initial
        return found[-1], self._read("state", found[-1], initial)

    def save(self, round: int, state: Tree) -> None:
        files.write_tensors(self._file("state", round), tree.pack(state))
        for old in self.states()[:-KEEP]:
            self._file("state", old).unlink(missing_ok=True)

    def keep_candidate(self, kind: str, round: int, content: Tree, best: int) -> None:
        """Of the evaluated rounds, the best so far, the one best before it, and this one are kept."""
        files.write_tensors(self._file(kind, round), tree.pack(content))
        older = [each for each in self._rounds(kind) if each < best]
        for each in self._rounds(kind):
            if each not in (best, round, *older[-1:]):
                self._file(kind, each).unlink(missing_ok=True)

    def candidate(self, kind: str, round: int, like: Tree) -> tuple[int, Tree] | None:
        """(round, content) of that round or, if the site did not evaluate it, of the last one before it."""
        found = [each for each in self._rounds(kind) if each <= round]
        return (found[-1], self._read(kind, found[-1], like)) if found else None

    def commit(self, answer: Envelope) -> None:
        files.write_tensors(self.path / "answer.safetensors", {k: as_leaf(v) for k, v in answer._asdict().items()})

    def last_answer(self) -> tuple[dict[str, Any], Envelope] | None:
        """(its header, the envelope), if there is an intact one."""
        try:
            flat = files.read_tensors(self.path / "answer.safetensors")
            answer = Envelope(*(as_bytes(flat[key]) for key in Envelope._fields))
            return json.loads(answer.header), answer
        except (CheckpointError, KeyError, ValueError):
            return None

    def read(self, name: str, default: Any) -> Any:
        path = self.path / name
        return files.read_json(path) if path.exists() else default

    def write(self, name: str, value: Any) -> None:
        files.write_json(self.path / name, value)

    def _read(self, kind: str, round: int, like: Tree) -> Tree:
        flat = files.read_tensors(self._file(kind, round))
        try:
            return tree.unpack(flat, like)
        except ValueError as error:
            raise CheckpointError(f"'{self._file(kind, round)}' does not fit this run: {error}") from error

    def _rounds(self, kind: str) -> list[int]:
        names = (re.fullmatch(rf"{kind}-(\d+)\.safetensors", path.name) for path in self.path.glob(f"{kind}-*"))
        return sorted(int(match[1]) for match in names if match)

    def _file(self, kind: str, round: int) -> Path:
        return self.path / f"{kind}-{round:05d}.safetensors"
