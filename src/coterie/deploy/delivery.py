"""Sending a round's messages and waiting for the answers: until all are there or, at the deadline, a quorum is.

A site that was silent last time is sent its message, but not waited for. One that fails is sent its message again, a
few times; one that is gone, when it is back: it goes on from its own disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.deploy import guard
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.joining import Joining
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope
from coterie.errors import CoterieError

AGAIN = 2  # times a message is sent again to a site that failed, though it is there
PAUSE = 1.0  # seconds before that, times the number of failures
POLL = 0.25
INVITE = 3.0
KEPT_WAITING = {"late", "replay", "wrong-round", "wrong-run"}  # says nothing about the answer still to come
Take = Callable[[str, Envelope, dict[str, Any]], bool]


@dataclass
class Delivery:
    transport: Transport
    joining: Joining
    ledger: Ledger
    rules: Rules
    out: Path
    silent: set[str]
    waiting: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)  # when a message is sent again

    def run(self, number: int, letters: dict[str, Envelope], take: Take, counted: frozenset[str], need: int) -> None:
        self.letters, self.take = letters, take
        self.waiting = set(letters)
        self._post(letters)
        until, tries, invited = self.transport.now() + self.rules.deadline, 1, self.transport.now()
        while True:
            arrived = self.transport.poll(POLL)
            for address, envelope in arrived:
                self._arrived(number, address, envelope)
            if arrived:
                self.ledger.show(self.out, self.ledger.stage())
            enough = len(self.done & counted) >= need
            if enough and not self.waiting - self.silent:
                break
            now = self.transport.now()
            self._send_again(now)
            if now >= until:
                if enough:
                    break
                if tries >= self.rules.patience:
                    raise CoterieError(
                        f"round {number}: {len(self.done & counted)} of {len(counted)} sites answered within "
                        f"{tries} times {self.rules.deadline:g} seconds, and {need} are needed; "
                        f"'coterie flower resume {self.out}' goes on when they are back"
                    )
                tries, until = tries + 1, now + self.rules.deadline
                self.failures.clear()
                self.due.clear()
                self.waiting = set(letters) - self.done
                self._post({name: letters[name] for name in self.waiting})
            if now - invited >= INVITE:
                invited = now
                self.joining.invite()
        for name in letters:
            if name not in self.done:
                self.ledger.sites[name].state = "silent" if name in self.waiting else self.ledger.sites[name].state
        self.silent.clear()
        self.silent.update(self.waiting)

    def _post(self, letters: dict[str, Envelope]) -> None:
        there = {name: letter for name, letter in letters.items() if name in self.joining.addresses}
        self.transport.post({self.joining.addresses[name]: letter for name, letter in there.items()})
        for name, letter in there.items():
            standing = self.ledger.sites[name]
            standing.state, standing.bytes_down = "working", standing.bytes_down + letter.nbytes
        self.silent.update(letters.keys() - there.keys())
        self.ledger.show(self.out, self.ledger.stage())

    def _arrived(self, number: int, address: str, envelope: Envelope | None) -> None:
        name = self.joining.name_at(address)
        if envelope is None:
            self.joining.failed(address)
            if name in self.waiting:
                self._failed(name, "failed")
            return
        try:
            header = guard.read_header(envelope)
            if header["kind"] == "joined":
                before = dict(self.joining.addresses)
                back = self.joining.take(address, envelope, header, members=True)
                if back in self.waiting and before.get(back) != address:
                    self._post({back: self.letters[back]})
                return
            if name is None or header["from"] != name:
                raise Refused("wrong-sender", f"'{header['from']}' does not speak from there")
            guard.verify(envelope, header, self.ledger.keys[name])
            standing = self.ledger.sites[name]
            standing.bytes_up, standing.seen = standing.bytes_up + envelope.nbytes, time.time()
            self.silent.discard(name)
            if self.take(name, envelope, header):
                self.waiting.discard(name)
                self.done.add(name)
                standing.state = "answered"
        except Refused as refused:
            self._refuse(number, name, refused)

    def _refuse(self, number: int, name: str | None, refused: Refused) -> None:
        self.joining.say(
            f"round {number}: refused a message of {name or 'an unknown site'} ({refused.code}): {refused}"
        )
        if name is None:
            return
        self.ledger.sites[name].refuse(refused.code)
        if refused.code == "state-lost" and self.ledger.base.get(name, 0):
            self.ledger.base[name] = 0  # from the next round on it takes part as one that is new
        if refused.code not in KEPT_WAITING and name in self.waiting:
            self.ledger.sites[name].state = f"refused: {refused.code}"
            self.waiting.discard(name)

    def _failed(self, name: str, state: str) -> None:
        self.ledger.sites[name].state = state
        self.failures[name] = self.failures.get(name, 0) + 1
        self.due[name] = self.transport.now() + PAUSE * self.failures[name]

    def _send_again(self, now: float) -> None:
        late = [name for name, when in self.due.items() if when <= now]
        reachable = self.transport.addresses() if late else set()
        for name in late:
            del self.due[name]
            if name not in self.waiting or self.joining.addresses.get(name) not in reachable:
                continue  # gone: when it is back, it joins again, and is sent its message then
            if self.failures[name] <= AGAIN:
                self._post({name: self.letters[name]})
            else:
                self.waiting.discard(name)
