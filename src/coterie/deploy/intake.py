"""Accepts the answers of a round after checking them against what was asked, or refuses them with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from coterie.core import routes
from coterie.core.routes import Addressed
from coterie.core.tree import Tree
from coterie.deploy import guard, peer_mail, wire
from coterie.deploy.guard import SERVER
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import CODES, Refused
from coterie.deploy.wire import Envelope, as_bytes
from coterie.methods.fields import AnyMethod


class Answer(NamedTuple):
    """The content of an accepted answer."""

    up: Tree
    info: Tree
    alone_info: Tree
    metrics: Mapping[str, Any]  # {"own": {part: {metric: number}}, "alone": ...}
    mail: Mapping[str, bytes]  # {neighbour: sealed letter}
    refused: list[list[Any]]  # mail of other peers that the site refused: [round, sender, code]


@dataclass(frozen=True)
class Forms:
    """The expected form of an answer to a training message."""

    up: Tree
    info: Tree
    alone_info: Tree
    near: Mapping[str, tuple[str, ...]] | None  # each site's neighbours; None with a server
    offer: Tree = None  # the form of what a peer gives to those who ask; None if nobody asks


@dataclass
class Intake:
    """Collects the answers of one round."""

    ledger: Ledger
    method: AnyMethod
    server: Tree  # the state before aggregation
    round: int
    asked: Mapping[str, str]  # {site: digest of its request}
    training: frozenset[str]
    forms: Forms
    norm_bound: float
    answers: dict[str, Answer] = field(default_factory=dict)

    def take(self, sender: str, envelope: Envelope, header: dict[str, Any]) -> None:
        """Accept an answer whose address and signature are verified; raise `Refused` if it is invalid."""
        if sender in self.answers:
            raise Refused("replay")
        check_reply(self.ledger, self.round, header, "answer", self.asked.get(sender))
        self.answers[sender] = self._open(sender, envelope, header)

    def _open(self, sender: str, envelope: Envelope, header: dict[str, Any]) -> Answer:
        metrics = header.get("metrics", {})
        if not isinstance(metrics, dict) or not metrics.keys() <= {"own", "alone"}:
            raise Refused("bad-header", "metrics that cannot be read")
        metrics = {who: guard.check_metrics(by) for who, by in metrics.items()}
        refused = complaints(header.get("refused", []))
        if sender not in self.training:
            guard.open_body(envelope, {})
            return Answer((), {}, {}, metrics, {}, refused)
        form: dict[str, Tree] = {"info": self.forms.info, "alone_info": self.forms.alone_info}
        letters: list[str] = []
        if self.forms.near is None:
            form["up"] = self.forms.up
        else:
            letters, form["mail"] = self._letters(sender, header)
        content = guard.open_body(envelope, form)
        guard.check_finite((content["info"], content["alone_info"]))
        if self.forms.near is None:
            guard.check_message(self.method, content["up"], self.ledger.declared[sender].train, self.norm_bound)
            guard.check_combines(self.method, self.server, list(self.ledger.declared).index(sender), content["up"])
        mail = {to: as_bytes(content["mail"][str(i)]) for i, to in enumerate(letters)}
        return Answer(content.get("up", ()), content["info"], content["alone_info"], metrics, mail, refused)

    def _letters(self, sender: str, header: dict[str, Any]) -> tuple[list[str], Tree]:
        assert self.forms.near is not None
        listed = mail_list(header)
        to, near = sorted(to for to, _ in listed), sorted(self.forms.near[sender])
        some = isinstance(self.forms.up, Addressed) and len(set(to)) == len(to) and set(to) <= set(near)
        if to != near and not some:
            raise Refused("wrong-receiver", "mail for sites that are not neighbours")
        return [to for to, _ in listed], letter_sizes([size for _, size in listed], routes.letter_form(self.forms.up))


def mail_list(header: dict[str, Any]) -> list[tuple[str, int]]:
    """Check and return whom the letters in an envelope are for, and their sizes."""
    listed = header.get("mail")
    right = isinstance(listed, list) and all(
        isinstance(each, list) and len(each) == 2 and type(each[0]) is str and type(each[1]) is int for each in listed
    )
    if not right:
        raise Refused("bad-header", "the list of mail cannot be read")
    return [(to, size) for to, size in header["mail"]]


def letter_sizes(sizes: list[int], form: Tree) -> Tree:
    """Return the form of mail of these sizes; raise `Refused` if a letter with content of `form` cannot be so large."""
    most = wire.limit(form) + peer_mail.SEAL_OVERHEAD_BYTES
    if any(not 0 <= size <= most for size in sizes):
        raise Refused("too-large", f"mail of more than {most} bytes")
    return {str(i): torch.empty(size, dtype=torch.uint8, device="meta") for i, size in enumerate(sizes)}


def check_reply(ledger: Ledger, round: int, header: dict[str, Any], kind: str, request: str | None) -> None:
    """Check that a reply is of this kind, and that it replies to `request` (a digest) of the open round."""
    if header["run"] != ledger.run:
        raise Refused("wrong-run", f"run '{header['run']}'")
    if header["to"] != SERVER:
        raise Refused("wrong-receiver", f"for '{header['to']}'")
    if header["round"] < round:
        raise Refused("late", f"for round {header['round']}, but round {round} is open")
    if header["round"] > round:
        raise Refused("wrong-round", f"for round {header['round']}, but round {round} is open")
    if header["life"] != ledger.life:
        raise Refused("replay")
    if header["kind"] == "refused":
        code = str(header.get("code"))
        raise Refused(code if code in CODES else "failed", f"the site refused: {CODES.get(str(code), 'unknown')}")
    if header["kind"] != kind or header.get("request") != request:
        raise Refused("wrong-round", "it does not answer the request of this round")


def complaints(listed: Any) -> list[list[Any]]:
    """Check and return a site's list of refused mail, [round, sender, code]."""
    right = isinstance(listed, list) and all(
        isinstance(each, list) and [type(part) for part in each] == [int, str, str] and each[2] in CODES
        for each in listed
    )
    if not right:
        raise Refused("bad-header", "refusals that cannot be read")
    return list(listed)
