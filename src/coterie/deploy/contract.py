"""The interface of a transport, and the rules of the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from coterie.deploy.wire import Envelope


class Transport(Protocol):
    """Carries envelopes between the server and addresses; see `flower.py`."""

    def addresses(self) -> set[str]: ...  # that are reachable now
    def post(self, letters: Mapping[str, Envelope]) -> None: ...
    def poll(self, seconds: float) -> list[tuple[str, Envelope | None]]: ...  # None: there will be no answer
    def now(self) -> float: ...


@dataclass(frozen=True)
class Rules:
    """How the server waits for sites."""

    sites: int = 2  # number of sites to wait for at the start
    names: tuple[str, ...] = ()  # names of the sites, in order; empty: the first to join, sorted by name
    deadline: float = 600.0  # seconds until a round closes
    quorum: float = 0.5  # share of the sampled sites that must answer before a round closes
    patience: int = 3  # number of deadlines to wait for a quorum
    joining: float = 600.0  # seconds to wait for the sites at the start
    norm_bound: float = 1e6
    sealed: bool = True  # mail between peers is encrypted end to end
    secure: bool = False  # the server learns sums of messages only
    threshold: float = 2 / 3  # share of a round's sites that must still be there to recover a sum

    @property
    def number(self) -> int:
        """How many sites there will be at the start."""
        return len(self.names) or self.sites
