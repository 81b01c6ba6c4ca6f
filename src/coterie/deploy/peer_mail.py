"""How a site reads and writes mail to its peers. The server relays it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.core import routes, tree
from coterie.core.tree import Tree
from coterie.deploy import guard, seal, wire
from coterie.deploy.messages import Neighbours
from coterie.deploy.refused import Refused
from coterie.deploy.seal import Card, Route
from coterie.methods.fields import AnyMethod


@dataclasses.dataclass(frozen=True)
class Peer:
    """A neighbour whose messages this site receives."""

    index: int
    train: int  # number of training examples that it declared
    exchange: str  # its public key


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """A site and its neighbours: all that the site knows about the graph."""

    name: str
    index: int
    near: Mapping[str, Peer]  # its neighbours, without itself
    keys: torch.Tensor  # [clients]
    sealed: bool

    @classmethod
    def read(cls, name: str, told: Neighbours, known: Mapping[str, str], pinned: dict[str, Card]) -> Neighbourhood:
        """Check what the server sends; keys of new peers are added to `pinned`."""
        numbers = [told.index, *(index for index, _, _ in told.near.values())]
        if len(set(numbers)) < len(numbers) or max(numbers) >= len(told.keys):
            raise Refused("bad-header", "the numbers of the neighbours cannot be")
        near = {}
        for other, (index, train, card) in told.near.items():
            seal.check_card(other, card, known, pinned)
            pinned[other] = card
            near[other] = Peer(index, train, card.exchange)
        return cls(name, told.index, near, torch.tensor(told.keys), told.sealed)

    @property
    def names(self) -> dict[int, str]:
        """The neighbours' names, by their numbers."""
        return {peer.index: name for name, peer in self.near.items()}


def write(neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, round: int, up: Tree) -> dict[str, bytes]:
    """Return the letters of a site's message, encrypted so that only the receiver can read one.

    A message goes to all neighbours; of one in parts (`coterie.core.routes`), each part to the neighbour it is for.
    """
    letters = {name: routes.letter(up, peer.index) for name, peer in neighbourhood.near.items()}
    return _sealed(
        neighbourhood, secret, run, round, {name: each for name, each in letters.items() if each is not None}
    )


def write_offer(
    neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, round: int, offer: Tree, askers: list[str]
) -> dict[str, bytes]:
    """Return what the site offers as a letter to each neighbour that asked."""
    return _sealed(neighbourhood, secret, run, round, dict.fromkeys(askers, offer), "offer")


def read(
    neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, letter: tuple[int, str], data: bytes, like: Tree
) -> tuple[Peer, Tree]:
    """Open and check a letter (round, sender) of a message `like` this; return the sender and what is heard of it."""
    peer, content = _opened(neighbourhood, secret, run, letter, data, routes.letter_form(like), "message")
    return peer, routes.from_letter(content, neighbourhood.index, like)


def read_offer(
    neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, letter: tuple[int, str], data: bytes, like: Tree
) -> tuple[Peer, Tree]:
    """Open and check an offer `like` this, in a letter (round, sender); return the sender and its offer."""
    return _opened(neighbourhood, secret, run, letter, data, like, "offer")


def combine(method: AnyMethod, copy: Tree, heard: Mapping[int, Tree]) -> Tree:
    """Return the copy of the server after the messages of a round, {client id: message}."""
    if not heard:
        return copy

    def aggregate(ids: list[int]) -> Tree:
        return method.aggregate(copy, torch.tensor(ids), tree.stack([heard[i] for i in ids]))

    return guard.combine_usable(sorted(heard), aggregate)[1]


def _sealed(
    neighbourhood: Neighbourhood,
    secret: X25519PrivateKey,
    run: str,
    round: int,
    letters: Mapping[str, Tree],
    what: str = "message",
) -> dict[str, bytes]:
    encoded: dict[int, bytes] = {}  # what goes to several is encoded once
    sent = {}
    for name, content in letters.items():
        data = encoded.setdefault(id(content), b"") or wire.encode(content)
        encoded[id(content)] = sent[name] = data
        if neighbourhood.sealed:
            route = Route(run, round, neighbourhood.name, name, what)
            sent[name] = seal.seal(data, secret, neighbourhood.near[name].exchange, route)
    return sent


def _opened(
    neighbourhood: Neighbourhood,
    secret: X25519PrivateKey,
    run: str,
    letter: tuple[int, str],
    data: bytes,
    like: Tree,
    what: str,
) -> tuple[Peer, Tree]:
    """Return the sender and the content of a letter, or raise `Refused`."""
    round, sender = letter
    peer = neighbourhood.near.get(sender)
    if peer is None:
        raise Refused("unknown-site", f"'{sender}' is not a neighbour")
    if neighbourhood.sealed:
        data = seal.unseal(data, secret, peer.exchange, Route(run, round, sender, neighbourhood.name, what))
    if len(data) > wire.limit(like):
        raise Refused("too-large")
    return peer, wire.decode(data, like)
