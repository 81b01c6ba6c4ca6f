"""The server waits for sites to join, runs the rounds, and can resume them. It has no data and knows no transport.

There is one message per round: message t asks a site to evaluate its model after round t - 1 and, if it is sampled, to
train round t. A round closes when all sites have answered or, after the deadline, when a quorum has; for the method,
the others were not sampled. After the last round follow one message to evaluate, and one with the selected round, upon
which each site writes its model to its own disk.

The server decides about early stopping, when message t has told the scores of round t - 1. Round t, which that message
had trained already, is then dropped: nothing of it is combined, evaluated or kept.
"""

from __future__ import annotations

import dataclasses
import functools
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
from coterie.deploy import guard, messages, outcome, wire
from coterie.deploy.contract import Rules, Transport
from coterie.deploy.delivery import Delivery, Take
from coterie.deploy.errands import Errands
from coterie.deploy.federation_facts import (
    FederationFacts,
    build_task,
    federation_without_data,
    gather_facts,
    message_forms,
)
from coterie.deploy.intake import Answer, Forms, Intake
from coterie.deploy.joining import Joining
from coterie.deploy.keys import Identity
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromSite, Neighbours
from coterie.deploy.refused import Refused
from coterie.deploy.schema import Part, Who
from coterie.deploy.secure import agreement, at_server
from coterie.deploy.secure.at_server import SecureSum
from coterie.deploy.wire import Envelope, as_leaf
from coterie.engine import Central, make_peers
from coterie.evaluation.scoring import default_metric
from coterie.experiment.conclude import write_tables
from coterie.experiment.config import Config
from coterie.experiment.execute import local_like
from coterie.experiment.privacy import install as privacy
from coterie.experiment.records import better, round_record, score_of
from coterie.experiment.result import Result
from coterie.experiment.setup import Model, Setup
from coterie.experiment.simulation import Round, Simulation
from coterie.experiment.stopping import Stop, early_stop
from coterie.experiment.take_home.held_out import TINY
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
        if ledger.stopped is None:
            ledger.rounds, ledger.metric = self.config.rounds, rounds.setup.metric
        ledger.save(self.out)
        few = sum(each.validation < TINY for each in ledger.declared.values())
        if self.config.take_home == "best" and few and not resuming:
            self.say(
                f"{few} of {len(ledger.declared)} sites have fewer than {TINY} validation examples, by which alone "
                "they choose what they take home: a larger 'validation' gives them more (docs/deploy.md)"
            )
        while ledger.round <= ledger.rounds:
            rounds.play(ledger.round + 1)
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
    secure_form: agreement.Form | None = None  # of messages that are summed securely
    secure: SecureSum | None = None  # this round's

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
        metric = config.select or default_metric(facts.target)
        config = config.model_copy(update={"select": metric})
        shapes = dataclasses.replace(federation, x=facts.blank(1))
        made = privacy.at_server(config, method, task, shapes, facts.plan(config))
        setup = Setup(config, method, federation, task, metric, peers, shares=made.shares, budget=made.budget)
        keys = rng.keys_of(federation.names)
        people = Population(facts.size, facts.audience, task, keys, seed=rng.server_seed(config.seed))
        start: Tree = method.init_server(task.init(), people)
        up, info = message_forms(method, task, start, config, facts)
        secure_form = None
        if server.rules.secure:
            if problems := agreement.problems(config, method, facts.size):
                raise ConfigError(problems)
            secure_form = agreement.Form.of(method, up, facts)
            up = secure_form.masked
        alone_info: Tree = {}
        if config.reference and config.method != "local":
            alone_info = message_forms(local_like(method), task, (), config, facts)[1]
        names = federation.names
        parts: set[Part] = {"validation", "test"}
        if method.global_model(start) is not None:
            parts |= {"global_validation", "global_test"}
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
        sim.sampler = config.sampler
        records = folder.read_rounds(ledger.round - 1)
        folder.rewrite_rounds(records)
        beside = RunFolder(server.out / "reference")
        alone = beside.read_rounds(ledger.round - 1) if alone_info else []
        if alone_info:
            if not (beside.path / "config.toml").exists():
                beside.create(to_toml(setup.with_method(local_like(method)).config.to_file()))
            beside.rewrite_rounds(alone)
        forms = Forms(up, info, alone_info, near, frozenset(parts), offer, secure_form is not None)
        rounds = cls(server, ledger, joining, folder, facts, setup, sim, forms, records, alone)
        rounds.secure_form = secure_form
        return rounds

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
        self.secure = self._agree(number, sampled)
        if self.secure is not None:
            sampled = [self.names.index(name) for name in self.secure.senders]  # the others are as if they were not
        previous = number - 1
        evaluating = previous > 0 and (previous % self.config.evaluate_every == 0 or last)
        training = frozenset(self.names[i] for i in sampled)
        asked = self.names if evaluating else sorted(training)
        self.errands = self._run_errands(number, sampled, list(asked), evaluating)
        requests, bodies, down = self._requests(number, sampled, list(asked), evaluating)
        if self.secure is None:
            answers = self._collect(number, requests, bodies, training)
        else:
            answers = self._sum(self.secure, number, requests, bodies, training)
        if evaluating:
            self._evaluated(answers)
        self._close_pending()
        stop = early_stop(self.config, self.setup.metric, self.records) if evaluating else None
        if stop is not None:
            self._stop(number, stop)
            return
        if not last:
            given = [i for i in sampled if self.names[i] in answers]
            for i in {*given} - {*self._aggregate(number, given, answers, down)}:
                name = self.names[i]
                self.ledger.sites[name].refuse("unusable")
                self.server.say(f"round {number}: {self.names[i]}'s message cannot be combined with the others'")
                del answers[name]  # as if it had not been sampled
        for name in answers:
            self.ledger.base[name] = number
        self.ledger.round = number
        if self.ledger.pending is not None:
            self.ledger.pending["seconds"] = self.server.transport.now() - begin
        self.ledger.mail.drop({name: self.ledger.base.get(name, 0) for name in self.names})
        self.folder.save(number, self.sim.state, self.ledger.best or None)
        self.ledger.save(self.server.out)
        at_server.drop_files(self.server.out)
        self._show(number, answers, training)

    def _stop(self, number: int, stop: Stop) -> None:
        """End the rounds: message `number` was the last one, and what was trained upon it is dropped."""
        self.ledger.round, self.ledger.rounds, self.ledger.stopped = number, stop.round, stop.to_json()
        self.folder.save(number, self.sim.state, self.ledger.best or None)
        self.ledger.save(self.server.out)
        at_server.drop_files(self.server.out)
        self.ledger.show(self.server.out)
        self.server.say(stop.sentence())

    def finish(self) -> Result:
        """Send the selected round to every site, which writes its model, and write the server's run folder."""
        number, facts = self.ledger.round + 1, self.facts  # by which a site knows how many rounds there were
        stopped = None if self.ledger.stopped is None else Stop(**self.ledger.stopped)
        selected, alone = self.ledger.best, self.ledger.best_alone
        requests = {
            name: messages.Finish(**self._route(number, name), facts=facts, selected=selected, selected_alone=alone)
            for name in self.names
        }
        self._deliver(number, requests, {}, self._take_finished, frozenset(), need=0)
        reference = None
        if self.alone:
            local = self.setup.with_method(local_like(self.server.method))
            beside = self.server.out / "reference"
            ended = None if stopped is None else stopped.of_reference(self.config.method)
            reference = outcome.conclude(local, beside, self.alone, self.ledger.best_alone, None, stopped=ended)
            write_tables(reference, beside)
        best = self.ledger.best
        result = outcome.conclude(self.setup, self.server.out, self.records, best, None, reference, stopped=stopped)
        write_tables(result, self.server.out)
        self.ledger.finished = True
        self.ledger.save(self.server.out)
        return result

    def _requests(
        self, number: int, sampled: list[int], asked: list[str], evaluating: bool
    ) -> tuple[dict[str, messages.Round], dict[str, bytes], Tree]:
        """Return the round's messages, their bodies, and what the method dispatches to all who were sampled."""
        if self.setup.peers is not None:
            pairs = {name: self._peer_request(number, name, sampled, evaluating) for name in asked}
            return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}, ()
        drawn = self.sim.sample(number) if sampled else []  # with those who did not agree on masks
        train = self._send(self.server.method.dispatch, drawn, "dispatch", number) if drawn else ()
        everyone = list(range(len(self.names)))
        deploy: Tree = ()
        if evaluating:
            deploy = self._send(self.server.method.deploy, everyone, "dispatch for evaluation", number - 1)
        shared = self.server.method.global_model(self.sim.state.server) if evaluating else None
        place = {client: row for row, client in enumerate(drawn) if client in sampled}
        requests, bodies = {}, {}
        for name in asked:
            index = self.names.index(name)
            content: dict[str, Tree] = {}
            if index in place:
                content["train"] = tree.rows(train, place[index])
            if evaluating:
                content["deploy"] = tree.rows(deploy, index)
                content |= {} if shared is None else {"shared": shared}
            masking = None
            if self.secure is not None and self.secure.total is None and index in place:
                masking, content["shares"] = self.secure.masking(name)
            bodies[name] = wire.encode(content)
            work = self._work(number, name, sampled, evaluating)
            message = messages.Round(**work, **self._best(), masking=masking)
            requests[name] = guard.with_body(message, bodies[name])
        return requests, bodies, train

    def _agree(self, number: int, sampled: list[int]) -> SecureSum | None:
        """Let the sampled sites agree on masks, if messages are summed securely; or go on where a server ended."""
        if self.secure_form is None or not sampled:
            return None
        session, route = at_server.new_session(self.ledger, number), functools.partial(self._route, number)
        secure = SecureSum(self.ledger, self.server.rules, self.secure_form, session, route, self.server.out)
        if not secure.resume(self.forms.info, self.forms.alone_info):
            need = math.ceil(self.server.rules.quorum * len(sampled))
            secure.agree([self.names[i] for i in sampled], functools.partial(self._deliver, number), need)
        return secure

    def _sum(
        self,
        secure: SecureSum,
        number: int,
        requests: Mapping[str, messages.Round],
        bodies: Mapping[str, bytes],
        training: frozenset[str],
    ) -> dict[str, Answer]:
        """Collect masked messages, and return the answers of the round with what is known of their sum."""
        if secure.total is None:
            secure.close(self._collect(number, requests, bodies, training, secure.least))
            secure.save()
        examples = {name: self.ledger.declared[name].train for name in secure.heard}
        return secure.unmask(functools.partial(self._deliver, number), examples)

    def _run_errands(self, number: int, sampled: list[int], asked: list[str], evaluating: bool) -> Errands | None:
        """Let peers ask each other, if the method has them do so."""
        if self.forms.offer is None or self.forms.near is None:
            return None
        errands = Errands(self.ledger, number, self.forms.near, self.forms.offer)

        def deliver(requests: Mapping[str, messages.Work], bodies: Mapping[str, bytes], take: Take) -> None:
            if requests:
                self._deliver(number, requests, bodies, take, frozenset(requests), need=0)

        errands.ask({name: messages.Ask(**self._work(number, name, sampled, evaluating)) for name in asked}, deliver)
        offers, bodies = {}, {}
        for name, askers in sorted(errands.askers.items()):
            listed, content = self._mail(name)
            bodies[name] = wire.encode({"mail": content})
            work = self._work(number, name, sampled, evaluating)
            offers[name] = guard.with_body(
                messages.Offer(**work, mail=listed, askers=tuple(sorted(askers))), bodies[name]
            )
        errands.fetch(offers, bodies, deliver)
        return errands

    def _peer_request(
        self, number: int, name: str, sampled: list[int], evaluating: bool
    ) -> tuple[messages.Round, bytes]:
        caught_up = self.errands is not None and name in self.errands.caught_up
        listed, content = ((), {}) if caught_up else self._mail(name)
        offers = [] if self.errands is None else self.errands.of(name)
        message = messages.Round(
            **self._work(number, name, sampled, evaluating),
            **self._best(),
            mail=listed,
            caught_up=caught_up,
            offers=tuple((each.sender, len(each.data)) for each in offers),
        )
        body = wire.encode({"mail": content, "offers": {str(i): as_leaf(each.data) for i, each in enumerate(offers)}})
        return guard.with_body(message, body), body

    def _mail(self, name: str) -> tuple[tuple[tuple[int, str, int], ...], Tree]:
        """Return a peer's mail that its state does not have yet: a list, and the letters."""
        mail = self.ledger.mail.of(name, self.ledger.base.get(name, 0))
        listed = tuple((each.round, each.sender, len(each.data)) for each in mail)
        return listed, {str(i): as_leaf(each.data) for i, each in enumerate(mail)}

    def _route(self, number: int, name: str) -> Record:
        about = {"run": self.ledger.run, "life": self.ledger.life, "round": number, "receiver": name}
        return {**about, "server": self.server.identity.public}

    def _best(self) -> Record:
        return {"best": self.ledger.best, "best_alone": self.ledger.best_alone}

    def _work(self, number: int, name: str, sampled: list[int], evaluating: bool) -> Record:
        """Return what a site is told in every message to work; a peer also hears of its neighbours."""
        base, index = self.ledger.base.get(name, 0), self.names.index(name)
        told = {"base": base, "train": index in sampled, "evaluate": evaluating, "facts": self.facts}
        told |= self._route(number, name)
        if self.forms.near is None:
            return told
        heard = self.ledger.mail.heard
        near = {
            other: (self.names.index(other), self.ledger.declared[other].train, self.ledger.cards[other])
            for other in self.forms.near[name]
        }
        keys = tuple(rng.keys_of(self.names).tolist())
        told["peers"] = Neighbours(index=index, near=near, keys=keys, sealed=self.server.rules.sealed)
        told["said"] = tuple(round for round, names in heard.items() if name in names)
        told["news"] = tuple(
            (round, other) for round, names in heard.items() if round >= base for other in names if other in near
        )
        return told

    def _send(self, send: Any, ids: list[int], purpose: str, round: int) -> Tree:
        def draw() -> torch.Generator:
            return rng.torch_generator(self.config.seed, purpose, round)

        return self.sim.place.send(self.server.method, send, self.sim.state.server, torch.tensor(ids), draw)

    def _collect(
        self,
        number: int,
        requests: Mapping[str, messages.Round],
        bodies: Mapping[str, bytes],
        training: frozenset[str],
        least: int = 1,
    ) -> dict[str, Answer]:
        now = self.server.method, self.sim.state.server
        intake = Intake(self.ledger, *now, number, requests, training, self.forms, self.server.rules.norm_bound)

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            intake.take(name, envelope, message)
            return True

        need = max(least, math.ceil(self.server.rules.quorum * len(training or requests)))
        self._deliver(number, requests, bodies, take, training or frozenset(requests), need)
        return intake.answers

    def _deliver(
        self,
        number: int,
        requests: Mapping[str, messages.FromServer],
        bodies: Mapping[str, bytes],
        take: Take,
        counted: frozenset[str],
        need: int,
    ) -> None:
        """Sign and send messages, and pass the answers to `take` until the round may close."""
        letters = {
            name: guard.sign(message, bodies.get(name, b""), self.server.identity) for name, message in requests.items()
        }
        Delivery(self.server.transport, self.joining, self.ledger, self.server.rules, self.server.out, self.silent).run(
            number, letters, take, counted, need
        )

    def _take_finished(self, name: str, envelope: Envelope, message: FromSite) -> bool:
        if (message.run, message.life, message.round) != (self.ledger.run, self.ledger.life, self.ledger.round + 1):
            raise Refused("late")
        guard.open_body(envelope, {})
        if isinstance(message, messages.Refusal):
            raise Refused(message.code, "the site could not write its model")
        return isinstance(message, messages.Finished)

    def _evaluated(self, answers: Mapping[str, Answer]) -> None:
        """Add the metrics to the last round's record, and update the best round."""
        whose: tuple[Who, Who] = ("own", "alone")
        pending = (self.records, self.ledger.pending, False), (self.alone, self.ledger.pending_alone, True)
        for which, (records, record, local) in zip(whose, pending, strict=True):
            if record is None:
                continue
            metrics = [answers[name].metrics.get(which) if name in answers else None for name in self.names]
            record |= outcome.scores(self.setup, metrics)
            best = self.ledger.best_alone if local else self.ledger.best
            about = (self.setup.metric, self.config.average)
            old = next((score_of(*about, each) for each in records if each["round"] == best), None)
            if old is None or self.config.takes_last or better(score_of(*about, record), old):
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

    def _heard(self, number: int, ids: list[int]) -> list[int]:
        if self.config.clients_heard is None:
            return ids
        return self.sim._smallest(ids, self.config.clients_heard, "hearing", number)

    def _combine(self, number: int, answers: Mapping[str, Answer], down: Tree, ids: list[int]) -> Tree:
        heard = self._heard(number, ids)
        ups = tree.stack([answers[self.names[i]].up for i in heard])
        if self.setup.shares is not None:
            sent = tree.rows(down, torch.tensor([self.sim.sample(number).index(i) for i in heard]))
            ups = self.setup.shares.apply(self.config.seed, number, [self.names[i] for i in heard], sent, ups)
        return self.sim.place.aggregate(self.server.method, self.sim.state.server, torch.tensor(heard), ups)

    def _aggregate(self, number: int, ids: list[int], answers: Mapping[str, Answer], down: Tree) -> list[int]:
        """Combine the answers of a round, and make its record; return whose answers were used."""
        method, place = self.server.method, self.sim.place
        up = down_bytes = 0
        server_info: Tree = {}
        new: Tree = ()
        if self.setup.peers is None:
            ids, new = guard.combine_usable(ids, functools.partial(self._combine, number, answers, down))
        accepted = [answers[self.names[i]] for i in ids]
        info = {} if self.setup.budget is not None else tree.stack([each.info for each in accepted])
        if self.setup.peers is None:
            self.sim.state = State(new, ())
            server_info = place.info(method, new)
            rows = torch.tensor([self.sim.sample(number).index(i) for i in ids])
            everyone = tree.stack([each.up for each in accepted])
            up, down_bytes = place.traffic(method, torch.tensor(ids), everyone, tree.rows(down, rows))
            if self.secure is not None:  # of each client the server knows the same
                up, server_info = self.secure.nbytes, {}
        else:
            for i in ids:
                for to, data in answers[self.names[i]].mail.items():
                    self.ledger.mail.put(number, self.names[i], to, data)
                    up += len(data)
            down_bytes = 0 if self.errands is None else self.errands.nbytes
            self.ledger.mail.heard[number] = [self.names[i] for i in self._heard(number, ids)]
        result = Round(ids, info, server_info, up, down_bytes)
        self.ledger.pending = round_record(number, result, self.setup.federation)
        if self.forms.alone_info:
            alone = Round(ids, tree.stack([each.alone_info for each in accepted]), {}, 0, 0)
            self.ledger.pending_alone = round_record(number, alone, self.setup.federation)
        for i in ids:
            status = self.ledger.sites[self.names[i]]
            loss = None if self.setup.budget is not None else answers[self.names[i]].info.get("loss")
            status.loss = None if loss is None else float(loss)
        return ids

    def _show(self, number: int, answers: Mapping[str, Answer], training: frozenset[str]) -> None:
        for name, answer in answers.items():
            status = self.ledger.sites[name]
            status.state, status.round = "answered", min(number, self.config.rounds)
            metric = answer.metrics.get("own", {}).get("validation", {}).get(self.setup.metric)
            status.metric = status.metric if metric is None else metric
        told = {} if self.errands is None else self.errands.refused
        for name, refused in [*told.items(), *((name, answer.refused) for name, answer in answers.items())]:
            for round, sender, code in refused:
                self.ledger.sites[sender].refuse(f"{code} (by {name})")
                self.server.say(f"round {number}: {name} refused mail of {sender} from round {round} ({code})")
        self.ledger.show(self.server.out)
        if training:
            answered = len([name for name in training if name in answers])
            self.server.say(f"round {number}: {answered} of {len(training)} sites answered")
