"""What the server asks of whatever carries its messages, and the rules of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from coterie.deploy.wire import Envelope


class Transport(Protocol):
    """Carries envelopes between the server and addresses; see `flower.py`."""

    def addresses(self) -> set[str]: ...  # that can be reached now
    def post(self, letters: Mapping[str, Envelope]) -> None: ...
    def poll(self, seconds: float) -> list[tuple[str, Envelope | None]]: ...  # None: no answer will come
    def now(self) -> float: ...


@dataclass(frozen=True)
class Rules:
    sites: int = 2  # how many to wait for at the start
    names: tuple[str, ...] = ()  # their names, in order; empty: whoever joins first, by name
    deadline: float = 600.0  # seconds for a round
    quorum: float = 0.5  # share of the sampled sites without which a round does not close
    patience: int = 3  # deadlines to wait for a quorum
    joining: float = 600.0  # seconds to wait for the sites at the start
    norm_bound: float = 1e6
    sealed: bool = True  # mail between peers is encrypted end to end
