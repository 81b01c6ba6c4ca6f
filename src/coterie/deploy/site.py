"""A site answers one envelope with another. Everything that it needs between messages is on its own disk.

A message of round t has a `base`: the last round for which the server accepted this site's answer. The site starts from
its state after that round, so work that the server did not accept (it came late, or the server died) does not count. If
the same message arrives again, the stored answer is sent again.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import routes, tree
from coterie.core.errors import CheckpointError, ConfigError, DataError
from coterie.core.tree import Tree
from coterie.data.federation import Federation
from coterie.deploy import guard, messages, peer_mail, seal, site_folder, site_peers, site_trials, wire
from coterie.deploy.federation_facts import FederationFacts, check_facts, declare
from coterie.deploy.keys import Identity, same_key
from coterie.deploy.messages import SERVER, Header, Masking, Refusal, Reply, ToSite
from coterie.deploy.refused import Refused
from coterie.deploy.schema import problem_of_name
from coterie.deploy.secure.agreement import Form
from coterie.deploy.secure.at_site import LETTER_BYTES, SiteMasks
from coterie.deploy.site_roles import OwnServer, RemoteServer
from coterie.deploy.store import About, Store
from coterie.deploy.wire import Envelope, as_leaf
from coterie.deploy.work import Workbench
from coterie.experiment.building import Model
from coterie.experiment.config import Config
from coterie.methods.fields import AnyMethod
from coterie.storage import files


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
    secure: bool = False  # messages are summed securely, and never sent otherwise
    threshold: float = 2 / 3  # share of a round's sites that must be heard before this site helps to recover a sum
    _workbenches: dict[str, Workbench] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if (problem := problem_of_name(self.name)) is not None:
            raise ConfigError([f"no site can be called {ascii(self.name)[:100]}: {problem}"])

    def answer(self, envelope: Envelope) -> Envelope:
        """Answer a message. Never raises: the answer has an error code, and the site's log has the details."""
        with files.private():
            return self._answer(envelope)

    def _answer(self, envelope: Envelope) -> Envelope:
        message: ToSite | None = None
        try:
            message = guard.read_at_site(envelope)
            if message.receiver != self.name and not isinstance(message, messages.Join):
                raise Refused("wrong-receiver", f"for '{message.receiver}'")
            if message.sender != SERVER:
                raise Refused("wrong-sender", f"from '{message.sender}'")
            store = Store(self.root, message.run, self.name)
            self._verify(envelope, message, store.about())
            with store.locked():
                about = store.about()
                self._verify(envelope, message, about)
                if about.server is None:
                    store.keep_about(about.model_copy(update={"server": message.server}))
                if isinstance(message, messages.Join):
                    return self._declaration(message)
                return self._once(envelope, message, store)
        except Refused as refused:
            self.log(message, f"refused ({refused.code}): {refused}")
            return self._refuse(message, refused.code)
        except Exception as error:
            self.log(message, traceback.format_exc())
            ours = ((CheckpointError, "disk"), (OSError, "disk"), (ConfigError, "unlike"), (DataError, "unlike"))
            return self._refuse(message, next((code for kind, code in ours if isinstance(error, kind)), "failed"))

    def _verify(self, envelope: Envelope, message: ToSite, about: About) -> None:
        public = self.server_key or about.server or message.server
        if not same_key(public, message.server):
            raise Refused("bad-signature", "the server's key is not the known one")
        guard.verify(envelope, message, public)

    def _declaration(self, message: messages.Join) -> Envelope:
        secret = seal.exchange_key_at(self.root / "exchange.key")
        card = seal.make_card(self.name, secret, self.identity)
        return self.sign(messages.Joined(**self.route(message), declares=declare(self.data), card=card))

    def _once(self, envelope: Envelope, message: ToSite, store: Store) -> Envelope:
        if isinstance(message, messages.Unmask):
            guard.open_body(envelope, {})
            seeds, secrets = self._masks(store).unmask(message)
            told = messages.Unmasked(**self.route(message), request=message.digest, seeds=seeds, keys=secrets)
            return self.sign(told)
        last = store.last_answer(self.identity.public)
        if last is not None:
            previous, answer = last
            if previous.request == message.digest:
                return self._repeat(previous, answer, message, store)
            if (message.life, message.round) <= (previous.life, previous.round):
                raise Refused("replay", f"round {message.round}, after an answer for round {previous.round}")
        self._check_promises(message)
        if isinstance(message, messages.Tries):
            reply, body = site_trials.try_all(self, envelope, message, store)
            answer = self.sign(reply, wire.encode(body))
            store.commit(answer)
            return answer
        if isinstance(message, messages.Judge):
            guard.open_body(envelope, {})
            return self.sign(site_trials.judge(self, message, store))
        if isinstance(message, messages.Close):
            guard.open_body(envelope, {})
            site_trials.close(store)
            return self.sign(messages.Finished(**self.route(message)))
        if isinstance(message, messages.Finish):
            guard.open_body(envelope, {})
            self._finish(message, store)
            return self.sign(messages.Finished(**self.route(message)))
        if isinstance(message, messages.Ask):
            guard.open_body(envelope, {})
            return site_peers.answer_ask(self, message, store)
        if isinstance(message, messages.Keys | messages.Shares):
            guard.open_body(envelope, {})
            return self._agree(message, store)
        if isinstance(message, messages.Offer):
            return site_peers.answer_offer(self, envelope, message, store)
        assert isinstance(message, messages.Round)
        return self._round(envelope, message, store)

    def _check_promises(self, message: ToSite) -> None:
        """Refuse what would send a message that is not masked, or tell of data beside what privacy has planned."""
        trial = isinstance(message, messages.Tries | messages.Judge)
        peers = self.config.topology != "server" and isinstance(message, messages.Ask | messages.Offer | messages.Round)
        if self.secure and (trial or peers):
            raise Refused("masks", "this site sends what is summed securely, and nothing else")
        if trial and self.config.privacy is not None:
            raise Refused("unlike", "with privacy, a site takes part in no search: its budget is that of one training")

    def _repeat(self, previous: Reply, answer: Envelope, message: ToSite, store: Store) -> Envelope:
        """Return the stored answer; it is signed again if the server has restarted since."""
        if previous.life != message.life:
            answer = guard.sign(previous.model_copy(update={"life": message.life}), answer.body, self.identity)
            store.commit(answer)
        return answer

    def _round(self, envelope: Envelope, message: messages.Round, store: Store) -> Envelope:
        number, trains, evaluates = message.round, message.train, message.evaluate
        workbench = self.workbench(message.facts)
        neighbourhood, about = site_peers.neighbourhood_of(self, message, store)
        at, private = store.load(message.base, site_peers.initial_of(workbench, neighbourhood))
        reply = messages.Answer(**self.route(message), request=message.digest)
        place: RemoteServer | OwnServer
        deploy: Tree = ()
        down: Tree = None
        offers: dict[int, Tree] = {}
        if neighbourhood is None:
            if (message.masking is not None) != (self.secure and trains):
                raise Refused("masks", "the site sends what is summed securely, or the run does not: they do not agree")
            form = workbench.message_form(train=trains, deploy=evaluates)
            if message.masking is not None:
                others = len(message.masking.senders) - 1
                form["shares"] = torch.zeros(max(others, 0), LETTER_BYTES, dtype=torch.uint8)
            # Part by part: a frozen parameter may be called as a part is.
            content = guard.open_body(envelope, {part: workbench.task.sent(each) for part, each in form.items()})
            guard.check_finite(content)
            guard.check_norm(content, self.norm_bound)
            content = tree.filled(content, form)
            deploy, down = content.get("deploy"), content.get("train")
            place = RemoteServer(deploy, content.get("shared"))
        else:
            mail, offered = site_peers.open_mail(self, envelope, message, workbench, neighbourhood, private)
            offers, refused = site_peers.read_offers(self, offered, message, workbench, neighbourhood, private)
            if message.caught_up:
                private = private._replace(copy=store.copy_before(number, private.copy))
            else:
                private, more = site_peers.read_mail(self, mail, message, workbench, neighbourhood, at, private)
                refused += more
            reply = reply.model_copy(update={"refused": tuple(refused)})
            place = OwnServer(neighbourhood.index, offers)
            store.keep_about(about)
        history = store.read("history.json", [])
        if evaluates:
            if neighbourhood is not None:
                deploy = workbench.deploy_from_copy(number - 1, private, OwnServer(neighbourhood.index, offers))
            metrics = workbench.evaluate(number - 1, private, place)
            if workbench.privacy.budget is None:  # metrics tell of examples, without noise
                reply = reply.model_copy(update={"metrics": metrics})
            history = [row for row in history if row["round"] < number - 1]
            history.append({"round": number - 1, **metrics})
            candidate = {"client": private.client, "deploy": deploy}
            store.keep_candidate("candidate", number - 1, candidate, message.best)
            store.keep_candidate("alone", number - 1, {"alone": private.alone}, message.best_alone)
        body: dict[str, Tree] = {}
        if trains:
            place = RemoteServer(down) if neighbourhood is None else OwnServer(neighbourhood.index, offers)
            self._spend(workbench, store)
            private, up, info, alone_info = workbench.train(number, private, place)
            body = {"info": info, "alone_info": alone_info}
            if message.masking is not None:
                body["up"] = {"masked": self._masked(message, message.masking, up, content["shares"], store)}
            elif neighbourhood is None:
                body["up"] = up
            else:
                secret = seal.exchange_key_at(self.root / "exchange.key")
                letters = peer_mail.write(neighbourhood, secret, message.run, number, up)
                reply = reply.model_copy(update={"mail": tuple((to, len(data)) for to, data in letters.items())})
                body["mail"] = {str(i): as_leaf(data) for i, data in enumerate(letters.values())}
                private = private._replace(up=routes.own_part(up, neighbourhood.index), spoke=torch.tensor(True))
        elif neighbourhood is not None:
            private = private._replace(spoke=torch.tensor(False))
        answer = self.sign(reply, wire.encode(body))
        store.write("history.json", history)
        store.save(number, private)
        store.commit(answer)
        return answer

    def _masks(self, store: Store) -> SiteMasks:
        return SiteMasks(store.path, self.name, self.identity, self.threshold)

    def _agree(self, message: messages.Keys | messages.Shares, store: Store) -> Envelope:
        """Answer with keys for masks, or with shares of this site's secrets."""
        if not self.secure:
            raise Refused("masks", "messages of this run are not summed securely")
        about = {**self.route(message), "request": message.digest}
        if isinstance(message, messages.Keys):
            public, seed, proof = self._masks(store).keys(message)
            return self.sign(messages.Key(**about, public=public, seed=seed, proof=proof))
        known, pinned = store.about(), dict(store.about().peers)
        secret = seal.exchange_key_at(self.root / "exchange.key")
        letters = self._masks(store).shares(message, secret, self.known, pinned)
        store.keep_about(known.model_copy(update={"peers": pinned}))
        return self.sign(messages.Shared(**about), wire.encode({"letters": letters}))

    def _masked(self, message: messages.Round, masking: Masking, up: Tree, letters: Tensor, store: Store) -> Tensor:
        form = Form.of(self.method, up, message.facts)
        words = form.encode(up, declare(self.data).train, self.norm_bound)
        secret = seal.exchange_key_at(self.root / "exchange.key")
        return self._masks(store).masked(message, masking, letters, secret, words)

    def _spend(self, workbench: Workbench, store: Store) -> None:
        """Count a round that is trained with privacy, before it is; refuse more than the budget was made for."""
        if workbench.privacy.budget is None:
            return
        trained = int(store.read("privacy.json", {"trained": 0})["trained"])
        if trained >= self.config.rounds:
            raise Refused("spent", f"{trained} rounds were trained, and epsilon is that of {self.config.rounds}")
        store.write("privacy.json", {"trained": trained + 1, **workbench.privacy.budget.to_json()})

    def _finish(self, message: messages.Finish, store: Store) -> None:
        workbench = self.workbench(message.facts)
        rounds = message.round - 2  # fewer than planned, if the server stopped early
        site_folder.write(self.name, workbench, store, message.selected, message.selected_alone, rounds)
        self._masks(store).forget()

    def workbench(self, facts: FederationFacts) -> Workbench:
        key = facts.model_dump_json()
        if key not in self._workbenches:
            check_facts(facts, declare(self.data))
            self._workbenches.clear()  # one at a time
            self._workbenches[key] = Workbench.build(self.config, self.method, self.model, facts, self.data)
        return self._workbenches[key]

    def route(self, message: ToSite) -> dict[str, Any]:
        """Return where an answer to a message belongs."""
        return {"run": message.run, "life": message.life, "round": message.round, "sender": self.name}

    def _refuse(self, message: ToSite | None, code: str) -> Envelope:
        about = {"sender": self.name} if message is None else self.route(message)
        return self.sign(Refusal(**about, code=code))

    def sign(self, message: Header, body: bytes = b"") -> Envelope:
        return guard.sign(guard.with_body(message, body), body, self.identity)

    def log(self, message: Header | None, words: str) -> None:
        run, number = ("?", "?") if message is None else (message.run, message.round)
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {run} round {number}: {words.rstrip()}\n"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with (self.root / "site.log").open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError:  # a full disk, for example
            sys.stderr.write(line)
