"""What the server remembers besides the method's state: the members, their last accepted rounds, mail, and statuses.

Writing RUN/deployment.json commits a round; RUN/sites.json is for people and for `coterie flower up`.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from pathlib import Path
from typing import Any

from coterie.core.errors import CheckpointError
from coterie.deploy.federation_facts import Declaration
from coterie.deploy.relay import Mailbox
from coterie.deploy.seal import Card
from coterie.storage import files

Record = dict[str, Any]


@dataclasses.dataclass
class SiteStatus:
    """The status of one site, as the table of sites shows it."""

    state: str = "joined"
    round: int = 0
    seen: float = 0.0  # seconds since 1970
    loss: float | None = None
    metric: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)

    def refuse(self, code: str) -> None:
        """Count a refused message."""
        self.refused[code] = self.refused.get(code, 0) + 1


@dataclasses.dataclass
class Ledger:
    """The server's memory of a run."""

    run: str
    life: int = 1
    round: int = 0  # the last closed message; after the rounds come a last evaluation and the finish
    rounds: int = 0  # of the run; of one that was stopped early, those until then
    metric: str = ""  # by which rounds are selected
    best: int = 0
    best_alone: int = 0
    stopped: Record | None = None  # after which round the server stopped early, and why
    finished: bool = False
    doing: str = ""  # what a recommendation is at; a run is at a round
    declared: dict[str, Declaration] = dataclasses.field(default_factory=dict)  # in the order of client ids
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    cards: dict[str, Card] = dataclasses.field(default_factory=dict)
    base: dict[str, int] = dataclasses.field(default_factory=dict)
    pending: Record | None = None  # record of the last round, not evaluated yet
    pending_alone: Record | None = None
    sites: dict[str, SiteStatus] = dataclasses.field(default_factory=dict)
    mail: Mailbox = dataclasses.field(default_factory=Mailbox)

    @classmethod
    def new(cls, federation: str) -> Ledger:
        """Start the ledger of a new run, with a random id."""
        return cls(f"{federation}-{secrets.token_hex(4)}")

    def save(self, out: Path) -> None:
        """Write the mail to a file of this round, then the ledger that refers to it."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("mail", "declared", "cards", "sites")
        }
        for key, held in (("declared", self.declared), ("cards", self.cards)):
            values[key] = {name: each.model_dump() for name, each in held.items()}
        values["sites"] = {name: vars(each) for name, each in self.sites.items()}
        values["mail"] = self.mail.save(out, self.round)
        files.write_checked_json(out / "deployment.json", values)
        self.mail.drop_files(out, self.round)
        self.show(out, self.doing)

    @classmethod
    def load(cls, out: Path) -> Ledger:
        """Read the ledger of a run folder; raise `CheckpointError` if there is none."""
        path = out / "deployment.json"
        if not path.exists():
            raise CheckpointError(f"'{out}' is not a deployed run: it has no deployment.json")
        values = files.read_checked_json(path)
        try:
            for key, kind in (("declared", Declaration), ("cards", Card)):
                values[key] = {
                    name: kind.model_validate(each, strict=False)  # JSON has no tuples
                    for name, each in values[key].items()
                }
            values["sites"] = {name: SiteStatus(**each) for name, each in values["sites"].items()}
            values["mail"] = Mailbox.load(out, values["mail"], values["round"])
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"'{path}' is not a ledger of this version: {error}") from error

    def stage(self) -> str:
        """Say what the run is doing now."""
        if self.doing:
            return self.doing
        if self.round < self.rounds:
            return f"round {self.round + 1} of {self.rounds}"
        return "the last evaluation" if self.round == self.rounds else "sites are writing their models"

    def show(self, out: Path, doing: str = "") -> None:
        """Write the current status to sites.json."""
        table = {name: vars(each) for name, each in self.sites.items()}
        about = {"run": self.run, "round": min(self.round, self.rounds), "rounds": self.rounds, "metric": self.metric}
        files.write_json(
            out / "sites.json",
            {
                **about,
                "doing": doing,
                "finished": self.finished,
                "sites": table,
                "time": time.time(),
                "pid": os.getpid(),
            },
        )
