"""A site's part in a secure sum: keys, shares for the others, a masked message, and shares of what is left in the sum.

    keys      -> public half of s_i, commitment to b_i, signed        new for every session
    shares    -> shares of s_i and b_i, sealed to each other site     if at least three, itself among them, have signed
    round     -> y_i                                                  with masks of those whose shares arrived
    unmask    -> its shares of b_j or of s_j, for every j             once in a round, and if at least t were heard

All that a site must remember of it is in one file of its store, so that it can be killed and repeat its answers. A
session is one attempt of the server at a round. Once the site has told shares in a round, it takes part in no other
session of this round, and tells no shares for another set of sites: the difference of two sums would be a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Literal

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import Field
from torch import Tensor

from coterie.core.errors import CheckpointError
from coterie.deploy import keys, messages, seal, wire
from coterie.deploy.keys import Identity
from coterie.deploy.messages import MAX_MASKED, Masking, Member, Share
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Digest, Name, RoundNumber, Run, Strict
from coterie.deploy.seal import Card, Route
from coterie.deploy.secure import masks, shamir
from coterie.deploy.secure.agreement import LEAST_SITES, threshold
from coterie.deploy.secure.fixed_point import Words
from coterie.deploy.secure.masks import Session
from coterie.deploy.wire import as_bytes, as_leaf
from coterie.storage import files

FILE = "masks.json"
LETTER_BYTES = 2 * shamir.SHARE_BYTES + seal.OVERHEAD_BYTES
Pair = tuple[Share, Share]  # shares of b and of s


class Kept(Strict):
    """What a site remembers of the last session."""

    run: Run
    round: RoundNumber
    session: messages.Session
    secret: Digest  # s_i
    seed: Digest  # b_i
    roster: dict[Name, Member] = Field(default_factory=dict)
    own: dict[Name, Pair] = Field(default_factory=dict)  # shares of this site's secrets, for each holder
    senders: Annotated[tuple[Name, ...], Field(max_length=MAX_MASKED)] = ()  # with whom the sent message has masks
    sent: Digest | Literal[""] = ""  # of the message under them
    held: dict[Name, Pair] = Field(default_factory=dict)  # shares of others' secrets
    heard: tuple[Name, ...] = ()  # for whom shares were told

    @property
    def about(self) -> Session:
        return Session(self.run, self.round, self.session)


def claim(session: Session, name: str, public: str, seed: str) -> bytes:
    """Return what a site signs when it offers its keys for masks."""
    return session.text("keys", name, public, seed)


class SiteMasks:
    """The masks of one site in one run; `folder` is where the site keeps what it has of that run."""

    def __init__(self, folder: Path, name: str, identity: Identity, share: float) -> None:
        self.path, self.name, self.identity, self.share = folder / FILE, name, identity, share

    def keys(self, message: messages.Keys) -> tuple[str, str, str]:
        """Make new keys for a session, or repeat them; return public half, commitment and proof."""
        kept = self._kept()
        if kept is None or kept.session != message.session:
            if kept is not None and (message.round < kept.round or (message.round == kept.round and kept.heard)):
                raise Refused("masks", f"the masks of round {kept.round} were told already")
            secret, seed = token_bytes(shamir.SECRET_BYTES).hex(), token_bytes(shamir.SECRET_BYTES).hex()
            kept = Kept(run=message.run, round=message.round, session=message.session, secret=secret, seed=seed)
            self._keep(kept)
        public = masks.public_half(bytes.fromhex(kept.secret)).hex()
        seed = masks.commitment(kept.about, self.name, bytes.fromhex(kept.seed)).hex()
        return public, seed, self.identity.sign(claim(kept.about, self.name, public, seed)).hex()

    def shares(
        self, message: messages.Shares, exchange: X25519PrivateKey, known: Mapping[str, str], pinned: dict[str, Card]
    ) -> Tensor:
        """Share this site's secrets among the sites of the roster; return sealed letters for the others, one a row.

        Args:
            message: the roster.
            exchange: this site's key for mail.
            known: public keys that the site was given.
            pinned: cards that it has seen before, to which new ones are added.
        """
        kept = self._of(message.run, message.round, message.session)
        if kept.roster and kept.roster != message.roster:
            raise Refused("masks", "another roster for the same session")
        if not kept.roster:
            self._check_roster(kept, message.roster, known, pinned)
            names = sorted(message.roster)
            least = threshold(len(names), self.share)
            both = [shamir.split(bytes.fromhex(each), len(names), least) for each in (kept.seed, kept.secret)]
            own = {name: (both[0][i].hex(), both[1][i].hex()) for i, name in enumerate(names)}
            kept = kept.model_copy(update={"roster": message.roster, "own": own})
            self._keep(kept)
        letters = []
        for name in sorted(kept.roster.keys() - {self.name}):
            data = bytes.fromhex("".join(kept.own[name]))
            route = self._route(kept, self.name, name)
            letters.append(as_leaf(seal.seal(data, exchange, kept.roster[name].card.exchange, route)))
        return torch.stack(letters)

    def masked(
        self, round: messages.Round, masking: Masking, letters: Tensor, exchange: X25519PrivateKey, words: Words
    ) -> Tensor:
        """Return this site's words under all its masks, and keep the shares in the others' letters."""
        kept = self._of(round.run, round.round, masking.session)
        senders = masking.senders
        if len({*senders}) < len(senders) or self.name not in senders or not {*senders} <= kept.roster.keys():
            raise Refused("masks", "other sites than those of the roster")
        sent = wire.digest(words.tobytes())
        if kept.heard or (kept.sent and (kept.senders, kept.sent) != (senders, sent)):
            raise Refused("masks", "the masks of this session were used already")  # twice, they tell a difference
        least = threshold(len(kept.roster), self.share)
        if len(senders) < least:
            raise Refused("masks", f"{len(senders)} of {len(kept.roster)} sites, where {least} are needed")
        others = [name for name in senders if name != self.name]
        held = {self.name: kept.own[self.name]}
        for name, letter in zip(others, letters, strict=True):
            opened = self._opened(kept, name, as_bytes(letter), exchange)
            held |= {} if opened is None else {name: opened}
        self._keep(kept.model_copy(update={"senders": senders, "sent": sent, "held": held}))
        public = {name: bytes.fromhex(kept.roster[name].public) for name in others}
        secret, seed = bytes.fromhex(kept.secret), bytes.fromhex(kept.seed)
        found = words + masks.mask(kept.about, secret, seed, self.name, public, len(words))
        return torch.from_numpy(found.view("int64"))

    def unmask(self, message: messages.Unmask) -> tuple[dict[str, str], dict[str, str]]:
        """Return shares of the seeds of those that were heard, and shares of the keys of the other senders."""
        kept = self._of(message.run, message.round, message.session)
        heard = tuple(sorted(message.heard))
        if len({*heard}) < len(heard) or not {*heard} <= {*kept.senders} or self.name not in heard:
            raise Refused("masks", "other sites than those with whom this site has masks")
        least = threshold(len(kept.roster), self.share)
        if len(heard) < least:
            raise Refused("masks", f"a sum of {len(heard)} sites, where {least} are needed")
        if kept.heard and kept.heard != heard:
            raise Refused("masks", "shares were told for other sites in this round: both together tell a message")
        if not kept.heard:
            self._keep(kept.model_copy(update={"heard": heard}))  # before anything is told
        seeds = {name: pair[0] for name, pair in kept.held.items() if name in heard}
        secrets = {name: pair[1] for name, pair in kept.held.items() if name not in heard}
        return seeds, secrets

    def forget(self) -> None:
        """Delete the secrets of the last session."""
        self.path.unlink(missing_ok=True)

    def _check_roster(
        self, kept: Kept, roster: Mapping[str, Member], known: Mapping[str, str], pinned: dict[str, Card]
    ) -> None:
        own = masks.public_half(bytes.fromhex(kept.secret)).hex()
        if self.name not in roster or roster[self.name].public != own:
            raise Refused("masks", "the roster has another key for this site")
        if len(roster) < LEAST_SITES:
            raise Refused("masks", f"a roster of {len(roster)} sites, where {LEAST_SITES} are needed")
        if len({each.public for each in roster.values()}) < len(roster):
            raise Refused("masks", "two sites of the roster have the same key")
        for name, member in roster.items():
            if known and name not in known and name != self.name:
                raise Refused("unknown-site", f"there is no key for '{name}'")
            seal.check_card(name, member.card, known, pinned)
            signed = claim(kept.about, name, member.public, member.seed)
            if not keys.verified(member.card.key, bytes.fromhex(member.proof), signed):
                raise Refused("bad-signature", f"the keys for masks of '{name}' are not signed by it")
        pinned |= {name: member.card for name, member in roster.items()}

    def _opened(self, kept: Kept, sender: str, letter: bytes, exchange: X25519PrivateKey) -> Pair | None:
        """Return the shares in a letter; None if it cannot be opened, and then the other holders have to do."""
        route = self._route(kept, sender, self.name)
        try:
            data = seal.unseal(letter, exchange, kept.roster[sender].card.exchange, route)
        except Refused:
            return None
        return data[: shamir.SHARE_BYTES].hex(), data[shamir.SHARE_BYTES :].hex()

    def _route(self, kept: Kept, sender: str, receiver: str) -> Route:
        return Route(kept.run, kept.round, sender, receiver, f"shares {kept.session}")

    def _of(self, run: str, round: int, session: str) -> Kept:
        kept = self._kept()
        if kept is None or (kept.run, kept.round, kept.session) != (run, round, session):
            raise Refused("masks", f"this site has no masks of that session of round {round}")
        return kept

    def _kept(self) -> Kept | None:
        try:
            return Kept.model_validate_json(self.path.read_bytes()) if self.path.exists() else None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"'{self.path}' cannot be read; without it, the site takes part again: {error}"
            ) from error

    def _keep(self, kept: Kept) -> None:
        files.write_text(self.path, kept.model_dump_json() + "\n")
