"""Mail between peers, as a site reads and writes it. It travels through the server, which passes it on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie import tree
from coterie.deploy import seal, wire
from coterie.deploy.refused import Refused
from coterie.deploy.seal import Route
from coterie.hyper import AnyMethod
from coterie.tree import Tree

OVERHEAD = seal.NONCE + 16  # of a sealed letter


@dataclasses.dataclass(frozen=True)
class Peer:
    """One that this site hears."""

    index: int
    train: int  # examples it declared
    exchange: str  # its public key


@dataclasses.dataclass(frozen=True)
class Circle:
    """A site among its neighbours: all it is told of the graph."""

    name: str
    index: int
    near: Mapping[str, Peer]  # its neighbours, without itself
    keys: torch.Tensor  # [clients]
    sealed: bool

    @classmethod
    def read(cls, name: str, told: Any, known: Mapping[str, str], pinned: dict[str, Any]) -> Circle:
        """New peers' keys are added to `pinned`."""
        try:
            near = {}
            for other, (index, train, card) in told["near"].items():
                pinned[other] = seal.check_card(other, card, known, pinned)
                near[other] = Peer(int(index), int(train), card["exchange"])
            return cls(name, int(told["index"]), near, torch.tensor(told["keys"]), bool(told["sealed"]))
        except (TypeError, KeyError, ValueError) as error:
            raise Refused("bad-header", "the neighbours cannot be read") from error


def write(circle: Circle, secret: X25519PrivateKey, run: str, round: int, up: Tree) -> dict[str, bytes]:
    """The site's message for each of its neighbours, for their eyes only."""
    data = wire.encode(up)
    if not circle.sealed:
        return dict.fromkeys(circle.near, data)
    return {
        name: seal.seal(data, secret, peer.exchange, Route(run, round, circle.name, name))
        for name, peer in circle.near.items()
    }


def read(
    circle: Circle, secret: X25519PrivateKey, run: str, letter: tuple[int, str], data: bytes, like: Tree
) -> tuple[Peer, Tree]:
    """(the sender, its message) of a letter (round, sender), which nobody has looked at yet; raises `Refused`."""
    round, sender = letter
    peer = circle.near.get(sender)
    if peer is None:
        raise Refused("unknown-site", f"'{sender}' is not a neighbour: nothing was asked of it")
    if circle.sealed:
        data = seal.unseal(data, secret, peer.exchange, Route(run, round, sender, circle.name))
    if len(data) > wire.limit(like):
        raise Refused("too-large")
    return peer, wire.decode(data, like)


def combine(method: AnyMethod, copy: Tree, heard: Mapping[int, Tree]) -> Tree:
    """The copy after the messages of a round, {place: message}; as it was if there are none."""
    if not heard:
        return copy
    ids = sorted(heard)
    return method.aggregate(copy, torch.tensor(ids), tree.stack([heard[i] for i in ids]))
