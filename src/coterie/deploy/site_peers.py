"""A site among peers: it reads its neighbours' mail into its copy of the server, asks and offers.

What is sealed for it is opened here, and only here. Mail that is refused is left out and reported to the server; the
rest of it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from coterie.core import routes, tree
from coterie.core.routes import Addressed
from coterie.core.tree import Tree
from coterie.deploy import guard, messages, peer_mail, seal, wire
from coterie.deploy.intake import letter_sizes
from coterie.deploy.peer_mail import Neighbourhood
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Complaint
from coterie.deploy.store import About, Store
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.deploy.work import Private, Workbench

if TYPE_CHECKING:
    from coterie.deploy.site import Site

Letters = dict[tuple[int, str], bytes]  # sealed, by round and sender


def answer_ask(site: Site, message: messages.Ask, store: Store) -> Envelope:
    """Tell whom this peer asks. That depends on its own last message, and on who took part; not on mail."""
    workbench, neighbourhood, at, private = _peer(site, message, store)
    copy = read_mail(site, {}, message, workbench, neighbourhood, at, private)[0].copy
    index, train, evaluate = neighbourhood.index, message.train, message.evaluate
    owners = workbench.asks(message.round, copy, index, train=train, evaluate=evaluate)
    names = tuple(sorted(neighbourhood.names[owner] for owner in owners))
    return site.sign(messages.Asks(**site.route(message), request=message.digest, asks=names))


def answer_offer(site: Site, envelope: Envelope, message: messages.Offer, store: Store) -> Envelope:
    """Read the mail, and offer to those who ask what the copy of the server then has of this peer."""
    workbench, neighbourhood, at, private = _peer(site, message, store)
    if not {*message.askers} <= neighbourhood.near.keys():
        raise Refused("wrong-receiver", "sites ask that are not neighbours")
    mail, _ = open_mail(site, envelope, message, workbench, neighbourhood, private)
    private, refused = read_mail(site, mail, message, workbench, neighbourhood, at, private)
    copy = private.copy
    store.keep_copy(message.round, copy)
    secret = seal.exchange_key_at(site.root / "exchange.key")
    offer = workbench.task.sent(workbench.offer(copy, neighbourhood.index))
    letters = peer_mail.write_offer(neighbourhood, secret, message.run, message.round, offer, list(message.askers))
    body = wire.encode({"mail": {str(i): as_leaf(data) for i, data in enumerate(letters.values())}})
    listed = tuple((to, len(data)) for to, data in letters.items())
    reply = messages.Offers(**site.route(message), request=message.digest, mail=listed, refused=tuple(refused))
    return site.sign(reply, body)


def neighbourhood_of(site: Site, message: messages.Work, store: Store) -> tuple[Neighbourhood | None, About]:
    about = store.about()
    if (message.peers is None) != (site.config.topology == "server"):
        raise Refused("bad-header", "this run has peers, or it has none, and the message is for the other kind")
    if message.peers is None:
        return None, about
    if len(message.peers.keys) != message.facts.size:
        raise Refused("bad-header", "the number of clients is not that of their keys")
    pinned = dict(about.peers)
    neighbourhood = Neighbourhood.read(site.name, message.peers, site.known, pinned)
    return neighbourhood, about.model_copy(update={"peers": pinned})


def open_mail(
    site: Site,
    envelope: Envelope,
    message: messages.Round | messages.Offer,
    workbench: Workbench,
    neighbourhood: Neighbourhood,
    private: Private,
) -> tuple[Letters, dict[str, bytes]]:
    """Return the letters in a message, by round and sender, and the offers, by sender; all still sealed."""
    offers = message.offers if isinstance(message, messages.Round) else ()
    offer = workbench.task.sent(workbench.offer(private.copy, neighbourhood.index))
    form = {"mail": letter_sizes([size for *_, size in message.mail], routes.letter_form(private.up))}
    if isinstance(message, messages.Round):
        form["offers"] = letter_sizes([size for _, size in offers], offer)
    content = guard.open_body(envelope, form)
    mail = {(round, sender): as_bytes(content["mail"][str(i)]) for i, (round, sender, _) in enumerate(message.mail)}
    return mail, {sender: as_bytes(content["offers"][str(i)]) for i, (sender, _) in enumerate(offers)}


def read_mail(
    site: Site,
    mail: Letters,
    message: messages.Work,
    workbench: Workbench,
    neighbourhood: Neighbourhood,
    at: int,
    private: Private,
) -> tuple[Private, list[Complaint]]:
    """Update the peer's copy of the server with its mail; also return [round, sender, code] of refused mail."""
    accepted, news = set(message.said), set(message.news)
    secret = seal.exchange_key_at(site.root / "exchange.key")
    heard: dict[int, dict[int, Tree]] = {}
    refused: list[Complaint] = []
    for (round, sender), data in mail.items():
        try:
            peer, up = peer_mail.read(neighbourhood, secret, message.run, (round, sender), data, private.up)
            guard.check_message(site.method, up, peer.train, site.norm_bound)
            guard.check_combines(site.method, private.copy, peer.index, up)
            heard.setdefault(round, {})[peer.index] = up
        except Exception as error:
            refused.append(_refused_mail(site, message, round, sender, error))
    if isinstance(private.up, Addressed):  # those who wrote nothing to this site took part all the same
        for round, sender in news - mail.keys():
            if sender not in neighbourhood.near:
                refused.append(_refused_mail(site, message, round, sender, Refused("unknown-site")))
                continue
            index = neighbourhood.near[sender].index
            heard.setdefault(round, {})[index] = routes.from_letter(None, neighbourhood.index, private.up)
    copy = private.copy
    for round in range(max(at, 1), message.round):
        messages = heard.get(round, {})
        if round == at and bool(private.spoke) and round in accepted:
            messages = {**messages, neighbourhood.index: private.up}
        copy = peer_mail.combine(workbench.method, copy, messages)
    return private._replace(copy=copy), refused


def read_offers(
    site: Site,
    offered: Mapping[str, bytes],
    message: messages.Round,
    workbench: Workbench,
    neighbourhood: Neighbourhood,
    private: Private,
) -> tuple[dict[int, Tree], list[Complaint]]:
    """Open what this peer asked for, by the owner's number; also return [round, sender, code] of refused offers."""
    secret = seal.exchange_key_at(site.root / "exchange.key")
    form = workbench.offer(private.copy, neighbourhood.index)
    offers: dict[int, Tree] = {}
    refused: list[Complaint] = []
    for sender, data in offered.items():
        try:
            route = (message.round, sender)
            lean = workbench.task.sent(form)
            peer, offer = peer_mail.read_offer(neighbourhood, secret, message.run, route, data, lean)
            guard.check_finite(offer)
            guard.check_norm(offer, site.norm_bound)
            offers[peer.index] = tree.filled(offer, form)
        except Exception as error:
            refused.append(_refused_mail(site, message, message.round, sender, error))
    return offers, refused


def _peer(site: Site, message: messages.Work, store: Store) -> tuple[Workbench, Neighbourhood, int, Private]:
    """Return what a peer needs to reply to an errand, which changes nothing on its disk."""
    workbench = site.workbench(message.facts)
    neighbourhood, about = neighbourhood_of(site, message, store)
    if neighbourhood is None:
        raise Refused("bad-header", "only peers ask each other")
    store.keep_about(about)
    initial = initial_of(workbench, neighbourhood)
    return workbench, neighbourhood, *store.load(message.base, initial, only_read=True)


def _refused_mail(site: Site, message: messages.Work, round: int, sender: str, error: Exception) -> Complaint:
    refused = error if isinstance(error, Refused) else Refused("error", guard.place_of(error))
    site.log(message, f"mail of '{sender}' in round {round} refused ({refused.code}): {refused}")
    return round, sender, refused.code


def initial_of(workbench: Workbench, neighbourhood: Neighbourhood | None) -> Private:
    if neighbourhood is None:
        return workbench.initial()
    return workbench.initial_of_peer(neighbourhood.keys, len(neighbourhood.near) + 1, neighbourhood.index)
