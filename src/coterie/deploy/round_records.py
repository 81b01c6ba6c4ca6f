"""The records of a federation's rounds: each is told when its round ends, and scored by the message after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coterie.core.toml import to_toml
from coterie.deploy import outcome
from coterie.deploy.intake import Answer
from coterie.deploy.ledger import Ledger, Record
from coterie.deploy.schema import Who
from coterie.experiment.execute import local_like
from coterie.experiment.records import better, round_record, score_of
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Round
from coterie.storage.run_folder import RunFolder


@dataclass
class RoundRecords:
    """Keeps the records of the federation and, if there is a reference, of training alone beside it."""

    setup: Setup
    ledger: Ledger
    folder: RunFolder
    reference: RunFolder
    federated: list[Record]
    alone: list[Record]

    @classmethod
    def read(cls, setup: Setup, ledger: Ledger, folder: RunFolder, *, reference: bool) -> RoundRecords:
        """Read the records of the rounds that were closed before, and drop any later ones."""
        beside = RunFolder(folder.path / "reference")
        last = ledger.round - 1
        federated, alone = folder.read_rounds(last), beside.read_rounds(last) if reference else []
        folder.rewrite_rounds(federated)
        if reference:
            if not (beside.path / "config.toml").exists():
                beside.create(to_toml(setup.with_method(local_like(setup.method)).config.to_file()))
            beside.rewrite_rounds(alone)
        return cls(setup, ledger, folder, beside, federated, alone)

    def begin(self, number: int, result: Round, alone: Round | None) -> None:
        """Make the records of a round that was just trained; `alone` is what training alone measured."""
        self.ledger.pending = round_record(number, result, self.setup.federation)
        if alone is not None:
            self.ledger.pending_alone = round_record(number, alone, self.setup.federation)

    def evaluate(self, answers: Mapping[str, Answer]) -> None:
        """Add the metrics to the last round's record, and update the best round."""
        whose: tuple[Who, Who] = ("own", "alone")
        pending = (self.federated, self.ledger.pending, False), (self.alone, self.ledger.pending_alone, True)
        for which, (records, record, local) in zip(whose, pending, strict=True):
            if record is None:
                continue
            metrics = [
                answers[name].metrics.get(which) if name in answers else None for name in self.setup.federation.names
            ]
            record |= outcome.scores(self.setup, metrics)
            best = self.ledger.best_alone if local else self.ledger.best
            about = (self.setup.metric, self.setup.config.average)
            old = next((score_of(*about, each) for each in records if each["round"] == best), None)
            if old is None or self.setup.config.takes_last or better(score_of(*about, record), old):
                if local:
                    self.ledger.best_alone = record["round"]
                else:
                    self.ledger.best = record["round"]

    def close(self) -> None:
        """Write the records of the last round."""
        if self.ledger.pending is not None:
            self.federated.append(self.ledger.pending)
            self.folder.append_round(self.ledger.pending)
            self.ledger.pending = None
        if self.ledger.pending_alone is not None:
            self.alone.append(self.ledger.pending_alone)
            self.reference.append_round(self.ledger.pending_alone)
            self.ledger.pending_alone = None
