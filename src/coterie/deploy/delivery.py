"""Sends a round's messages and waits for the answers: for all or, after the deadline, for a quorum.

A site that did not answer last time gets its message, but is not waited for. A site that fails gets its message again a
few times. A site that is gone gets it when it is back, and continues from its own disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.deploy import guard
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.joining import Joining
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromSite, Joined
from coterie.deploy.refused import Refused
from coterie.deploy.wire import Envelope

MAX_RESENDS = 2  # to a site that fails although it is reachable
RESEND_PAUSE_SECONDS = 1.0  # times the number of failures
POLL_SECONDS = 0.25
INVITE_EVERY_SECONDS = 3.0
STILL_WAITING = {"late", "replay", "wrong-round", "wrong-run"}  # codes that say nothing about the answer still to come
MAX_REFUSALS_SAID = 20  # about one site, in one round; all are counted
Take = Callable[[str, Envelope, FromSite], bool]


@dataclass
class Delivery:
    """The delivery of one round's messages."""

    transport: Transport
    joining: Joining
    ledger: Ledger
    rules: Rules
    out: Path
    silent: set[str]
    waiting: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)  # when to send a message again
    refusals: Counter[str | None] = field(default_factory=Counter)  # of messages of a site in this round

    def run(self, number: int, letters: dict[str, Envelope], take: Take, counted: frozenset[str], need: int) -> None:
        """Send all messages, and return when the round may close.

        Args:
            number: The round.
            letters: The message for each site.
            take: Handles an answer, (site, envelope, message); returns whether the site is done.
            counted: The sites that count for the quorum.
            need: How many of them must answer.

        Raises:
            CoterieError: There is no quorum after all deadlines.
        """
        self.letters, self.take = letters, take
        self.waiting = set(letters)
        self._post(letters)
        until, tries, invited = self.transport.now() + self.rules.deadline, 1, self.transport.now()
        while True:
            arrived = self.transport.poll(POLL_SECONDS)
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
                        f"{tries} x {self.rules.deadline:g} seconds, but {need} must; continue when they are back: "
                        f"coterie flower resume {self.out}"
                    )
                tries, until = tries + 1, now + self.rules.deadline
                self.failures.clear()
                self.due.clear()
                self.waiting = set(letters) - self.done
                self._post({name: letters[name] for name in self.waiting})
            if now - invited >= INVITE_EVERY_SECONDS:
                invited = now
                self.joining.invite()
        for name in letters:
            if name not in self.done:
                self.ledger.sites[name].state = "silent" if name in self.waiting else self.ledger.sites[name].state
        self.silent.difference_update(letters)  # of others, nothing new is known
        self.silent.update(self.waiting)

    def _post(self, letters: dict[str, Envelope]) -> None:
        there = {name: letter for name, letter in letters.items() if name in self.joining.addresses}
        self.transport.post({self.joining.addresses[name]: letter for name, letter in there.items()})
        for name, letter in there.items():
            status = self.ledger.sites[name]
            status.state, status.bytes_down = "working", status.bytes_down + letter.nbytes
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
            message = guard.read_at_server(envelope)
            if isinstance(message, Joined):
                before = dict(self.joining.addresses)
                back = self.joining.take(address, envelope, message, members=True)
                if back in self.waiting and before.get(back) != address:
                    self._post({back: self.letters[back]})
                return
            if name is None or message.sender != name:
                raise Refused("wrong-sender", f"'{message.sender}' is not at this address")
            guard.verify(envelope, message, self.ledger.keys[name])
            status = self.ledger.sites[name]
            status.bytes_up, status.seen = status.bytes_up + envelope.nbytes, time.time()
            self.silent.discard(name)
            if self.take(name, envelope, message):
                self.waiting.discard(name)
                self.done.add(name)
                status.state = "answered"
        except Refused as refused:
            self._refuse(number, name, refused)
        except Exception as error:  # whatever one message does, it stops nobody else
            self._refuse(number, name, Refused("error", guard.place_of(error)))

    def _refuse(self, number: int, name: str | None, refused: Refused) -> None:
        self.refusals[name] += 1
        if self.refusals[name] <= MAX_REFUSALS_SAID:
            self.joining.say(
                f"round {number}: refused a message from {name or 'an unknown site'} ({refused.code}): {refused}"
            )
        if name is None:
            return
        self.ledger.sites[name].refuse(refused.code)
        if refused.code == "state-lost" and self.ledger.base.get(name, 0):
            self.ledger.base[name] = 0  # from the next round on it takes part as a new site
        if refused.code not in STILL_WAITING and name in self.waiting:
            self.ledger.sites[name].state = f"refused: {refused.code}"
            self.waiting.discard(name)

    def _failed(self, name: str, state: str) -> None:
        self.ledger.sites[name].state = state
        self.failures[name] = self.failures.get(name, 0) + 1
        self.due[name] = self.transport.now() + RESEND_PAUSE_SECONDS * self.failures[name]

    def _send_again(self, now: float) -> None:
        late = [name for name, when in self.due.items() if when <= now]
        reachable = self.transport.addresses() if late else set()
        for name in late:
            del self.due[name]
            if name not in self.waiting or self.joining.addresses.get(name) not in reachable:
                continue  # gone: when it is back, it joins again and gets its message then
            if self.failures[name] <= MAX_RESENDS:
                self._post({name: self.letters[name]})
            else:
                self.waiting.discard(name)
