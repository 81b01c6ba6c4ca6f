"""Who takes part: addresses become names. A site says who it is and signs it; its name then belongs to its key."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.deploy import guard, seal
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.facts import Declaration
from coterie.deploy.guard import SERVER
from coterie.deploy.keys import Identity, same_key
from coterie.deploy.ledger import Ledger, Standing
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope
from coterie.errors import CoterieError

AGAIN = 300.0  # seconds until an address that said nothing is asked once more; each time costs it a process


@dataclass
class Joining:
    ledger: Ledger
    transport: Transport
    identity: Identity
    known: Mapping[str, str]
    rules: Rules
    say: Callable[[str], None]
    addresses: dict[str, str] = field(default_factory=dict)  # {name: address}
    asked: dict[str, float] = field(default_factory=dict)  # {address: when}

    def name_at(self, address: str) -> str | None:
        return next((name for name, at in self.addresses.items() if at == address), None)

    def invite(self) -> None:
        """Ask those whose name is not known; an address has a name of its own to be asked by."""
        now = self.transport.now()
        reachable = self.transport.addresses()
        self.addresses = {name: at for name, at in self.addresses.items() if at in reachable}
        new = [
            address
            for address in sorted(reachable - set(self.addresses.values()))
            if now - self.asked.get(address, -AGAIN) >= AGAIN
        ]
        if not new:
            return
        route = {"run": self.ledger.run, "life": self.ledger.life, "round": 0, "from": SERVER, "to": "", "kind": "join"}
        letter = guard.seal_header({**route, "server": self.identity.public}, b"", self.identity)
        self.asked |= dict.fromkeys(new, now)
        self.transport.post(dict.fromkeys(new, letter))

    def failed(self, address: str) -> None:
        """No answer will come from there: it may be asked again."""
        self.asked.pop(address, None)

    def take(self, address: str, envelope: Envelope, header: dict[str, Any], members: bool) -> str:
        """The name that joined from `address`. With `members`, the federation is complete: no new names."""
        name: str = header["from"]
        card = seal.check_card(name, header.get("card"), self.known, self.ledger.cards)
        if self.known and name not in self.known:
            raise Refused("unknown-site", f"there is no key for '{name}'")
        if name == SERVER or (self.rules.names and name not in self.rules.names):
            raise Refused("unknown-site", f"'{name}' is not expected")
        if members and name not in self.ledger.declared:
            raise Refused("unknown-site", f"'{name}' was not there when the federation began")
        guard.verify(envelope, header, self.ledger.keys.get(name, card["key"]))
        if header["run"] != self.ledger.run or header["life"] != self.ledger.life or header["to"] != SERVER:
            raise Refused("wrong-run")
        declared = Declaration.read(header.get("declares"))
        if name in self.ledger.declared and self.ledger.declared[name] != declared:
            raise Refused("unlike", f"'{name}' declares other data than when it joined")
        if name not in self.ledger.keys or same_key(self.ledger.keys[name], card["key"]):
            self.ledger.keys[name] = card["key"]
            if self.ledger.cards.get(name, {}).get("exchange") != card["exchange"]:  # a proof is never the same twice
                self.ledger.cards[name] = card
            self.ledger.declared.setdefault(name, declared)
            self.ledger.sites.setdefault(name, Standing()).seen = time.time()
            self.addresses[name] = address
        return name

    def wait(self, out: Path) -> None:
        """Until all expected sites are there. Going on with a run, a quorum of its members is enough."""
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
                    header = guard.read_header(envelope)
                    if header["kind"] == "refused":
                        raise Refused("failed", f"code {header.get('code')}")
                    if header["kind"] != "joined":
                        continue
                    name = self.take(address, envelope, header, bool(members))
                    self.say(f"{name} joined, {len(self.addresses)} of {expected}")
                except Refused as error:
                    refused[address] = f"{error.code}: {error}"
            self.ledger.show(out, f"waiting for sites: {len(self.addresses)} of {expected}")
            if self.transport.now() >= until:
                enough = members and len(self.addresses) >= max(1, self.rules.quorum * expected)
                if enough:
                    break
                told = "".join(f"; one was refused ({words})" for words in refused.values())
                raise CoterieError(
                    f"{len(self.addresses)} of {expected} sites joined within {self.rules.joining:g} seconds "
                    f"({', '.join(self.addresses) or 'none'}){told}"
                )
        if not members:
            order = self.rules.names or sorted(self.ledger.declared, key=natural)
            self.ledger.declared = {name: self.ledger.declared[name] for name in order}
            self.ledger.sites = {name: self.ledger.sites[name] for name in order}


def natural(name: str) -> tuple[Any, ...]:
    """client-2 comes before client-10."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name))
