"""Before a round among peers who ask each other, the relay learns who asks whom, and fetches what the owners offer.

    ask      to those who train or evaluate; answered with names
    offer    to those named, with their mail of the last rounds and the names of who asks; answered with sealed offers

The offers go out with the message of the round itself. Neither message changes a site's state, so both can be repeated.
A site that does not reply in time is not asked, or asks nobody, in this round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coterie.core.tree import Tree
from coterie.deploy import guard, messages
from coterie.deploy.delivery import Take
from coterie.deploy.intake import check_complaints, check_reply, letter_sizes
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromSite
from coterie.deploy.refused import Refused
from coterie.deploy.relay import Letter
from coterie.deploy.schema import Complaint
from coterie.deploy.wire import Envelope, as_bytes

Deliver = Callable[[Mapping[str, messages.Work], Mapping[str, bytes], Take], None]  # sends, and passes the answers on


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
    refused: dict[str, tuple[Complaint, ...]] = field(default_factory=dict)  # about mail that they read

    def ask(self, asked: Mapping[str, messages.Ask], deliver: Deliver) -> None:
        """Learn who asks whom."""

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            asks = check_reply(self.ledger, self.round, message, messages.Asks, asked.get(name)).asks
            guard.open_body(envelope, {})
            if len({*asks}) < len(asks) or not {*asks} <= {*self.near[name]}:
                raise Refused("wrong-receiver", "it asks sites that are not neighbours, or one of them twice")
            for owner in asks:
                if name not in self.askers.setdefault(owner, []):
                    self.askers[owner].append(name)
            return True

        deliver(asked, {}, take)

    def fetch(self, asked: Mapping[str, messages.Offer], bodies: Mapping[str, bytes], deliver: Deliver) -> None:
        """Collect what the owners offer to those who asked."""

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            offers = check_reply(self.ledger, self.round, message, messages.Offers, asked.get(name))
            if sorted(to for to, _ in offers.mail) != sorted(self.askers[name]):
                raise Refused("wrong-receiver", "offers for sites that did not ask")
            if name in self.caught_up:
                raise Refused("replay")
            check_complaints(offers.refused, asked[name])
            sizes = letter_sizes([size for _, size in offers.mail], self.form)
            content = guard.open_body(envelope, {"mail": sizes})["mail"]
            for i, (to, _) in enumerate(offers.mail):
                self.offers.append(Letter(self.round, name, to, as_bytes(content[str(i)])))
            self.caught_up.add(name)
            self.refused[name] = offers.refused
            return True

        deliver(asked, bodies, take)

    def of(self, receiver: str) -> list[Letter]:
        """Return the offers for a site, in the order of their senders."""
        return sorted((each for each in self.offers if each.receiver == receiver), key=lambda each: each.sender)

    @property
    def nbytes(self) -> int:
        return sum(len(each.data) for each in self.offers)
