"""Mail between peers, at the relay: what is held for whom. Nobody's mail is opened here.

A letter is kept until its receiver has an accepted answer to a later message: only then will it never ask for it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coterie.deploy.wire import as_bytes, as_leaf
from coterie.experiment import files


class Letter(NamedTuple):
    round: int
    sender: str
    receiver: str
    data: bytes


@dataclass
class Mailbox:
    letters: list[Letter] = field(default_factory=list)
    heard: dict[int, list[str]] = field(default_factory=dict)  # by round: whose messages count

    def put(self, round: int, sender: str, receiver: str, data: bytes) -> None:
        self.letters.append(Letter(round, sender, receiver, data))

    def of(self, receiver: str, since: int) -> list[Letter]:
        """Those of rounds from `since` on, in order, as far as they count."""
        mine = [
            each
            for each in self.letters
            if each.receiver == receiver and each.round >= since and each.sender in self.heard.get(each.round, [])
        ]
        return sorted(mine, key=lambda each: (each.round, each.sender))

    def drop(self, base: dict[str, int]) -> None:
        """Those that their receivers have built on, with one round to spare: the server may go back by one."""
        self.letters = [each for each in self.letters if each.round >= base.get(each.receiver, 0) - 1]
        oldest = min(base.values(), default=0) - 1
        self.heard = {round: names for round, names in self.heard.items() if round >= oldest}

    def save(self, out: Path, round: int) -> dict[str, Any]:
        """Writes the letters; returns what the ledger notes of them."""
        if self.letters:
            files.write_tensors(self._file(out, round), {str(i): as_leaf(e.data) for i, e in enumerate(self.letters)})
        index = [[each.round, each.sender, each.receiver] for each in self.letters]
        return {"letters": index, "heard": {str(key): names for key, names in self.heard.items()}}

    @classmethod
    def load(cls, out: Path, told: Any, round: int) -> Mailbox:
        flat = files.read_tensors(cls._file(out, round)) if told["letters"] else {}
        letters = [Letter(each[0], each[1], each[2], as_bytes(flat[str(i)])) for i, each in enumerate(told["letters"])]
        return cls(letters, {int(key): names for key, names in told["heard"].items()})

    @classmethod
    def drop_files(cls, out: Path, round: int) -> None:
        for path in out.glob("mail-*.safetensors"):
            if path != cls._file(out, round):
                path.unlink(missing_ok=True)

    @staticmethod
    def _file(out: Path, round: int) -> Path:
        return out / f"mail-{round:05d}.safetensors"
