"""What a table of a paper is: its rows, with the paper's numbers, and how they are run and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coterie.core.errors import ConfigError

Size = Literal["full", "small"]
SIZES: tuple[Size, ...] = ("full", "small")


@dataclass(frozen=True)
class Protocol:
    """Say how a paper measures its numbers.

    Attributes:
        words: the same for the head of a column.
        metric: whose values are averaged, "accuracy" or "balanced_accuracy".
        at: the last round, or the best one *on test data*.
        over: the average is over clients, over all their test examples, or it is not one but the coefficient of
            variation of the clients' values, in hundredths.
    """

    words: str
    metric: str = "accuracy"
    at: Literal["last", "best"] = "best"
    over: Literal["clients", "examples", "variation"] = "clients"


@dataclass(frozen=True)
class Entry:
    """Describe a row of a table: a method with its settings, and the paper's numbers in percent."""

    label: str
    method: str
    paper: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sd: float | None = None  # the paper's own +-
    which: Literal["", "global_"] = ""  # "global_" scores the model for everybody
    clients: tuple[float, ...] = ()  # the paper's number of each client, where it prints them
    metric: str = ""  # what the paper scores this row by, if that is not the protocol's

    @property
    def equal_steps(self) -> bool:
        """Whether this is local training as the table's methods train: with as many gradient steps."""
        return self.method == "local" and not OF_TRAINING & set(self.settings)


OF_TRAINING = {"rounds", "local_epochs", "local_steps", "augment"}


@dataclass(frozen=True)
class Table:
    """Describe a table of a paper, or a part of one.

    Attributes:
        title: what it is, after the name of the paper and the number of the table.
        settings: of all its runs.
        entries: its rows. One of them is local training at equal steps, whether the paper has it or not.
        seeds: how many at full size.
        minutes: an estimate of the processor time of all seeds at full size.
        small: the settings in which the small size differs; None if the full size is small enough.
        small_words: the same in words.
        small_seeds: how many at the small size.
        small_minutes: an estimate of the processor time of all seeds at the small size.
        note: what a reader of the table should know.
        variant_of: the table of which this is the same with another schedule, and what it is called there.
        redrawn: every seed draws another federation. If not, its clients are the same for all seeds.
        counts_models: its rows say how many models are sent.
    """

    title: str
    protocol: Protocol
    settings: Mapping[str, Any]
    entries: tuple[Entry, ...]
    seeds: int = 3
    minutes: float = 10
    small: Mapping[str, Any] | None = None
    small_words: str = ""
    small_seeds: int = 3
    small_minutes: float = 10
    note: str = ""
    variant_of: tuple[str, str] | None = None
    redrawn: bool = True
    counts_models: bool = False

    def sizes(self) -> tuple[Size, ...]:
        """Return the sizes that the table has."""
        return ("full",) if self.small is None else SIZES

    def seeds_at(self, size: Size) -> int:
        """Return how many seeds the table has at a size."""
        return self.small_seeds if size == "small" else self.seeds

    def minutes_at(self, size: Size, seeds: int | None = None) -> float:
        """Return the estimated processor time at a size, in minutes."""
        minutes = self.small_minutes if size == "small" else self.minutes
        return minutes * (self.seeds_at(size) if seeds is None else seeds) / self.seeds_at(size)

    def settings_of(self, entry: Entry, size: Size, rounds: int | None = None) -> dict[str, Any]:
        """Return the settings of an entry's runs, but for the seed.

        Args:
            entry: the row.
            size: the small size changes all rows alike, and wins over the entry's own settings.
            rounds: fewer rounds than the table has, for a first look.

        Raises:
            ConfigError: there is no small size.
        """
        settings = {**self.settings, **entry.settings}
        if size == "small":
            if self.small is None:
                raise ConfigError([f"{self.title} has no small size, as its full size is small"])
            settings |= self.small
        if rounds is not None and settings.get("rounds", rounds) >= rounds:
            settings["rounds"] = rounds
        return settings
