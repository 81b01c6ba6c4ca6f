"""The headers of all messages, as types. `guard` parses what arrives as one of these; nothing else reads a header.

from the server     join, round, finish; among peers who ask each other also ask, offer
                    to recommend a method: tries, judge, close
from a site         joined, answer, finished, refused; asks, offers; tried, judged

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
    MAX_EXAMPLES,
    MAX_FOLDS,
    MAX_LETTERS,
    MAX_SITES,
    MAX_TRIALS,
    Bytes,
    ClientId,
    Code,
    Complaint,
    Digest,
    Examples,
    Hash64,
    Life,
    Measured,
    Metrics,
    Name,
    PublicKey,
    RoundNumber,
    Run,
    Scores,
    Settings,
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


class Trial(Strict):
    """A method with settings, and what to do with it now."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,200}$")]
    method: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,100}$")]
    hyper: Settings
    optimizer: Settings
    base: RoundNumber  # the last round of the site that was accepted
    step: RoundNumber  # the round to train; the one before it is evaluated
    train: bool
    evaluate: bool
    keep: bool = False  # an evaluated model may be asked for
    hold: bool = False  # predict what the fold holds out, with the model of round `best`, and keep that
    best: RoundNumber = 0


class Folded(FromServer):
    """What messages about parts of the sites' data have in common."""

    facts: FederationFacts  # with this fold held out
    folds: Annotated[int, Field(ge=2, le=MAX_FOLDS)]


class Tries(Folded):
    """Train and evaluate candidates, each for a round; nobody sees what the fold holds out."""

    kind: Literal["tries"] = "tries"
    fold: Annotated[int, Field(ge=0, le=MAX_FOLDS)]  # 0: nothing is held out
    trials: Annotated[tuple[Trial, ...], Field(min_length=1, max_length=MAX_TRIALS)]
    open: Annotated[tuple[str, ...], Field(max_length=MAX_TRIALS)]  # candidates that may go on; forget all others


class Judge(Folded):
    """How good was each method on all that was held out?"""

    kind: Literal["judge"] = "judge"
    methods: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_TRIALS)]
    metric: str


class Close(FromServer):
    """Forget all candidates, and what was held out."""

    kind: Literal["close"] = "close"


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


class Tried(Reply):
    """How candidates do on validation examples; what they trained is in the body."""

    kind: Literal["tried"] = "tried"
    scores: Annotated[tuple[Scores | None, ...], Field(max_length=MAX_TRIALS)]  # one each; None: not evaluated
    failed: Annotated[tuple[int, ...], Field(max_length=MAX_TRIALS)] = ()  # whose training diverged here, by place


class Judged(Reply):
    """A site's scores, in the order of the methods asked about, and how sure their differences are."""

    kind: Literal["judged"] = "judged"
    examples: Examples
    scores: Annotated[tuple[Measured, ...], Field(max_length=MAX_TRIALS)]
    errors: Annotated[tuple[Measured, ...], Field(max_length=MAX_TRIALS**2)]  # of pairs, in the order of `combinations`
    ends: Annotated[tuple[tuple[Measured, Measured], ...], Field(max_length=MAX_TRIALS)]  # of all but training alone
    differing: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_EXAMPLES)], ...], Field(max_length=MAX_TRIALS)]


class Finished(FromSite):
    """The site's model is written."""

    kind: Literal["finished"] = "finished"


ToSite = Join | Round | Ask | Offer | Keys | Shares | Unmask | Tries | Judge | Close | Finish
ToServer = Joined | Refusal | Answer | Asks | Offers | Key | Shared | Unmasked | Tried | Judged | Finished
M = TypeVar("M", bound=Header)
TO_SITE: TypeAdapter[ToSite] = TypeAdapter(Annotated[ToSite, Field(discriminator="kind")])
TO_SERVER: TypeAdapter[ToServer] = TypeAdapter(Annotated[ToServer, Field(discriminator="kind")])
