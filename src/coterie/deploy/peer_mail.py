"""How a site reads and writes mail to its peers. The server relays it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.core import tree
from coterie.core.tree import Tree
from coterie.deploy import seal, wire
from coterie.deploy.refused import Refused
from coterie.deploy.seal import Route
from coterie.methods.fields import AnyMethod

SEAL_OVERHEAD_BYTES = seal.NONCE_BYTES + 16  # that sealing adds to a letter


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
    def read(cls, name: str, values: Any, known: Mapping[str, str], pinned: dict[str, Any]) -> Neighbourhood:
        """Parse what the server sends; keys of new peers are added to `pinned`."""
        try:
            near = {}
            for other, (index, train, card) in values["near"].items():
                pinned[other] = seal.check_card(other, card, known, pinned)
                near[other] = Peer(int(index), int(train), card["exchange"])
            return cls(name, int(values["index"]), near, torch.tensor(values["keys"]), bool(values["sealed"]))
        except (TypeError, KeyError, ValueError) as error:
            raise Refused("bad-header", "the neighbours cannot be read") from error


def write(neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, round: int, up: Tree) -> dict[str, bytes]:
    """Return the site's message for each neighbour, encrypted so that only the neighbour can read it."""
    data = wire.encode(up)
    if not neighbourhood.sealed:
        return dict.fromkeys(neighbourhood.near, data)
    return {
        name: seal.seal(data, secret, peer.exchange, Route(run, round, neighbourhood.name, name))
        for name, peer in neighbourhood.near.items()
    }


def read(
    neighbourhood: Neighbourhood, secret: X25519PrivateKey, run: str, letter: tuple[int, str], data: bytes, like: Tree
) -> tuple[Peer, Tree]:
    """Open and check a letter (round, sender); return the sender and its message, or raise `Refused`."""
    round, sender = letter
    peer = neighbourhood.near.get(sender)
    if peer is None:
        raise Refused("unknown-site", f"'{sender}' is not a neighbour")
    if neighbourhood.sealed:
        data = seal.unseal(data, secret, peer.exchange, Route(run, round, sender, neighbourhood.name))
    if len(data) > wire.limit(like):
        raise Refused("too-large")
    return peer, wire.decode(data, like)


def combine(method: AnyMethod, copy: Tree, heard: Mapping[int, Tree]) -> Tree:
    """Return the copy of the server after the messages of a round, {client id: message}."""
    if not heard:
        return copy
    ids = sorted(heard)
    return method.aggregate(copy, torch.tensor(ids), tree.stack([heard[i] for i in ids]))
