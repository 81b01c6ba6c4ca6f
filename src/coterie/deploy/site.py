"""A site answers one envelope with another. Everything that it needs between messages is on its own disk.

A message of round t has a `base`: the last round for which the server accepted this site's answer. The site starts from
its state after that round, so work that the server did not accept (it came late, or the server died) does not count. If
the same message arrives again, the stored answer is sent again.
"""

from __future__ import annotations

import dataclasses
import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.core import routes
from coterie.core.errors import ConfigError, DataError
from coterie.core.routes import Addressed
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.deploy import guard, peer_mail, seal, site_folder, wire
from coterie.deploy.federation_facts import FederationFacts, declare
from coterie.deploy.guard import SERVER
from coterie.deploy.intake import letter_sizes
from coterie.deploy.keys import Identity, same_key
from coterie.deploy.peer_mail import Neighbourhood
from coterie.deploy.refused import Refused
from coterie.deploy.site_roles import OwnServer, RemoteServer
from coterie.deploy.store import Store
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.deploy.work import Private, Workbench
from coterie.experiment.config import Config
from coterie.experiment.setup import Model
from coterie.methods.fields import AnyMethod

Header = dict[str, Any]


@dataclass
class Site:
    """A site of a federation."""

    name: str
    config: Config
    method: AnyMethod
    model: Model
    data: Federation  # with this client only
    identity: Identity
    root: Path  # the site's own folder
    server_key: str | None = None  # None: trust the first key seen for a run
    known: Mapping[str, str] = field(default_factory=dict)  # other sites' public keys, for mail between peers
    norm_bound: float = 1e6  # of mail from peers
    _workbenches: dict[str, Workbench] = field(default_factory=dict, repr=False)

    def answer(self, envelope: Envelope) -> Envelope:
        """Answer a message. Never raises: the answer has an error code, and the site's log has the details."""
        header: Header = {}
        try:
            header = guard.read_header(envelope)
            if header["to"] != self.name and not (header["kind"] == "join" and not header["to"]):
                raise Refused("wrong-receiver", f"for '{header['to']}'")
            if header["from"] != SERVER:
                raise Refused("wrong-sender", f"from '{header['from']}'")
            store = Store(self.root, header["run"], self.name)
            with store.locked():
                self._verify(envelope, header, store)
                if header["kind"] == "join":
                    return self._reply(header, self._declaration())
                return self._once(envelope, header, store)
        except Refused as refused:
            self._log(header, f"refused ({refused.code}): {refused}")
            return self._reply(header, {"kind": "refused", "code": refused.code})
        except Exception as error:
            self._log(header, traceback.format_exc())
            code = "unlike" if isinstance(error, ConfigError | DataError) else "failed"
            return self._reply(header, {"kind": "refused", "code": code})

    def _verify(self, envelope: Envelope, header: Header, store: Store) -> None:
        about = store.read("about.json", {})
        public = self.server_key or about.get("server") or header.get("server")
        if not isinstance(public, str) or not same_key(public, header.get("server") or public):
            raise Refused("bad-signature", "the server's key is not the known one")
        guard.verify(envelope, header, public)
        if about.get("server") != public:
            store.write("about.json", {**about, "server": public})

    def _declaration(self) -> Header:
        declared = vars(declare(self.data))
        secret = seal.exchange_key_at(self.root / "exchange.key")
        return {"kind": "joined", "declares": declared, "card": seal.card(self.name, secret, self.identity)}

    def _once(self, envelope: Envelope, header: Header, store: Store) -> Envelope:
        asked = request_digest(header)
        last = store.last_answer()
        if last is not None:
            previous, answer = last
            if previous["request"] == asked:
                return self._repeat(previous, answer, header, store)
            if (header["life"], header["round"]) <= (previous["life"], previous["round"]):
                raise Refused("replay", f"round {header['round']}, after an answer for round {previous['round']}")
        if header["kind"] == "finish":
            self._finish(header, store)
            return self._reply(header, {"kind": "finished"})
        if header["kind"] == "ask":
            return self._ask(header, asked, store)
        if header["kind"] == "offer":
            return self._offer(envelope, header, asked, store)
        if header["kind"] != "round":
            raise Refused("bad-header", f"unknown kind '{header['kind']}'")
        return self._round(envelope, header, asked, store)

    def _repeat(self, previous: Header, answer: Envelope, header: Header, store: Store) -> Envelope:
        """Return the stored answer; it is signed again if the server has restarted since."""
        if previous["life"] != header["life"]:
            answer = guard.sign_envelope({**previous, "life": header["life"]}, answer.body, self.identity)
            store.commit(answer)
        return answer

    def _round(self, envelope: Envelope, header: Header, asked: str, store: Store) -> Envelope:
        begin = time.perf_counter()
        number, trains, evaluates = header["round"], bool(header["train"]), bool(header["evaluate"])
        workbench = self._workbench(header)
        neighbourhood, about = self._neighbourhood(header, store)
        at, private = store.load(header["base"], _initial(workbench, neighbourhood))
        reply: Header = {"kind": "answer", "request": asked, "base": header["base"]}
        place: RemoteServer | OwnServer
        deploy: Tree = ()
        down: Tree = None
        offers: dict[int, Tree] = {}
        if neighbourhood is None:
            content = guard.open_body(envelope, workbench.message_form(train=trains, deploy=evaluates))
            deploy, down = content.get("deploy"), content.get("train")
            place = RemoteServer(deploy, content.get("shared"))
        else:
            mail, offered = self._open_mail(envelope, header, workbench, neighbourhood, private)
            offers, bad = self._read_offers(offered, header, workbench, neighbourhood, private)
            reply["refused"] = bad
            if header.get("caught_up"):
                private = private._replace(copy=store.copy_before(number, private.copy))
            else:
                private, refused = self._read_mail(mail, header, workbench, neighbourhood, at, private)
                reply["refused"] += refused
            place = OwnServer(neighbourhood.index, offers)
            store.write("about.json", about)
        history = store.read("history.json", [])
        if evaluates:
            if neighbourhood is not None:
                deploy = workbench.deploy_from_copy(number - 1, private, OwnServer(neighbourhood.index, offers))
            reply["metrics"] = workbench.evaluate(number - 1, private, place)
            history = [row for row in history if row["round"] < number - 1]
            history.append({"round": number - 1, **reply["metrics"]})
            candidate = {"client": private.client, "deploy": deploy}
            store.keep_candidate("candidate", number - 1, candidate, header["best"])
            store.keep_candidate("alone", number - 1, {"alone": private.alone}, header["best_alone"])
        body: dict[str, Tree] = {}
        if trains:
            place = RemoteServer(down) if neighbourhood is None else OwnServer(neighbourhood.index, offers)
            private, up, info, alone_info = workbench.train(number, private, place)
            body = {"info": info, "alone_info": alone_info}
            if neighbourhood is None:
                body["up"] = up
            else:
                secret = seal.exchange_key_at(self.root / "exchange.key")
                letters = peer_mail.write(neighbourhood, secret, header["run"], number, up)
                reply["mail"] = [[to, len(data)] for to, data in letters.items()]
                body["mail"] = {str(i): as_leaf(data) for i, data in enumerate(letters.values())}
                private = private._replace(up=routes.own_part(up, neighbourhood.index), spoke=torch.tensor(True))
        elif neighbourhood is not None:
            private = private._replace(spoke=torch.tensor(False))
        reply["seconds"] = time.perf_counter() - begin
        answer = self._reply(header, reply, wire.encode(body))
        store.write("history.json", history)
        store.save(number, private)
        store.commit(answer)
        return answer

    def _ask(self, header: Header, asked: str, store: Store) -> Envelope:
        """Tell whom this peer asks. That depends on its own last message, and on who took part; not on mail."""
        workbench, neighbourhood, at, private = self._peer(header, store)
        copy = self._read_mail({}, header, workbench, neighbourhood, at, private)[0].copy
        train, evaluate = bool(header["train"]), bool(header["evaluate"])
        owners = workbench.asks(header["round"], copy, neighbourhood.index, train=train, evaluate=evaluate)
        names = sorted(neighbourhood.names[owner] for owner in owners)
        return self._reply(header, {"kind": "asks", "request": asked, "asks": names})

    def _offer(self, envelope: Envelope, header: Header, asked: str, store: Store) -> Envelope:
        """Read the mail, and offer to those who ask what the copy of the server then has of this peer."""
        workbench, neighbourhood, at, private = self._peer(header, store)
        askers = header.get("askers")
        if not isinstance(askers, list) or not {*askers} <= neighbourhood.near.keys():
            raise Refused("wrong-receiver", "sites ask that are not neighbours")
        mail, _ = self._open_mail(envelope, header, workbench, neighbourhood, private)
        private, refused = self._read_mail(mail, header, workbench, neighbourhood, at, private)
        copy = private.copy
        store.keep_copy(header["round"], copy)
        secret, offer = seal.exchange_key_at(self.root / "exchange.key"), workbench.offer(copy, neighbourhood.index)
        letters = peer_mail.write_offer(neighbourhood, secret, header["run"], header["round"], offer, askers)
        body = wire.encode({"mail": {str(i): as_leaf(data) for i, data in enumerate(letters.values())}})
        listed = [[to, len(data)] for to, data in letters.items()]
        return self._reply(header, {"kind": "offers", "request": asked, "mail": listed, "refused": refused}, body)

    def _peer(self, header: Header, store: Store) -> tuple[Workbench, Neighbourhood, int, Private]:
        """Return what a peer needs to reply to an errand, which changes nothing on its disk."""
        workbench = self._workbench(header)
        neighbourhood, about = self._neighbourhood(header, store)
        if neighbourhood is None:
            raise Refused("bad-header", "only peers ask each other")
        store.write("about.json", about)
        return workbench, neighbourhood, *store.load(header["base"], _initial(workbench, neighbourhood), only_read=True)

    def _neighbourhood(self, header: Header, store: Store) -> tuple[Neighbourhood | None, Header]:
        about = store.read("about.json", {})
        if "peers" not in header:
            return None, about
        pinned = dict(about.get("peers", {}))
        neighbourhood = Neighbourhood.read(self.name, header["peers"], self.known, pinned)
        return neighbourhood, {**about, "peers": pinned}

    def _open_mail(
        self,
        envelope: Envelope,
        header: Header,
        workbench: Workbench,
        neighbourhood: Neighbourhood,
        private: Private,
    ) -> tuple[dict[tuple[int, str], bytes], dict[str, bytes]]:
        """Return the letters in a message, by round and sender, and the offers, by sender; all still sealed."""
        try:
            letters = [(int(round), str(sender), int(size)) for round, sender, size in header["mail"]]
            offers = [(str(sender), int(size)) for sender, size in header.get("offers", [])]
        except (TypeError, KeyError, ValueError) as error:
            raise Refused("bad-header", "the list of mail cannot be read") from error
        offer = workbench.offer(private.copy, neighbourhood.index)
        form = {"mail": letter_sizes([size for *_, size in letters], routes.letter_form(private.up))}
        form["offers"] = letter_sizes([size for _, size in offers], offer)
        content = wire.decode(envelope.body, form)
        mail = {(round, sender): as_bytes(content["mail"][str(i)]) for i, (round, sender, _) in enumerate(letters)}
        return mail, {sender: as_bytes(content["offers"][str(i)]) for i, (sender, _) in enumerate(offers)}

    def _read_mail(
        self,
        mail: Mapping[tuple[int, str], bytes],
        header: Header,
        workbench: Workbench,
        neighbourhood: Neighbourhood,
        at: int,
        private: Private,
    ) -> tuple[Private, list[list[Any]]]:
        """Update the peer's copy of the server with its mail; also return [round, sender, code] of refused mail."""
        try:
            accepted = set(map(int, header["said"]))
            news = {(int(round), str(sender)) for round, sender in header["news"]}
        except (TypeError, KeyError, ValueError) as error:
            raise Refused("bad-header", "the news of neighbours cannot be read") from error
        secret = seal.exchange_key_at(self.root / "exchange.key")
        heard: dict[int, dict[int, Tree]] = {}
        refused = []
        for (round, sender), data in mail.items():
            try:
                peer, up = peer_mail.read(neighbourhood, secret, header["run"], (round, sender), data, private.up)
                guard.check_message(self.method, up, peer.train, self.norm_bound)
                guard.check_combines(self.method, private.copy, peer.index, up)
                heard.setdefault(round, {})[peer.index] = up
            except Refused as error:
                refused.append(self._refused_mail(header, round, sender, error))
        if isinstance(private.up, Addressed):  # those who wrote nothing to this site took part all the same
            for round, sender in news - mail.keys():
                if sender not in neighbourhood.near:
                    refused.append(self._refused_mail(header, round, sender, Refused("unknown-site")))
                    continue
                index = neighbourhood.near[sender].index
                heard.setdefault(round, {})[index] = routes.from_letter(None, neighbourhood.index, private.up)
        copy = private.copy
        for round in range(max(at, 1), header["round"]):
            messages = heard.get(round, {})
            if round == at and bool(private.spoke) and round in accepted:
                messages = {**messages, neighbourhood.index: private.up}
            copy = peer_mail.combine(workbench.method, copy, messages)
        return private._replace(copy=copy), refused

    def _read_offers(
        self,
        offered: Mapping[str, bytes],
        header: Header,
        workbench: Workbench,
        neighbourhood: Neighbourhood,
        private: Private,
    ) -> tuple[dict[int, Tree], list[list[Any]]]:
        """Open what this peer asked for, by the owner's number; also return [round, sender, code] of refused offers."""
        secret = seal.exchange_key_at(self.root / "exchange.key")
        form = workbench.offer(private.copy, neighbourhood.index)
        offers, refused = {}, []
        for sender, data in offered.items():
            try:
                route = (header["round"], sender)
                peer, offer = peer_mail.read_offer(neighbourhood, secret, header["run"], route, data, form)
                guard.check_finite(offer)
                guard.check_norm(offer, self.norm_bound)
                offers[peer.index] = offer
            except Refused as error:
                refused.append(self._refused_mail(header, header["round"], sender, error))
        return offers, refused

    def _refused_mail(self, header: Header, round: int, sender: str, error: Refused) -> list[Any]:
        self._log(header, f"mail of '{sender}' in round {round} refused ({error.code}): {error}")
        return [round, sender, error.code]

    def _finish(self, header: Header, store: Store) -> None:
        workbench = self._workbench(header)
        site_folder.write(self.name, workbench, store, header["selected"], header["selected_alone"])

    def _workbench(self, header: Header) -> Workbench:
        key = json.dumps(header.get("facts"), sort_keys=True)
        if key not in self._workbenches:
            facts = FederationFacts.read(header.get("facts"))
            self._workbenches[key] = Workbench.build(self.config, self.method, self.model, facts, self.data)
        return self._workbenches[key]

    def _reply(self, header: Header, reply: Header, body: bytes = b"") -> Envelope:
        route = {"run": header.get("run", ""), "life": header.get("life", 0), "round": header.get("round", 0)}
        return guard.sign_envelope({**route, "from": self.name, "to": SERVER, **reply}, body, self.identity)

    def _log(self, header: Header, words: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "site.log").open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"{when} {header.get('run', '?')} round {header.get('round', '?')}: {words.rstrip()}\n")


def _initial(workbench: Workbench, neighbourhood: Neighbourhood | None) -> Private:
    if neighbourhood is None:
        return workbench.initial()
    return workbench.initial_of_peer(neighbourhood.keys, len(neighbourhood.near) + 1, neighbourhood.index)


def request_digest(header: Header) -> str:
    """Return a digest of what is asked: the header without the number of server restarts."""
    asked = {key: value for key, value in header.items() if key != "life"}
    return wire.digest(json.dumps(asked, sort_keys=True).encode())


def one_client(federation: Federation, name: str) -> Federation:
    """Return one client's examples as a federation with one client."""
    split = federation.clients[name]
    parts = [torch.from_numpy(part) for part in (split.train, split.validation, split.test)]
    where, start, places = torch.cat(parts), 0, []
    for part in parts:
        places.append(torch.arange(start, start + len(part)).numpy())
        start += len(part)
    weights = None if federation.weights is None else federation.weights[where]
    known = {name: federation.preprocessing[name]} if name in federation.preprocessing else {}
    return dataclasses.replace(
        federation,
        x=federation.x[where],
        y=federation.y[where],
        weights=weights,
        clients={name: type(split)(*places)},
        preprocessing=known,
        files={},
    )
