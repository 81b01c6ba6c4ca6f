"""Accepts the answers of a round after checking them against what was asked, or refuses them with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from coterie.core import routes
from coterie.core.routes import Addressed
from coterie.core.tree import Tree
from coterie.deploy import guard, messages, seal, wire
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import SERVER, FromServer, FromSite, Refusal, Reply, Work
from coterie.deploy.refused import CODES, Refused
from coterie.deploy.schema import Complaint, Metrics, Part, Who
from coterie.deploy.wire import Envelope, as_bytes
from coterie.methods.fields import AnyMethod

R = TypeVar("R", bound=Reply)


class Answer(NamedTuple):
    """The content of an accepted answer."""

    up: Tree
    info: Tree
    alone_info: Tree
    metrics: Mapping[Who, Metrics]  # of the models "own" and "alone"
    mail: Mapping[str, bytes]  # {neighbour: sealed letter}
    refused: tuple[Complaint, ...]  # about mail of other peers


@dataclass(frozen=True)
class Forms:
    """The expected form of an answer to a training message."""

    up: Tree
    info: Tree
    alone_info: Tree
    near: Mapping[str, tuple[str, ...]] | None  # each site's neighbours; None with a server
    parts: frozenset[Part]  # that are scored
    offer: Tree = None  # the form of what a peer gives to those who ask; None if nobody asks
    masked: bool = False  # `up` is a masked message, of which nothing can be checked


@dataclass
class Intake:
    """Collects the answers of one round."""

    ledger: Ledger
    method: AnyMethod
    server: Tree  # the state before aggregation
    round: int
    asked: Mapping[str, messages.Round]
    training: frozenset[str]
    forms: Forms
    norm_bound: float
    answers: dict[str, Answer] = field(default_factory=dict)

    def take(self, sender: str, envelope: Envelope, message: FromSite) -> None:
        """Accept an answer whose address and signature are verified; raise `Refused` if it is invalid."""
        if sender in self.answers:
            raise Refused("replay")
        answer = check_reply(self.ledger, self.round, message, messages.Answer, self.asked.get(sender))
        self.answers[sender] = self._open(sender, envelope, answer)

    def _open(self, sender: str, envelope: Envelope, answer: messages.Answer) -> Answer:
        metrics = answer.metrics if self.asked[sender].evaluate else {}
        if any(not by.keys() <= self.forms.parts for by in metrics.values()):
            raise Refused("bad-header", "metrics of parts that are not scored")
        check_complaints(answer.refused, self.asked[sender])
        if sender not in self.training:
            guard.open_body(envelope, {})
            return Answer((), {}, {}, metrics, {}, answer.refused)
        form: dict[str, Tree] = {"info": self.forms.info, "alone_info": self.forms.alone_info}
        if self.forms.near is None:
            form["up"] = self.forms.up
        else:
            form["mail"] = self._letters(self.forms.near[sender], answer)
        content = guard.open_body(envelope, form)
        guard.check_info((content["info"], content["alone_info"]))
        if self.forms.masked:
            return Answer(content["up"], content["info"], content["alone_info"], metrics, {}, answer.refused)
        if self.forms.near is None:
            guard.check_message(self.method, content["up"], self.ledger.declared[sender].train, self.norm_bound)
            guard.check_combines(self.method, self.server, list(self.ledger.declared).index(sender), content["up"])
            return Answer(content["up"], content["info"], content["alone_info"], metrics, {}, answer.refused)
        mail = {to: as_bytes(content["mail"][str(i)]) for i, (to, _) in enumerate(answer.mail)}
        return Answer((), content["info"], content["alone_info"], metrics, mail, answer.refused)

    def _letters(self, neighbours: tuple[str, ...], answer: messages.Answer) -> Tree:
        to, near = sorted(to for to, _ in answer.mail), sorted(neighbours)
        some = isinstance(self.forms.up, Addressed) and len(set(to)) == len(to) and set(to) <= set(near)
        if to != near and not some:
            raise Refused("wrong-receiver", "mail for sites that are not neighbours")
        return letter_sizes([size for _, size in answer.mail], routes.letter_form(self.forms.up))


def letter_sizes(sizes: Sequence[int], form: Tree) -> Tree:
    """Return the form of mail of these sizes; raise `Refused` if a letter with content of `form` cannot be so large."""
    most = wire.limit(form) + seal.OVERHEAD_BYTES
    if any(size > most for size in sizes):
        raise Refused("too-large", f"mail of more than {most} bytes")
    return {str(i): torch.empty(size, dtype=torch.uint8, device="meta") for i, size in enumerate(sizes)}


def check_reply(ledger: Ledger, round: int, message: FromSite, kind: type[R], request: FromServer | None) -> R:
    """Return a reply of this kind to `request`, a message of the open round; raise `Refused` if it is another one."""
    if message.run != ledger.run:
        raise Refused("wrong-run", f"run {message.run!r}")
    if message.receiver != SERVER:
        raise Refused("wrong-receiver", f"for '{message.receiver}'")
    if message.round < round:
        raise Refused("late", f"for round {message.round}, but round {round} is open")
    if message.round > round:
        raise Refused("wrong-round", f"for round {message.round}, but round {round} is open")
    if message.life != ledger.life:
        raise Refused("replay")
    if isinstance(message, Refusal):
        raise Refused(message.code, f"the site refused: {CODES[message.code]}")
    if not isinstance(message, kind) or request is None or message.request != request.digest:
        raise Refused("wrong-round", "it does not answer the request of this round")
    return message


def check_complaints(refused: tuple[Complaint, ...], request: Work) -> None:
    """Check that a site complains only of what came with the request, and once of each."""
    about = [(round, sender) for round, sender, _ in refused]
    sent = {(round, sender) for round, sender, _ in request.mail} | {*request.news}
    if isinstance(request, messages.Round):
        sent |= {(request.round, sender) for sender, _ in request.offers}
    if len(set(about)) < len(about) or not set(about) <= sent:
        raise Refused("bad-count", "complaints about mail that it was not sent, or several about the same")
