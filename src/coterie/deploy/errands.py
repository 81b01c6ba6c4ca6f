"""Before a round among peers who ask each other, the relay learns who asks whom, and fetches what the owners offer.

    ask      to those who train or evaluate; answered with names
    offer    to those named, with their mail of the last rounds and the names of who asks; answered with sealed offers

The offers go out with the message of the round itself. Neither message changes a site's state, so both can be repeated.
A site that does not reply in time is not asked, or asks nobody, in this round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.core.tree import Tree
from coterie.deploy import guard
from coterie.deploy.delivery import Take
from coterie.deploy.intake import check_reply, complaints, letter_sizes, mail_list
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import Refused
from coterie.deploy.relay import Letter
from coterie.deploy.site import request_digest
from coterie.deploy.wire import Envelope, as_bytes

Deliver = Callable[[dict[str, Envelope], Take], None]  # sends messages, and passes the answers on


@dataclass
class Errands:
    """Who asked whom in one round, and what they got."""

    ledger: Ledger
    round: int
    near: Mapping[str, tuple[str, ...]]
    form: Tree  # of an offer
    askers: dict[str, list[str]] = field(default_factory=dict)  # {owner: who asks it}
    offers: list[Letter] = field(default_factory=list)
    caught_up: set[str] = field(default_factory=set)  # have read their mail already
    refused: dict[str, list[list[Any]]] = field(default_factory=dict)  # mail that they refused: [round, sender, code]

    def ask(self, letters: dict[str, Envelope], deliver: Deliver) -> None:
        """Learn who asks whom."""
        digests = _digests(letters)

        def take(name: str, envelope: Envelope, header: dict[str, Any]) -> bool:
            check_reply(self.ledger, self.round, header, "asks", digests.get(name))
            if name not in digests:
                raise Refused("wrong-round", "it was not asked anything")
            guard.open_body(envelope, {})
            asks = header.get("asks")
            if not isinstance(asks, list) or not all(type(each) is str for each in asks) or len({*asks}) < len(asks):
                raise Refused("bad-header", "the list of those asked cannot be read")
            if not set(asks) <= set(self.near[name]):
                raise Refused("wrong-receiver", "it asks sites that are not neighbours")
            for owner in asks:
                if name not in self.askers.setdefault(owner, []):
                    self.askers[owner].append(name)
            return True

        deliver(letters, take)

    def fetch(self, letters: dict[str, Envelope], deliver: Deliver) -> None:
        """Collect what the owners offer to those who asked."""
        digests = _digests(letters)

        def take(name: str, envelope: Envelope, header: dict[str, Any]) -> bool:
            check_reply(self.ledger, self.round, header, "offers", digests.get(name))
            if name not in digests:
                raise Refused("wrong-round", "nobody asked it for anything")
            listed = mail_list(header)
            if sorted(to for to, _ in listed) != sorted(self.askers[name]):
                raise Refused("wrong-receiver", "offers for sites that did not ask")
            if name in self.caught_up:
                raise Refused("replay")
            refused = complaints(header.get("refused", []))
            content = guard.open_body(envelope, {"mail": letter_sizes([size for _, size in listed], self.form)})["mail"]
            for i, (to, _) in enumerate(listed):
                self.offers.append(Letter(self.round, name, to, as_bytes(content[str(i)])))
            self.caught_up.add(name)
            self.refused[name] = refused
            return True

        deliver(letters, take)

    def of(self, receiver: str) -> list[Letter]:
        """Return the offers for a site, in the order of their senders."""
        return sorted((each for each in self.offers if each.receiver == receiver), key=lambda each: each.sender)

    @property
    def nbytes(self) -> int:
        return sum(len(each.data) for each in self.offers)


def _digests(letters: Mapping[str, Envelope]) -> dict[str, str]:
    return {name: request_digest(guard.read_header(letter)) for name, letter in letters.items()}
