"""The server's part in a secure sum: who has masks with whom, and the sum of the messages without its masks.

    keys, shares    of the sampled sites; who does not answer is as if it had not been sampled
    round           the masked messages of those who shared; who does not answer then leaves masks behind
    unmask          t of those who answered give the seeds of all of them, and the keys of those who did not

Between the last two, the sum of the masked messages and the rest of the answers are written to the run folder. A server
that dies then goes on with them, since sites tell no shares for another set of sites in the same round.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CheckpointError, CoterieError
from coterie.core.tree import Tree
from coterie.deploy import guard, keys, messages
from coterie.deploy.contract import Rules
from coterie.deploy.delivery import Take
from coterie.deploy.intake import Answer, check_reply
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromServer, FromSite, Masking, Member
from coterie.deploy.refused import Refused
from coterie.deploy.secure import masks, shamir
from coterie.deploy.secure.agreement import LEAST_SITES, Form, threshold
from coterie.deploy.secure.at_site import LETTER_BYTES, claim
from coterie.deploy.secure.fixed_point import Words
from coterie.deploy.secure.masks import Session
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.storage import files

# Sends messages and bodies, and passes the answers on; the last two are who must answer, and how many of these.
Deliver = Callable[[Mapping[str, FromServer], Mapping[str, bytes], Take, frozenset[str], int], None]
Route = Callable[[str], dict[str, Any]]  # what a message to a site begins with


@dataclass
class SecureSum:
    """One round's secure sum."""

    ledger: Ledger
    rules: Rules
    form: Form
    session: Session
    route: Route
    out: Path  # the run folder
    roster: dict[str, Member] = field(default_factory=dict)
    letters: dict[str, Tensor] = field(default_factory=dict)  # {sender: a row for each other site of the roster}
    letter_bytes: int = 0  # of all letters
    senders: tuple[str, ...] = ()  # who have masks with each other
    heard: tuple[str, ...] = ()  # who sent a masked message
    total: Words | None = None  # the sum of their masked messages
    answers: dict[str, Answer] = field(default_factory=dict)  # what else was answered
    seeds: dict[str, dict[int, bytes]] = field(default_factory=dict)  # shares by name and number of the holder
    keys: dict[str, dict[int, bytes]] = field(default_factory=dict)

    @property
    def least(self) -> int:
        """How many must still be there."""
        return threshold(len(self.roster), self.rules.threshold)

    @property
    def nbytes(self) -> int:
        """The bytes of what sites send: masked messages and shares."""
        return masks.WORD_BYTES * self.form.length * len(self.heard) + self.letter_bytes

    def agree(self, names: list[str], deliver: Deliver, quorum: int) -> None:
        """Collect the keys of these sites, and their shares; `senders` are those who gave both."""
        asked = {name: messages.Keys(**self.route(name), session=self.session.id) for name in names}

        def take_key(name: str, envelope: Envelope, message: FromSite) -> bool:
            key = check_reply(self.ledger, self.session.round, message, messages.Key, asked.get(name))
            guard.open_body(envelope, {})
            if name in self.roster:
                raise Refused("replay")
            card = self.ledger.cards[name]
            if not keys.verified(card.key, bytes.fromhex(key.proof), claim(self.session, name, key.public, key.seed)):
                raise Refused("bad-signature", "its keys for masks are not signed by it")
            if key.public in {each.public for each in self.roster.values()}:
                raise Refused("masks", "it has the same key as another site")
            self.roster[name] = Member(card=card, public=key.public, seed=key.seed, proof=key.proof)
            return True

        deliver(asked, {}, take_key, frozenset(asked), max(quorum, LEAST_SITES))
        roster = dict(sorted(self.roster.items()))
        self.roster = roster
        share = {name: messages.Shares(**self.route(name), session=self.session.id, roster=roster) for name in roster}
        blank = {"letters": torch.zeros(len(roster) - 1, LETTER_BYTES, dtype=torch.uint8)}

        def take_shares(name: str, envelope: Envelope, message: FromSite) -> bool:
            check_reply(self.ledger, self.session.round, message, messages.Shared, share.get(name))
            if name in self.letters:
                raise Refused("replay")
            self.letters[name] = guard.open_body(envelope, blank)["letters"]
            return True

        deliver(share, {}, take_shares, frozenset(share), self.least)
        self.senders = tuple(sorted(self.letters))
        self.letter_bytes = sum(each.nbytes for each in self.letters.values())

    def masking(self, name: str) -> tuple[Masking, Tensor]:
        """Return with whom a site has masks, and the others' letters to it."""
        others = [each for each in self.senders if each != name]
        rows = [self.letters[each][sorted(self.roster.keys() - {each}).index(name)] for each in others]
        return Masking(session=self.session.id, senders=self.senders), torch.stack(rows)

    def close(self, answers: Mapping[str, Answer]) -> None:
        """Add up the masked messages in these answers; single ones are not kept."""
        self.heard = tuple(name for name in self.senders if name in answers)
        words = (answers[name].up["masked"].numpy().view(np.uint64) for name in self.heard)
        self.total = masks.total(words, self.form.length)
        self.answers = {name: answer._replace(up=()) for name, answer in answers.items()}

    def unmask(self, deliver: Deliver, examples: Mapping[str, int]) -> dict[str, Answer]:
        """Return the answers of the round, with the message that stands for each as everybody's.

        Raises:
            CoterieError: the sum is not one of true messages.
        """
        asked = {
            name: messages.Unmask(**self.route(name), session=self.session.id, heard=self.heard) for name in self.heard
        }
        holders = {name: number for number, name in enumerate(self.roster, 1)}

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            told = check_reply(self.ledger, self.session.round, message, messages.Unmasked, asked.get(name))
            guard.open_body(envelope, {})
            if not told.seeds.keys() <= {*self.heard} or not told.keys.keys() <= {*self.senders} - {*self.heard}:
                raise Refused("masks", "shares that it was not asked for")
            for kept, given in ((self.seeds, told.seeds), (self.keys, told.keys)):
                for other, share in given.items():
                    kept.setdefault(other, {})[holders[name]] = bytes.fromhex(share)
            return True

        deliver(asked, {}, take, frozenset(asked), self.least)
        try:
            up = self.form.decode(self._without_masks(), [examples[name] for name in self.heard], self.rules.norm_bound)
        except Refused as refused:
            raise CoterieError(
                f"round {self.session.round}: the messages of {', '.join(self.heard)} do not add up to one that can be "
                f"({refused}). One of them sent something else, and secure sums hide who: begin a new run without it"
            ) from refused
        return {name: answer._replace(up=up) if name in self.heard else answer for name, answer in self.answers.items()}

    def _without_masks(self) -> Words:
        assert self.total is not None
        found, length = self.total, self.form.length
        for name in self.heard:
            committed = partial(masks.commitment, self.session, name)
            seed = self._secret(name, self.seeds, committed, self.roster[name].seed)
            found = found - masks.stream(masks.seed_key(self.session, name, seed), length)
        public = {name: bytes.fromhex(self.roster[name].public) for name in self.heard}
        for name in [each for each in self.senders if each not in self.heard]:
            secret = self._secret(name, self.keys, masks.public_half, self.roster[name].public)
            found = found + masks.between(self.session, secret, name, public, length)  # the others' are its negative
        return found

    def _secret(
        self,
        name: str,
        told: Mapping[str, Mapping[int, bytes]],
        public: Callable[[bytes], bytes],
        expected: str,
    ) -> bytes:
        """Return a secret from `least` of its shares; if one of these is wrong, from others."""
        shares = told.get(name, {})
        order = sorted(shares)
        for start in range(len(order)) if len(order) >= self.least else ():
            some = [order[(start + i) % len(order)] for i in range(self.least)]
            with contextlib.suppress(ValueError):
                secret = shamir.combine({each: shares[each] for each in some})
                if public(secret).hex() == expected:
                    return secret
        raise CoterieError(
            f"round {self.session.round}: the masks of '{name}' cannot be recovered: {self.least} right shares are "
            f"needed, and {len(order)} sites told one; continue when more are back: coterie flower resume {self.out}"
        )

    def save(self) -> None:
        """Write what is needed to go on after `close`."""
        assert self.total is not None
        about = {
            "session": self.session.id,
            "roster": {name: member.model_dump() for name, member in self.roster.items()},
            "senders": self.senders,
            "heard": self.heard,
            "answers": {
                name: {"metrics": answer.metrics, "refused": answer.refused} for name, answer in self.answers.items()
            },
            "letter_bytes": self.letter_bytes,
        }
        content: dict[str, Tree] = {
            "about": as_leaf(json.dumps(about).encode()),
            "total": torch.from_numpy(self.total.view(np.int64)),
            "answers": {
                str(i): {"info": answer.info, "alone_info": answer.alone_info}
                for i, answer in enumerate(self.answers.values())
            },
        }
        files.write_checked(_file(self.out, self.session.round), tree.pack(content))

    def resume(self, info: Tree, alone_info: Tree) -> bool:
        """Read what `save` wrote for this round, if it did; `info` and `alone_info` are the forms of sites' numbers."""
        path = _file(self.out, self.session.round)
        if not path.exists():
            return False
        flat = files.read_checked(path)
        try:
            about = json.loads(as_bytes(flat["about"]))
            self.session = self.session._replace(id=about["session"])
            self.roster = {name: Member.model_validate(each) for name, each in about["roster"].items()}
            self.senders, self.heard = tuple(about["senders"]), tuple(about["heard"])
            self.letter_bytes = int(about["letter_bytes"])
            self.total = flat["total"].numpy().view(np.uint64)
            for i, (name, rest) in enumerate(about["answers"].items()):
                told = name in self.heard
                form = {"info": info, "alone_info": alone_info} if told else {"info": {}, "alone_info": {}}
                prefix = f"answers/{i}/"
                mine = {key.removeprefix(prefix): leaf for key, leaf in flat.items() if key.startswith(prefix)}
                numbers = tree.unpack(mine, form)
                refused = tuple((round, sender, code) for round, sender, code in rest["refused"])
                self.answers[name] = Answer((), numbers["info"], numbers["alone_info"], rest["metrics"], {}, refused)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"'{path}' does not fit this run: {error}") from error
        return True


def drop_files(out: Path) -> None:
    """Delete what was kept of sums that are done."""
    for path in out.glob("secure-*.safetensors"):
        path.unlink(missing_ok=True)


def new_session(ledger: Ledger, round: int) -> Session:
    """Begin a session, which no site has taken part in."""
    return Session(ledger.run, round, secrets.token_hex(16))


def _file(out: Path, round: int) -> Path:
    return out / f"secure-{round:05d}.safetensors"
