"""A site: one envelope in, one envelope out. All it needs between messages is on its own disk.

A message of round t names its `base`, the last round of this site that the server accepted: the site starts from its
state after that one. Work that the server did not take (it came late, or the server died) is thus as if never done.
The same message again is answered from the store.
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

from coterie.data.federation import Federation
from coterie.deploy import guard, post, seal, sitefolder, wire
from coterie.deploy.facts import Facts, declare
from coterie.deploy.guard import SERVER
from coterie.deploy.keys import Identity, same_key
from coterie.deploy.places import Elsewhere, Own
from coterie.deploy.post import Circle
from coterie.deploy.refused import Refused
from coterie.deploy.store import Store
from coterie.deploy.wire import Envelope, as_bytes, as_leaf
from coterie.deploy.work import Bench, Private
from coterie.errors import ConfigError, DataError
from coterie.experiment.config import Config
from coterie.experiment.setup import Model
from coterie.hyper import AnyMethod
from coterie.tree import Tree

Header = dict[str, Any]


@dataclass
class Site:
    name: str
    config: Config
    method: AnyMethod
    model: Model
    data: Federation  # of this one client
    identity: Identity
    root: Path  # its own folder
    server_key: str | None = None  # None: the first that speaks for a run
    known: Mapping[str, str] = field(default_factory=dict)  # other sites' public keys, for mail between peers
    norm_bound: float = 1e6  # of mail from peers
    _benches: dict[str, Bench] = field(default_factory=dict, repr=False)

    def answer(self, envelope: Envelope) -> Envelope:
        """Never raises: what goes wrong is told in a code, and in words in the site's log."""
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
            raise Refused("bad-signature", "the server's key is not the one known")
        guard.verify(envelope, header, public)
        if about.get("server") != public:
            store.write("about.json", {**about, "server": public})

    def _declaration(self) -> Header:
        told = vars(declare(self.data))
        secret = seal.exchange_key_at(self.root / "exchange.key")
        return {"kind": "joined", "declares": told, "card": seal.card(self.name, secret, self.identity)}

    def _once(self, envelope: Envelope, header: Header, store: Store) -> Envelope:
        asked = request_digest(header)
        last = store.last_answer()
        if last is not None:
            said, answer = last
            if said["request"] == asked:
                return self._again(said, answer, header, store)
            if (header["life"], header["round"]) <= (said["life"], said["round"]):
                raise Refused("replay", f"round {header['round']}, after an answer for round {said['round']}")
        if header["kind"] == "finish":
            self._finish(header, store)
            return self._reply(header, {"kind": "finished"})
        if header["kind"] != "round":
            raise Refused("bad-header", f"unknown kind '{header['kind']}'")
        return self._round(envelope, header, asked, store)

    def _again(self, said: Header, answer: Envelope, header: Header, store: Store) -> Envelope:
        """The same answer, to the same question; signed anew if the server has started again since."""
        if said["life"] != header["life"]:
            answer = guard.seal_header({**said, "life": header["life"]}, answer.body, self.identity)
            store.commit(answer)
        return answer

    def _round(self, envelope: Envelope, header: Header, asked: str, store: Store) -> Envelope:
        begin = time.perf_counter()
        number, trains, evaluates = header["round"], bool(header["train"]), bool(header["evaluate"])
        bench = self._bench(header)
        circle, about = self._circle(header, store)
        initial = bench.initial() if circle is None else bench.initial_peer(circle.keys, len(circle.near) + 1)
        at, private = store.load(header["base"], initial)
        told: Header = {"kind": "answer", "request": asked, "base": header["base"]}
        place: Elsewhere | Own
        deploy: Tree = ()
        down: Tree = None
        if circle is None:
            content = guard.open_body(envelope, bench.arriving(train=trains, deploy=evaluates))
            deploy, down = content.get("deploy"), content.get("train")
            place = Elsewhere(deploy, content.get("shared"))
        else:
            private, told["refused"] = self._hear(envelope, header, bench, circle, at, private)
            place = Own(circle.index)
            store.write("about.json", about)
        history = store.read("history.json", [])
        if evaluates:
            if circle is not None:
                deploy = bench.deployed(number - 1, private, Own(circle.index))
            told["metrics"] = bench.evaluate(number - 1, private, place)
            history = [row for row in history if row["round"] < number - 1]
            history.append({"round": number - 1, **told["metrics"]})
            candidate = {"client": private.client, "deploy": deploy}
            store.keep_candidate("candidate", number - 1, candidate, header["best"])
            store.keep_candidate("alone", number - 1, {"alone": private.alone}, header["best_alone"])
        body: dict[str, Tree] = {}
        if trains:
            place = Elsewhere(down) if circle is None else Own(circle.index)
            private, up, info, alone_info = bench.train(number, private, place)
            body = {"info": info, "alone_info": alone_info}
            if circle is None:
                body["up"] = up
            else:
                secret = seal.exchange_key_at(self.root / "exchange.key")
                letters = post.write(circle, secret, header["run"], number, up)
                told["mail"] = [[to, len(data)] for to, data in letters.items()]
                body["mail"] = {str(i): as_leaf(data) for i, data in enumerate(letters.values())}
                private = private._replace(up=up, spoke=torch.tensor(True))
        elif circle is not None:
            private = private._replace(spoke=torch.tensor(False))
        told["seconds"] = time.perf_counter() - begin
        answer = self._reply(header, told, wire.encode(body))
        store.write("history.json", history)
        store.save(number, private)
        store.commit(answer)
        return answer

    def _circle(self, header: Header, store: Store) -> tuple[Circle | None, Header]:
        about = store.read("about.json", {})
        if "peers" not in header:
            return None, about
        pinned = dict(about.get("peers", {}))
        circle = Circle.read(self.name, header["peers"], self.known, pinned)
        return circle, {**about, "peers": pinned}

    def _hear(
        self, envelope: Envelope, header: Header, bench: Bench, circle: Circle, at: int, private: Private
    ) -> tuple[Private, list[list[Any]]]:
        """The peer's copy after all rounds since its state, and whose mail was refused in which, and why."""
        try:
            letters = [(int(round), str(sender), int(size)) for round, sender, size in header["mail"]]
            said = set(map(int, header["said"]))
        except (TypeError, KeyError, ValueError) as error:
            raise Refused("bad-header", "the list of mail cannot be read") from error
        most = wire.limit(private.up) + post.OVERHEAD
        if any(not 0 <= size <= most for _, _, size in letters):
            raise Refused("too-large", f"mail of more than {most} bytes")
        form = {
            "mail": {str(i): torch.empty(each[2], dtype=torch.uint8, device="meta") for i, each in enumerate(letters)}
        }
        content = wire.decode(envelope.body, form)["mail"]
        secret = seal.exchange_key_at(self.root / "exchange.key")
        heard: dict[int, dict[int, Tree]] = {}
        refused = []
        for i, (round, sender, _) in enumerate(letters):
            try:
                data = as_bytes(content[str(i)])
                peer, up = post.read(circle, secret, header["run"], (round, sender), data, private.up)
                guard.check_message(self.method, up, peer.train, self.norm_bound)
                guard.check_combines(self.method, private.copy, peer.index, up)
                heard.setdefault(round, {})[peer.index] = up
            except Refused as error:
                self._log(header, f"mail of '{sender}' in round {round} refused ({error.code}): {error}")
                refused.append([round, sender, error.code])
        copy = private.copy
        for round in range(max(at, 1), header["round"]):
            messages = heard.get(round, {})
            if round == at and bool(private.spoke) and round in said:
                messages = {**messages, circle.index: private.up}
            copy = post.combine(bench.method, copy, messages)
        return private._replace(copy=copy), refused

    def _finish(self, header: Header, store: Store) -> None:
        bench = self._bench(header)
        sitefolder.write(self.name, bench, store, header["selected"], header["selected_alone"])

    def _bench(self, header: Header) -> Bench:
        told = json.dumps(header.get("facts"), sort_keys=True)
        if told not in self._benches:
            facts = Facts.read(header.get("facts"))
            self._benches[told] = Bench.build(self.config, self.method, self.model, facts, self.data)
        return self._benches[told]

    def _reply(self, header: Header, told: Header, body: bytes = b"") -> Envelope:
        route = {"run": header.get("run", ""), "life": header.get("life", 0), "round": header.get("round", 0)}
        return guard.seal_header({**route, "from": self.name, "to": SERVER, **told}, body, self.identity)

    def _log(self, header: Header, words: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "site.log").open("a", encoding="utf-8") as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"{when} {header.get('run', '?')} round {header.get('round', '?')}: {words.rstrip()}\n")


def request_digest(header: Header) -> str:
    """What is asked, whoever asks for how many times: the header without the count of the server's lives."""
    asked = {key: value for key, value in header.items() if key != "life"}
    return wire.digest(json.dumps(asked, sort_keys=True).encode())


def one_client(federation: Federation, name: str) -> Federation:
    """One client's own examples, as a federation of its own."""
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
