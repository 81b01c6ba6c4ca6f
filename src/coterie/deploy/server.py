"""The server waits for sites to join, runs the rounds, and can resume them. It has no data and knows no transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coterie.core.toml import to_toml
from coterie.deploy.begin_rounds import begin_rounds
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.joining import Joining
from coterie.deploy.keys import Identity
from coterie.deploy.ledger import Ledger
from coterie.experiment.building import Model
from coterie.experiment.config import Config
from coterie.experiment.result import Result
from coterie.experiment.take_home.held_out import TINY
from coterie.methods.fields import AnyMethod
from coterie.storage.run_folder import RunFolder


@dataclass
class Server:
    """The server of one federation."""

    config: Config
    method: AnyMethod
    model: Model
    transport: Transport
    identity: Identity
    out: Path
    rules: Rules
    known: Mapping[str, str] = field(
        default_factory=dict
    )  # sites' public keys; if there are any, other sites may not join
    say: Callable[[str], None] = lambda _: None

    def run(self, ledger: Ledger) -> Result:
        """Run all remaining rounds; `ledger` is new, or loaded from `out` to resume."""
        folder = RunFolder(self.out)
        resuming = bool(ledger.declared)
        if not (self.out / "config.toml").exists():
            folder.create(to_toml(self.config.to_file()))
        joining = Joining(ledger, self.transport, self.identity, self.known, self.rules, self.say)
        if resuming:
            ledger.life += 1
            ledger.save(self.out)
        joining.wait(self.out)
        rounds = begin_rounds(self, ledger, joining, folder)
        if ledger.stopped is None:
            ledger.rounds, ledger.metric = self.config.rounds, rounds.setup.metric
        ledger.save(self.out)
        few = sum(each.validation < TINY for each in ledger.declared.values())
        if self.config.take_home == "best" and few and not resuming:
            self.say(
                f"{few} of {len(ledger.declared)} sites have fewer than {TINY} validation examples, by which alone "
                "they choose what they take home: a larger 'validation' gives them more (docs/deploy.md)"
            )
        while ledger.round <= ledger.rounds:
            rounds.play(ledger.round + 1)
        return rounds.finish()
