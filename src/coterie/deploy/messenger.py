"""Addresses, signs and delivers the server's messages, round after round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coterie.deploy import guard, messages
from coterie.deploy.delivery import Delivery, Take
from coterie.deploy.joining import Joining
from coterie.deploy.ledger import Ledger

if TYPE_CHECKING:
    from coterie.deploy.server import Server


@dataclass
class Messenger:
    """Stands between what the server asks and the sites that have joined."""

    server: Server
    ledger: Ledger
    joining: Joining
    silent: set[str] = field(default_factory=set)  # did not answer last time, so they are not waited for

    def route(self, number: int, name: str) -> dict[str, Any]:
        """Return where message `number` to a site belongs."""
        about = {"run": self.ledger.run, "life": self.ledger.life, "round": number, "receiver": name}
        return {**about, "server": self.server.identity.public}

    def deliver(
        self,
        number: int,
        requests: Mapping[str, messages.FromServer],
        bodies: Mapping[str, bytes],
        take: Take,
        counted: frozenset[str],
        need: int,
    ) -> None:
        """Sign and send messages, and pass the answers to `take` until the round may close.

        Args:
            number: the round.
            requests: the message for each site.
            bodies: what goes with it; without an entry, nothing does.
            take: handles an answer, (site, envelope, message); returns whether the site is done.
            counted: the sites that count for the quorum.
            need: how many of them must answer.

        Raises:
            CoterieError: there is no quorum after all deadlines.
        """
        server = self.server
        letters = {name: guard.sign(each, bodies.get(name, b""), server.identity) for name, each in requests.items()}
        delivery = Delivery(server.transport, self.joining, self.ledger, server.rules, server.out, self.silent)
        delivery.run(number, letters, take, counted, need)
