"""Messages from one client to another: what a client asks of named clients, and what it writes to them.

Most methods' messages are for all who hear them. In some, a client needs something of a few others only, and has
something to say to these only. Such a method says so with two types, and the engines and the mail do the rest:

    Asked       in what is dispatched: rows that others own, of those clients only whom the client asks
    Addressed   the client's message, in parts: one for its own server, and one for each client that it writes to

A central server has all rows and reads all parts; nothing changes there. Among peers nobody has the rows of others:
they are fetched from their owners (`Method.offer`), and a part goes to the one for whom it is. All others hear only
that the sender took part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.tree import Tree

NOBODY = -1  # in the place of a client's number: nobody is asked, or nothing is written


class Asked(NamedTuple):
    """What other clients own and this client asks for; a part of `Down`. No owner is asked twice."""

    owners: Tensor  # [K] int64; whose row each is, or NOBODY; the client itself may be among them
    rows: Tree  # [K, ...]; what each owner offers; where nobody is asked it means nothing


class Addressed(NamedTuple):
    """A client's whole message `Up`, in parts. Nobody is written to twice."""

    own: Tree  # for the server or, among peers, for the sender's own copy of it
    to: Tensor  # [K] int64; for whom each part is, or NOBODY; the sender may be among them
    parts: Tree  # [K, ...]


def asked(down: Tree) -> Asked | None:
    """Return what a message asks of other clients; None if it asks nobody."""
    if isinstance(down, Asked):
        return down
    children = down.values() if isinstance(down, dict) else down if isinstance(down, tuple) else ()
    return next((found for child in children if (found := asked(child)) is not None), None)


def with_rows(down: Tree, rows: Tree) -> Any:
    """Return the message with the rows that were asked for."""
    return _each_asked(down, lambda node: node._replace(rows=rows))


def fetch(down: Tree, offers: Tree) -> Any:
    """Fill in what is asked for.

    Args:
        down: the messages to some peers, as rows, leaves [peers, ...].
        offers: what every client offers, leaves [clients, ...].
    """
    want = asked(down)
    if want is None:
        return down
    there = want.owners >= 0  # [peers, K]

    def filled(before: Tensor, offered: Tensor) -> Tensor:
        return torch.where(_wide(there, before), offered[want.owners.clamp_min(0)], before)

    return with_rows(down, tree.map(filled, want.rows, offers))


def received(down: Tree, itself: int, offers: Mapping[int, Tree]) -> Any:
    """Fill in what one peer asked for and got; those who did not answer were not asked.

    Args:
        down: the message to the peer, as one row, leaves [1, ...].
        itself: the peer's number; its own row is there already.
        offers: what other clients sent, by their numbers, without client axis.
    """
    want = asked(down)
    if want is None:
        return down
    owners = [each if each == itself or each in offers else NOBODY for each in want.owners[0].tolist()]

    def filled(before: Tensor, *offered: Tensor) -> Tensor:
        got = dict(zip(offers, offered, strict=True))
        return torch.stack([got.get(each, row) for each, row in zip(owners, before[0], strict=True)])[None]

    rows = tree.map(filled, want.rows, *offers.values())
    return _each_asked(down, lambda _: Asked(torch.tensor([owners]), rows))


def heard_by(peer: int, ids: Tensor, ups: Tree) -> Any:
    """Return the messages of a round as one peer gets them.

    Args:
        peer: the receiver's number.
        ids: [senders], their numbers.
        ups: their messages, leaves [senders, ...].

    Returns:
        Messages that are not `Addressed`, as they are. Else with the one part that is for the peer, and zeros where
        there is none; `own` is zero but for the peer's own message.
    """
    if not isinstance(ups, Addressed):
        return ups
    mine = ups.to == peer  # [senders, K]
    some, which = mine.any(1), mine.int().argmax(1)
    row = torch.arange(len(ids), device=ids.device)

    def part(leaf: Tensor) -> Tensor:
        one = leaf[row, which][:, None]
        return torch.where(_wide(some, one), one, torch.zeros_like(one))

    own = tree.map(lambda leaf: torch.where(_wide(ids == peer, leaf), leaf, torch.zeros_like(leaf)), ups.own)
    return Addressed(own, torch.where(some, peer, NOBODY)[:, None], tree.map(part, ups.parts))


def own_part(up: Tree, sender: int) -> Any:
    """Return what the sender itself hears of its message; both without client axis."""
    return tree.rows(heard_by(sender, torch.tensor([sender]), tree.broadcast(up, 1)), 0)


def letter(up: Tree, receiver: int) -> Tree | None:
    """Return what a message (without client axis) has for one peer; None if nothing. Not `Addressed`: all of it."""
    if not isinstance(up, Addressed):
        return up
    at = (up.to == receiver).nonzero().flatten().tolist()
    return tree.rows(up.parts, at[0]) if at else None


def letter_form(up: Tree) -> Tree:
    """Return a letter's form, given that of the message."""
    return tree.rows(up.parts, 0) if isinstance(up, Addressed) else up


def from_letter(content: Tree | None, receiver: int, form: Tree) -> Any:
    """Return the message that the receiver hears of a letter, or if there is none (None), of the news that there is a
    message. It is what `heard_by` gives, for one sender and without client axis; `form` is a message's form."""
    if not isinstance(form, Addressed):
        assert content is not None
        return content
    own, to = tree.map(torch.zeros_like, form.own), NOBODY if content is None else receiver
    parts = tree.map(torch.zeros_like, letter_form(form)) if content is None else content
    return Addressed(own, torch.tensor([to]), tree.map(lambda leaf: leaf[None], parts))


def sent_bytes(messages: Tree) -> int:
    """Return the bytes of messages between clients and a server, without parts and rows of nobody."""
    spare = 0
    want = asked(messages)
    if want is not None:
        spare += _bytes(want.owners, want.rows, want.owners < 0)
    if isinstance(messages, Addressed):
        spare += _bytes(messages.to, messages.parts, messages.to < 0)
    return tree.nbytes(messages) - spare


def peer_bytes(ids: Tensor, neighbours: list[int], ups: Addressed, downs: Tree) -> tuple[int, int]:
    """Return the bytes of a round among peers: (what they told each other, what they were sent of what they asked for).

    Args:
        ids: [senders], their numbers.
        neighbours: how many neighbours each sender has.
        ups: their messages, leaves [senders, ...].
        downs: what they were dispatched, leaves [senders, ...].
    """
    news = sum(neighbours) * ups.to.element_size()  # that it took part, to every neighbour
    told = news + _bytes(ups.to, ups.parts, _others(ups.to, ids))
    want = asked(downs)
    if want is None:
        return told, 0
    others = _others(want.owners, ids)
    questions = int(others.sum()) * want.owners.element_size()
    return told + questions, _bytes(want.owners, want.rows, others)


def _others(whose: Tensor, ids: Tensor) -> Tensor:
    return (whose >= 0) & (whose != ids[:, None])


def _bytes(numbers: Tensor, rows: Tree, which: Tensor) -> int:
    """Return the bytes of the rows `which`, of leaves that begin with the shape of `numbers`."""
    return int(which.sum()) * (tree.nbytes(rows) // max(1, numbers.numel()))


def _wide(condition: Tensor, leaf: Tensor) -> Tensor:
    return condition.reshape(condition.shape + (1,) * (leaf.ndim - condition.ndim))


def _each_asked(node: Tree, change: Callable[[Asked], Any]) -> Any:
    if isinstance(node, Asked):
        return change(node)
    if isinstance(node, dict):
        return {name: _each_asked(child, change) for name, child in node.items()}
    if isinstance(node, tuple):
        children = [_each_asked(child, change) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node
