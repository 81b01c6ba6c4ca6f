"""The headers of all messages, as types. `guard` parses what arrives as one of these; nothing else reads a header.

from the server     join, round, finish; among peers who ask each other also ask, offer
from a site         joined, answer, finished, refused; asks, offers

For a secure sum (`coterie.deploy.secure`) there are, around a round, keys, shares and unmask from the server, and key,
shared and unmasked from a site.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from coterie.deploy import wire
from coterie.deploy.federation_facts import Declaration, FederationFacts
from coterie.deploy.schema import (
    MAX_LETTERS,
    MAX_SITES,
    Bytes,
    ClientId,
    Code,
    Complaint,
    Digest,
    Examples,
    Hash64,
    Life,
    Metrics,
    Name,
    PublicKey,
    RoundNumber,
    Run,
    Strict,
    Who,
)
from coterie.deploy.seal import Card, ExchangeKey, Signature

SERVER = "server"  # no site may have this name


class Header(Strict):
    """What every message says: where it belongs, and the digest of its body."""

    v: Literal[2] = 2  # the version of the format
    run: Run
    life: Life  # how often the server has started
    round: RoundNumber
    sender: Name = Field(alias="from")
    receiver: Name = Field(alias="to")
    body: Digest = wire.digest(b"")

    def json_bytes(self) -> bytes:
        """Return the header as it is signed and sent."""
        return self.model_dump_json(by_alias=True).encode()

    @property
    def digest(self) -> str:
        """What is asked, as a digest; how often the server has started does not belong to it."""
        values = self.model_dump(mode="json", by_alias=True, exclude={"life"})
        return wire.digest(json.dumps(values, sort_keys=True).encode())  # the same with every version of pydantic


class FromServer(Header):
    """A message of the server, with its public key."""

    sender: Name = Field(SERVER, alias="from")
    server: PublicKey


class Join(FromServer):
    """Who is there? To everybody."""

    kind: Literal["join"] = "join"
    receiver: Literal[""] = Field("", alias="to")


class Neighbours(Strict):
    """A peer's place in the graph."""

    index: ClientId
    near: dict[Name, tuple[ClientId, Examples, Card]]  # by name: number, training examples, and keys
    keys: Annotated[tuple[Hash64, ...], Field(max_length=MAX_SITES)]  # of all clients
    sealed: bool


class Work(FromServer):
    """What a message to work has in common with another."""

    base: RoundNumber  # the last round of the site that was accepted
    train: bool
    evaluate: bool
    facts: FederationFacts
    # Among peers only:
    peers: Neighbours | None = None
    said: Annotated[tuple[RoundNumber, ...], Field(max_length=MAX_LETTERS)] = ()  # rounds in which the peer was heard
    news: Annotated[tuple[tuple[RoundNumber, Name], ...], Field(max_length=MAX_LETTERS)] = ()  # who took part
    mail: Annotated[tuple[tuple[RoundNumber, Name, Bytes], ...], Field(max_length=MAX_LETTERS)] = ()


MAX_MASKED = 1000  # sites in one secure sum
Session = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # of the keys of one secure sum
Share = Annotated[str, Field(pattern=r"^[0-9a-f]{132}$")]  # of a secret


class Member(Strict):
    """What others need to have masks with a site in one secure sum, signed by the site."""

    card: Card
    public: ExchangeKey  # of the masks between pairs
    seed: Digest  # binds it to the seed of its own mask
    proof: Signature


class Masking(Strict):
    """With whom a site's message has masks; their sealed shares are in the body, in this order."""

    session: Session
    senders: Annotated[tuple[Name, ...], Field(max_length=MAX_MASKED)]


class Round(Work):
    """Evaluate the round before, train this one, or both."""

    kind: Literal["round"] = "round"
    best: RoundNumber
    best_alone: RoundNumber
    caught_up: bool = False  # its mail came with an offer already
    offers: Annotated[tuple[tuple[Name, Bytes], ...], Field(max_length=MAX_LETTERS)] = ()
    masking: Masking | None = None  # of what is trained, if it is summed securely


class Keys(FromServer):
    """Make new keys for masks."""

    kind: Literal["keys"] = "keys"
    session: Session


class Shares(FromServer):
    """Share your secrets among these."""

    kind: Literal["shares"] = "shares"
    session: Session
    roster: Annotated[dict[Name, Member], Field(max_length=MAX_MASKED)]


class Unmask(FromServer):
    """Tell shares of what is left in the sum of these sites' messages."""

    kind: Literal["unmask"] = "unmask"
    session: Session
    heard: Annotated[tuple[Name, ...], Field(max_length=MAX_MASKED)]


class Ask(Work):
    """Whom does this peer ask?"""

    kind: Literal["ask"] = "ask"


class Offer(Work):
    """What does this peer offer to those who ask?"""

    kind: Literal["offer"] = "offer"
    askers: Annotated[tuple[Name, ...], Field(max_length=MAX_SITES)]


class Finish(FromServer):
    """Write the model of the selected round."""

    kind: Literal["finish"] = "finish"
    facts: FederationFacts
    selected: RoundNumber
    selected_alone: RoundNumber


class FromSite(Header):
    """A message of a site."""

    receiver: Name = Field(SERVER, alias="to")


class Joined(FromSite):
    """A site's name, keys and sizes."""

    kind: Literal["joined"] = "joined"
    declares: Declaration
    card: Card


class Refusal(FromSite):
    """A site did not do what was asked. Where it could not read that, it does not name a run."""

    kind: Literal["refused"] = "refused"
    run: Run | Literal[""] = ""
    life: Life = 0
    round: RoundNumber = 0
    code: Code


class Reply(FromSite):
    """An answer to a message of this digest."""

    request: Digest


Mail = Annotated[tuple[tuple[Name, Bytes], ...], Field(max_length=MAX_LETTERS)]  # receivers and sizes
Complaints = Annotated[tuple[Complaint, ...], Field(max_length=MAX_LETTERS)]


class Answer(Reply):
    """What a site did in a round; what it trained is in the body."""

    kind: Literal["answer"] = "answer"
    metrics: dict[Who, Metrics] = Field(default_factory=dict)
    mail: Mail = ()
    refused: Complaints = ()


class Asks(Reply):
    """Whom a peer asks."""

    kind: Literal["asks"] = "asks"
    asks: Annotated[tuple[Name, ...], Field(max_length=MAX_SITES)]


class Offers(Reply):
    """Letters to those who asked, in the body."""

    kind: Literal["offers"] = "offers"
    mail: Mail
    refused: Complaints = ()


class Key(Reply):
    """A site's keys for masks: the fields of `Member`."""

    kind: Literal["key"] = "key"
    public: ExchangeKey
    seed: Digest
    proof: Signature


class Shared(Reply):
    """Sealed shares for all others, in the order of their names, are in the body."""

    kind: Literal["shared"] = "shared"


class Unmasked(Reply):
    """Shares of the seeds of those that were heard, and of the keys of those that were not."""

    kind: Literal["unmasked"] = "unmasked"
    seeds: Annotated[dict[Name, Share], Field(max_length=MAX_MASKED)]
    keys: Annotated[dict[Name, Share], Field(max_length=MAX_MASKED)]


class Finished(FromSite):
    """The site's model is written."""

    kind: Literal["finished"] = "finished"


ToSite = Join | Round | Ask | Offer | Keys | Shares | Unmask | Finish
ToServer = Joined | Refusal | Answer | Asks | Offers | Key | Shared | Unmasked | Finished
M = TypeVar("M", bound=Header)
TO_SITE: TypeAdapter[ToSite] = TypeAdapter(Annotated[ToSite, Field(discriminator="kind")])
TO_SERVER: TypeAdapter[ToServer] = TypeAdapter(Annotated[ToServer, Field(discriminator="kind")])
