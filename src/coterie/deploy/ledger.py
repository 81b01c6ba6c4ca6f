"""What the server remembers beside the method's state: who takes part, which round counts for whom, mail, the table of
sites. RUN/deployment.json is the commit of a round; RUN/sites.json is for people (and `coterie flower up`)."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from pathlib import Path
from typing import Any

from coterie.deploy.facts import Declaration
from coterie.deploy.mailbox import Mailbox
from coterie.errors import CheckpointError
from coterie.experiment import files

Record = dict[str, Any]


@dataclasses.dataclass
class Standing:
    """A line of the table of sites."""

    state: str = "joined"
    round: int = 0
    seen: float = 0.0  # seconds since 1970
    loss: float | None = None
    metric: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)

    def refuse(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1


@dataclasses.dataclass
class Ledger:
    run: str
    life: int = 1
    round: int = 0  # the last message that is closed; after the rounds come an evaluation and the finish
    rounds: int = 0  # that there will be
    metric: str = ""  # what sites' models are compared by
    best: int = 0
    best_alone: int = 0
    finished: bool = False
    declared: dict[str, Declaration] = dataclasses.field(default_factory=dict)  # in the order of client ids
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    cards: dict[str, Any] = dataclasses.field(default_factory=dict)
    base: dict[str, int] = dataclasses.field(default_factory=dict)
    pending: Record | None = None  # of the last round, not evaluated yet
    pending_alone: Record | None = None
    sites: dict[str, Standing] = dataclasses.field(default_factory=dict)
    mail: Mailbox = dataclasses.field(default_factory=Mailbox)

    @classmethod
    def new(cls, federation: str) -> Ledger:
        return cls(f"{federation}-{secrets.token_hex(4)}")

    def save(self, out: Path) -> None:
        """The mail first, under the round's own name; then the ledger that speaks of it."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("mail", "declared", "sites")
        }
        values["declared"] = {name: vars(each) for name, each in self.declared.items()}
        values["sites"] = {name: vars(each) for name, each in self.sites.items()}
        values["mail"] = self.mail.save(out, self.round)
        files.write_json(out / "deployment.json", values)
        self.mail.drop_files(out, self.round)
        self.show(out)

    @classmethod
    def load(cls, out: Path) -> Ledger:
        path = out / "deployment.json"
        if not path.exists():
            raise CheckpointError(f"'{out}' holds no deployed run: it has no deployment.json")
        values = files.read_json(path)
        try:
            values["declared"] = {name: Declaration.read(told) for name, told in values["declared"].items()}
            values["sites"] = {name: Standing(**told) for name, told in values["sites"].items()}
            values["mail"] = Mailbox.load(out, values["mail"], values["round"])
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"'{path}' is not a ledger of this version: {error}") from error

    def stage(self) -> str:
        """What is being done now."""
        if self.round < self.rounds:
            return f"round {self.round + 1} of {self.rounds}"
        return "the last evaluation" if self.round == self.rounds else "the sites write their models"

    def show(self, out: Path, doing: str = "") -> None:
        """The table, as it is now."""
        table = {name: vars(each) for name, each in self.sites.items()}
        told = {"run": self.run, "round": min(self.round, self.rounds), "rounds": self.rounds, "metric": self.metric}
        files.write_json(
            out / "sites.json",
            {
                **told,
                "doing": doing,
                "finished": self.finished,
                "sites": table,
                "time": time.time(),
                "pid": os.getpid(),
            },
        )
