"""How the relay keeps mail between peers. It never opens the mail.

A letter is kept until the server accepts an answer of its receiver to a later message; after that, the receiver never
needs it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coterie.deploy.wire import as_bytes, as_leaf
from coterie.storage import files


class Letter(NamedTuple):
    """Mail from one peer to another."""

    round: int
    sender: str
    receiver: str
    data: bytes


@dataclass
class Mailbox:
    """All mail that the relay keeps."""

    letters: list[Letter] = field(default_factory=list)
    heard: dict[int, list[str]] = field(default_factory=dict)  # by round: the peers whose messages count

    def put(self, round: int, sender: str, receiver: str, data: bytes) -> None:
        """Keep a letter."""
        self.letters.append(Letter(round, sender, receiver, data))

    def of(self, receiver: str, since: int) -> list[Letter]:
        """Return the receiver's letters since a round, in order, from peers whose messages count."""
        mine = [
            each
            for each in self.letters
            if each.receiver == receiver and each.round >= since and each.sender in self.heard.get(each.round, [])
        ]
        return sorted(mine, key=lambda each: (each.round, each.sender))

    def drop(self, base: dict[str, int]) -> None:
        """Drop letters that their receivers no longer need; one round is kept, as the server may go back by one."""
        self.letters = [each for each in self.letters if each.round >= base.get(each.receiver, 0) - 1]
        oldest = min(base.values(), default=0) - 1
        self.heard = {round: names for round, names in self.heard.items() if round >= oldest}

    def save(self, out: Path, round: int) -> dict[str, Any]:
        """Write the letters to a file; return the index that the ledger stores."""
        if self.letters:
            files.write_checked(self._file(out, round), {str(i): as_leaf(e.data) for i, e in enumerate(self.letters)})
        index = [[each.round, each.sender, each.receiver] for each in self.letters]
        return {"letters": index, "heard": {str(key): names for key, names in self.heard.items()}}

    @classmethod
    def load(cls, out: Path, index: Any, round: int) -> Mailbox:
        """Read the letters of a round, given the ledger's index."""
        flat = files.read_checked(cls._file(out, round)) if index["letters"] else {}
        letters = [Letter(each[0], each[1], each[2], as_bytes(flat[str(i)])) for i, each in enumerate(index["letters"])]
        return cls(letters, {int(key): names for key, names in index["heard"].items()})

    @classmethod
    def drop_files(cls, out: Path, round: int) -> None:
        """Delete the files of other rounds."""
        for path in out.glob("mail-*.safetensors"):
            if path != cls._file(out, round):
                path.unlink(missing_ok=True)

    @staticmethod
    def _file(out: Path, round: int) -> Path:
        return out / f"mail-{round:05d}.safetensors"
