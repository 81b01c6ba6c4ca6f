"""The server waits for sites to join, runs the rounds, and can resume them. It has no data and knows no transport.

There is one message per round: message t asks a site to evaluate its model after round t - 1 and, if it is sampled, to
train round t. A round closes when all sites have answered or, after the deadline, when a quorum has; for the method,
the others were not sampled. After the last round follow one message to evaluate, and one with the selected round, upon
which each site writes its model to its own disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.core import rng, routes, tree
from coterie.core.errors import ConfigError
from coterie.core.method import Population
from coterie.core.toml import to_toml
from coterie.core.tree import Tree
from coterie.deploy import guard, outcome, wire
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.delivery import Delivery
from coterie.deploy.errands import Errands
from coterie.deploy.federation_facts import (
    FederationFacts,
    build_task,
    federation_without_data,
    gather_facts,
    message_forms,
)
from coterie.deploy.guard import SERVER
from coterie.deploy.intake import Answer, Forms, Intake
from coterie.deploy.joining import Joining
from coterie.deploy.keys import Identity
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import CODES, Refused
from coterie.deploy.site import request_digest
from coterie.deploy.wire import Envelope, as_leaf
from coterie.engine import Central, make_peers
from coterie.evaluation.metrics import default_metric
from coterie.experiment.conclude import write_tables
from coterie.experiment.config import Config
from coterie.experiment.result import Result
from coterie.experiment.run import _record, local_like
from coterie.experiment.setup import Model, Setup
from coterie.experiment.simulation import Round, Simulation
from coterie.methods.fields import AnyMethod
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

Record = dict[str, Any]


@dataclass
class Server:
    """The server of one federation."""

    config: Config
    method: AnyMethod
    model: Model
    transport: Transport
    identity: Identity
    out: Path
    rules: Rules
    known: Mapping[str, str] = field(
        default_factory=dict
    )  # sites' public keys; if there are any, other sites may not join
    say: Callable[[str], None] = lambda _: None

    def run(self, ledger: Ledger) -> Result:
        """Run all remaining rounds; `ledger` is new, or loaded from `out` to resume."""
        folder = RunFolder(self.out)
        resuming = bool(ledger.declared)
        if not (self.out / "config.toml").exists():
            folder.create(to_toml(self.config.to_file()))
        joining = Joining(ledger, self.transport, self.identity, self.known, self.rules, self.say)
        if resuming:
            ledger.life += 1
            ledger.save(self.out)
        joining.wait(self.out)
        rounds = Rounds.begin(self, ledger, joining, folder)
        ledger.rounds, ledger.metric = self.config.rounds, rounds.setup.metric
        ledger.save(self.out)
        for number in range(ledger.round + 1, self.config.rounds + 2):
            rounds.play(number)
        return rounds.finish()


@dataclass
class Rounds:
    """Runs the rounds of a federation whose members are known."""

    server: Server
    ledger: Ledger
    joining: Joining
    folder: RunFolder
    facts: FederationFacts
    setup: Setup
    sim: Simulation
    forms: Forms
    records: list[Record]
    alone: list[Record]  # records of training alone
    silent: set[str] = field(default_factory=set)  # did not answer last time, so they are not waited for
    errands: Errands | None = None  # what peers asked each other for in this round

    @classmethod
    def begin(cls, server: Server, ledger: Ledger, joining: Joining, folder: RunFolder) -> Rounds:
        """Build the model and state from what the sites declared, or restore them after `ledger.round`."""
        config, method = server.config, server.method
        facts = gather_facts(config, ledger.declared)
        if facts.audience > facts.size:
            raise ConfigError([f"clients_per_round = {config.clients_per_round}, but there are {facts.size} sites"])
        federation = federation_without_data(config, ledger.declared, facts)
        task = build_task(config, server.model, facts)
        peers = make_peers(config.topology, federation.names, config.seed)
        if peers is not None and not method.peer_to_peer:
            raise ConfigError([f"topology = {config.topology!r}: method {config.method} needs a server"])
        metric = config.select or default_metric(facts.classes)
        config = config.model_copy(update={"select": metric})
        setup = Setup(config, method, federation, task, metric, peers)
        keys = rng.keys_of(federation.names)
        people = Population(facts.size, facts.audience, task, keys)
        start: Tree = method.init_server(task.init(), people)
        up, info = message_forms(method, task, start, config, facts)
        alone_info: Tree = {}
        if config.reference and config.method != "local":
            alone_info = message_forms(local_like(method), task, (), config, facts)[1]
        names = federation.names
        near, offer = None, None
        if peers is not None:
            if routes.asked(method.dispatch(start, torch.tensor([0]), torch.Generator())) is not None:
                offer = tree.rows(method.offer(start, torch.tensor([0])), 0)
            near = {name: tuple(names[j] for j in peers.near[i] if j != i) for i, name in enumerate(names)}
            start = ()
        state = State(start, ())
        if ledger.round:
            state = folder.load(ledger.round, state)[0]
        sim = Simulation(method, task, federation, facts.plan(config), facts.audience, config.seed, state, Central())
        records = folder.read_rounds(ledger.round - 1)
        folder.rewrite_rounds(records)
        beside = RunFolder(server.out / "reference")
        alone = beside.read_rounds(ledger.round - 1) if alone_info else []
        if alone_info:
            if not (beside.path / "config.toml").exists():
                beside.create(to_toml(setup.with_method(local_like(method)).config.to_file()))
            beside.rewrite_rounds(alone)
        forms = Forms(up, info, alone_info, near, offer)
        return cls(server, ledger, joining, folder, facts, setup, sim, forms, records, alone)

    @property
    def names(self) -> tuple[str, ...]:
        return self.setup.federation.names

    @property
    def config(self) -> Config:
        return self.server.config

    def play(self, number: int) -> None:
        """Send message `number`, collect the answers, aggregate and commit the round."""
        begin = self.server.transport.now()
        last = number > self.config.rounds
        sampled = [] if last else self.sim.sample(number)
        previous = number - 1
        evaluating = previous > 0 and (previous % self.config.evaluate_every == 0 or last)
        training = frozenset(self.names[i] for i in sampled)
        asked = self.names if evaluating else sorted(training)
        self.errands = self._run_errands(number, sampled, list(asked), evaluating)
        letters, down = self._letters(number, sampled, list(asked), evaluating)
        answers = self._collect(number, letters, training)
        if evaluating:
            self._evaluated(answers)
        self._close_pending()
        if not last:
            self._aggregate(number, [i for i in sampled if self.names[i] in answers], answers, down)
        for name in answers:
            self.ledger.base[name] = number
        self.ledger.round = number
        if self.ledger.pending is not None:
            self.ledger.pending["seconds"] = self.server.transport.now() - begin
        self.ledger.mail.drop({name: self.ledger.base.get(name, 0) for name in self.names})
        self.folder.save(number, self.sim.state, self.ledger.best or None)
        self.ledger.save(self.server.out)
        self._show(number, answers, training)

    def finish(self) -> Result:
        """Send the selected round to every site, which writes its model, and write the server's run folder."""
        header = {"selected": self.ledger.best, "selected_alone": self.ledger.best_alone}
        number = self.config.rounds + 2
        letters = {name: self._sign(name, number, {"kind": "finish", **header}, b"") for name in self.names}
        self._deliver(number, letters, _finished, frozenset(), need=0)
        reference = None
        if self.alone:
            local = self.setup.with_method(local_like(self.server.method))
            beside = self.server.out / "reference"
            reference = outcome.conclude(local, beside, self.alone, self.ledger.best_alone, None)
            write_tables(reference, beside)
        result = outcome.conclude(self.setup, self.server.out, self.records, self.ledger.best, None, reference)
        write_tables(result, self.server.out)
        self.ledger.finished = True
        self.ledger.save(self.server.out)
        return result

    def _letters(
        self, number: int, sampled: list[int], asked: list[str], evaluating: bool
    ) -> tuple[dict[str, Envelope], Tree]:
        header = {"kind": "round", "best": self.ledger.best, "best_alone": self.ledger.best_alone}
        if self.setup.peers is not None:
            return {name: self._peer_letter(number, name, sampled, evaluating, header) for name in asked}, ()
        train = self._send(self.server.method.dispatch, sampled, "dispatch", number) if sampled else ()
        everyone = list(range(len(self.names)))
        deploy: Tree = ()
        if evaluating:
            deploy = self._send(self.server.method.deploy, everyone, "dispatch for evaluation", number - 1)
        shared = self.server.method.global_model(self.sim.state.server) if evaluating else None
        place = {client: row for row, client in enumerate(sampled)}
        letters = {}
        for name in asked:
            index = self.names.index(name)
            content: dict[str, Tree] = {}
            if index in place:
                content["train"] = tree.rows(train, place[index])
            if evaluating:
                content["deploy"] = tree.rows(deploy, index)
                content |= {} if shared is None else {"shared": shared}
            about = {**header, "train": index in place, "evaluate": evaluating, "base": self.ledger.base.get(name, 0)}
            letters[name] = self._sign(name, number, about, wire.encode(content))
        return letters, train

    def _run_errands(self, number: int, sampled: list[int], asked: list[str], evaluating: bool) -> Errands | None:
        """Let peers ask each other, if the method has them do so."""
        if self.forms.offer is None or self.forms.near is None:
            return None
        errands = Errands(self.ledger, number, self.forms.near, self.forms.offer)

        def deliver(letters: dict[str, Envelope], take: Callable[[str, Envelope, Record], bool]) -> None:
            if letters:
                self._deliver(number, letters, take, frozenset(letters), need=0)

        def about(name: str, kind: str) -> Record:
            training = self.names.index(name) in sampled
            return {"kind": kind, **self._about_peer(name), "train": training, "evaluate": evaluating}

        errands.ask({name: self._sign(name, number, about(name, "ask"), b"") for name in asked}, deliver)
        letters = {}
        for name, askers in sorted(errands.askers.items()):
            listed, content = self._mail(name)
            header = {**about(name, "offer"), "mail": listed, "askers": sorted(askers)}
            letters[name] = self._sign(name, number, header, wire.encode({"mail": content}))
        errands.fetch(letters, deliver)
        return errands

    def _peer_letter(self, number: int, name: str, sampled: list[int], evaluating: bool, header: Record) -> Envelope:
        caught_up = self.errands is not None and name in self.errands.caught_up
        listed, content = ([], {}) if caught_up else self._mail(name)
        offers = [] if self.errands is None else self.errands.of(name)
        about = {
            **header,
            **self._about_peer(name),
            "train": self.names.index(name) in sampled,
            "evaluate": evaluating,
            "mail": listed,
            "caught_up": caught_up,
            "offers": [[each.sender, len(each.data)] for each in offers],
        }
        boxes = {"mail": content, "offers": {str(i): as_leaf(each.data) for i, each in enumerate(offers)}}
        return self._sign(name, number, about, wire.encode(boxes))

    def _mail(self, name: str) -> tuple[list[list[Any]], Tree]:
        """Return a peer's mail that its state does not have yet: a list, and the letters."""
        mail = self.ledger.mail.of(name, self.ledger.base.get(name, 0))
        listed = [[each.round, each.sender, len(each.data)] for each in mail]
        return listed, {str(i): as_leaf(each.data) for i, each in enumerate(mail)}

    def _about_peer(self, name: str) -> Record:
        """Return what a peer is told of its neighbours in every message."""
        assert self.forms.near is not None
        base, heard = self.ledger.base.get(name, 0), self.ledger.mail.heard
        near = {
            other: [self.names.index(other), self.ledger.declared[other].train, self.ledger.cards[other]]
            for other in self.forms.near[name]
        }
        return {
            "base": base,
            "peers": {
                "index": self.names.index(name),
                "near": near,
                "keys": rng.keys_of(self.names).tolist(),
                "sealed": self.server.rules.sealed,
            },
            "said": [round for round, names in heard.items() if name in names],
            "news": [
                [round, other] for round, names in heard.items() if round >= base for other in names if other in near
            ],
        }

    def _send(self, send: Any, ids: list[int], purpose: str, round: int) -> Tree:
        def draw() -> torch.Generator:
            return rng.torch_generator(self.config.seed, purpose, round)

        return self.sim.place.send(self.server.method, send, self.sim.state.server, torch.tensor(ids), draw)

    def _sign(self, name: str, number: int, header: Record, body: bytes) -> Envelope:
        route = {"run": self.ledger.run, "life": self.ledger.life, "round": number, "from": SERVER, "to": name}
        facts = {"facts": vars(self.facts), "server": self.server.identity.public}
        return guard.sign_envelope({**route, **header, **facts}, body, self.server.identity)

    def _collect(self, number: int, letters: dict[str, Envelope], training: frozenset[str]) -> dict[str, Answer]:
        asked = {name: request_digest(guard.read_header(letter)) for name, letter in letters.items()}
        now = self.server.method, self.sim.state.server
        intake = Intake(self.ledger, *now, number, asked, training, self.forms, self.server.rules.norm_bound)

        def take(name: str, envelope: Envelope, header: Record) -> bool:
            intake.take(name, envelope, header)
            return True

        need = max(1, math.ceil(self.server.rules.quorum * len(training or letters)))
        self._deliver(number, letters, take, training or frozenset(letters), need)
        return intake.answers

    def _deliver(
        self,
        number: int,
        letters: dict[str, Envelope],
        take: Callable[[str, Envelope, Record], bool],
        counted: frozenset[str],
        need: int,
    ) -> None:
        """Send messages, and pass the answers to `take` until the round may close."""
        Delivery(self.server.transport, self.joining, self.ledger, self.server.rules, self.server.out, self.silent).run(
            number, letters, take, counted, need
        )

    def _evaluated(self, answers: Mapping[str, Answer]) -> None:
        """Add the metrics to the last round's record, and update the best round."""
        for which, records, record, local in (
            ("own", self.records, self.ledger.pending, False),
            ("alone", self.alone, self.ledger.pending_alone, True),
        ):
            if record is None:
                continue
            metrics = [answers[name].metrics.get(which) if name in answers else None for name in self.names]
            record |= outcome.scores(self.setup, metrics)
            best = self.ledger.best_alone if local else self.ledger.best
            old = next((each for each in records if each["round"] == best), None)
            if outcome.better(self.setup.metric, record, old):
                if local:
                    self.ledger.best_alone = record["round"]
                else:
                    self.ledger.best = record["round"]

    def _close_pending(self) -> None:
        if self.ledger.pending is not None:
            self.records.append(self.ledger.pending)
            self.folder.append_round(self.ledger.pending)
            self.ledger.pending = None
        if self.ledger.pending_alone is not None:
            self.alone.append(self.ledger.pending_alone)
            RunFolder(self.server.out / "reference").append_round(self.ledger.pending_alone)
            self.ledger.pending_alone = None

    def _aggregate(self, number: int, ids: list[int], answers: Mapping[str, Answer], down: Tree) -> None:
        accepted = [answers[self.names[i]] for i in ids]
        info = tree.stack([each.info for each in accepted])
        heard = ids if self.config.clients_heard is None else self.sim._smallest(
            ids, self.config.clients_heard, "hearing", number
        )  # fmt: skip
        method, place = self.server.method, self.sim.place
        up = down_bytes = 0
        server_info: Tree = {}
        if self.setup.peers is None:
            messages = tree.stack([answers[self.names[i]].up for i in heard])
            new = place.aggregate(method, self.sim.state.server, torch.tensor(heard), messages)
            self.sim.state = State(new, ())
            server_info = place.info(method, new)
            rows = torch.tensor([self.sim.sample(number).index(i) for i in ids])
            everyone = tree.stack([each.up for each in accepted])
            up, down_bytes = place.traffic(method, torch.tensor(ids), everyone, tree.rows(down, rows))
        else:
            for i in ids:
                for to, data in answers[self.names[i]].mail.items():
                    self.ledger.mail.put(number, self.names[i], to, data)
                    up += len(data)
            down_bytes = 0 if self.errands is None else self.errands.nbytes
            self.ledger.mail.heard[number] = [self.names[i] for i in heard]
        result = Round(ids, info, server_info, up, down_bytes)
        self.ledger.pending = _record(number, result, self.setup.federation)
        if self.forms.alone_info:
            alone = Round(ids, tree.stack([each.alone_info for each in accepted]), {}, 0, 0)
            self.ledger.pending_alone = _record(number, alone, self.setup.federation)
        for i in ids:
            status = self.ledger.sites[self.names[i]]
            loss = answers[self.names[i]].info.get("loss")
            status.loss = None if loss is None else float(loss)

    def _show(self, number: int, answers: Mapping[str, Answer], training: frozenset[str]) -> None:
        for name, answer in answers.items():
            status = self.ledger.sites[name]
            status.state, status.round = "answered", min(number, self.config.rounds)
            metric = answer.metrics.get("own", {}).get("validation", {}).get(self.setup.metric)
            status.metric = status.metric if metric is None else metric
        told = {} if self.errands is None else self.errands.refused
        for name, refused in [*told.items(), *((name, answer.refused) for name, answer in answers.items())]:
            for round, sender, code in refused:
                if sender in self.ledger.sites:
                    self.ledger.sites[sender].refuse(f"{code} (by {name}, round {round})")
        self.ledger.show(self.server.out)
        if training:
            answered = len([name for name in training if name in answers])
            self.server.say(f"round {number}: {answered} of {len(training)} sites answered")


def _finished(name: str, envelope: Envelope, header: Record) -> bool:
    if header["kind"] == "refused":
        code = str(header.get("code"))
        raise Refused(code if code in CODES else "failed", "the site could not write its model")
    return bool(header["kind"] == "finished")
