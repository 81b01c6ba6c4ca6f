"""Finds out which site is at which address. A site signs its name, which then belongs to its key."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.deploy import guard, messages, seal
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.keys import Identity
from coterie.deploy.ledger import Ledger, SiteStatus
from coterie.deploy.messages import SERVER, Joined, Refusal
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope

ASK_AGAIN_SECONDS = 300.0  # until an address that did not answer is asked again; each time costs it a process


@dataclass
class Joining:
    """The sites that have joined, and their addresses."""

    ledger: Ledger
    transport: Transport
    identity: Identity
    known: Mapping[str, str]
    rules: Rules
    say: Callable[[str], None]
    addresses: dict[str, str] = field(default_factory=dict)  # {name: address}
    asked: dict[str, float] = field(default_factory=dict)  # {address: when}

    def name_at(self, address: str) -> str | None:
        """Return the name of the site at an address."""
        return next((name for name, at in self.addresses.items() if at == address), None)

    def invite(self) -> None:
        """Ask all reachable addresses without a known name who they are."""
        now = self.transport.now()
        reachable = self.transport.addresses()
        self.addresses = {name: at for name, at in self.addresses.items() if at in reachable}
        new = [
            address
            for address in sorted(reachable - set(self.addresses.values()))
            if now - self.asked.get(address, -ASK_AGAIN_SECONDS) >= ASK_AGAIN_SECONDS
        ]
        if not new:
            return
        about: dict[str, Any] = {"run": self.ledger.run, "life": self.ledger.life, "round": 0}
        join = messages.Join(**about, server=self.identity.public)
        letter = guard.sign(join, b"", self.identity)
        self.asked |= dict.fromkeys(new, now)
        self.transport.post(dict.fromkeys(new, letter))

    def failed(self, address: str) -> None:
        """Note that an address will not answer, so that it may be asked again."""
        self.asked.pop(address, None)

    def take(self, address: str, envelope: Envelope, message: Joined, members: bool) -> str:
        """Check an answer to an invitation and return the site's name; with `members`, no new sites may join."""
        name, card, ledger = message.sender, message.card, self.ledger
        seal.check_card(name, card, self.known, ledger.cards)
        if self.known and name not in self.known:
            raise Refused("unknown-site", f"there is no key for '{name}'")
        if name == SERVER or (self.rules.names and name not in self.rules.names):
            raise Refused("unknown-site", f"'{name}' is not one of the expected sites")
        if members and name not in ledger.declared:
            raise Refused("unknown-site", f"'{name}' was not a member when the federation started")
        if self.name_at(address) not in (None, name):
            raise Refused("wrong-sender", f"'{name}' is at the address of another site")
        guard.verify(envelope, message, ledger.keys.get(name, card.key))
        guard.open_body(envelope, {})
        if message.run != ledger.run or message.life != ledger.life or message.receiver != SERVER:
            raise Refused("wrong-run")
        if ledger.declared.get(name, message.declares) != message.declares:
            raise Refused("unlike", f"'{name}' declares different data than when it joined")
        ledger.keys[name] = card.key
        if name not in ledger.cards or ledger.cards[name].exchange != card.exchange:  # proofs always differ
            ledger.cards[name] = card
        ledger.declared.setdefault(name, message.declares)
        ledger.sites.setdefault(name, SiteStatus()).seen = time.time()
        self.addresses[name] = address
        return name

    def wait(self, out: Path) -> None:
        """Wait until all expected sites have joined; to resume a run, a quorum of its members is enough."""
        members = list(self.ledger.declared)
        expected = len(members) or len(self.rules.names) or self.rules.sites
        until = self.transport.now() + self.rules.joining
        refused: dict[str, str] = {}
        while len(self.addresses) < expected:
            self.invite()
            for address, envelope in self.transport.poll(1.0):
                if envelope is None:
                    self.failed(address)
                    continue
                try:
                    message = guard.read_at_server(envelope)
                    if isinstance(message, Refusal):
                        raise Refused("failed", f"code {message.code}")
                    if isinstance(message, Joined):
                        name = self.take(address, envelope, message, bool(members))
                        self.say(f"{name} joined, {len(self.addresses)} of {expected}")
                except Refused as error:
                    refused[address] = f"{error.code}: {error}"
                except Exception as error:  # whatever one message does, it stops nobody else
                    refused[address] = f"error: {guard.place_of(error)}"
            self.ledger.show(out, f"waiting for sites: {len(self.addresses)} of {expected}")
            if self.transport.now() >= until:
                enough = members and len(self.addresses) >= max(1, self.rules.quorum * expected)
                if enough:
                    break
                reasons = "".join(f"; one was refused ({words})" for words in refused.values())
                raise CoterieError(
                    f"{len(self.addresses)} of {expected} sites joined within {self.rules.joining:g} seconds "
                    f"({', '.join(self.addresses) or 'none'}){reasons}"
                )
        if not members:
            order = self.rules.names or sorted(self.ledger.declared, key=natural)
            self.ledger.declared = {name: self.ledger.declared[name] for name in order}
            self.ledger.sites = {name: self.ledger.sites[name] for name in order}


def natural(name: str) -> tuple[Any, ...]:
    """Return a sort key by which client-2 comes before client-10."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name))
