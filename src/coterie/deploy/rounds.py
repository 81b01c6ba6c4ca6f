"""The rounds of a federation at real sites, each with one message to every site that takes part.

Message t asks a site to evaluate its model after round t - 1 and, if it is sampled, to train round t. A round closes
when all sites have answered or, after the deadline, when a quorum has; for the method, the others were not sampled.
After the last round follow one message to evaluate, and one with the selected round, upon which each site writes its
model to its own disk.

The server decides about early stopping, when message t has told the scores of round t - 1. Round t, which that message
had trained already, is then dropped: nothing of it is combined, evaluated or kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from coterie.core import tree
from coterie.core.tree import Tree
from coterie.deploy import guard, messages, outcome, wire
from coterie.deploy.delivery import Take
from coterie.deploy.errands import Errands
from coterie.deploy.federation_facts import FederationFacts
from coterie.deploy.intake import Answer, Forms, Intake
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromSite
from coterie.deploy.messenger import Messenger
from coterie.deploy.refused import Refused
from coterie.deploy.round_records import RoundRecords
from coterie.deploy.round_requests import RoundRequests
from coterie.deploy.secure import agreement, at_server
from coterie.deploy.secure.at_server import SecureSum
from coterie.deploy.wire import Envelope
from coterie.experiment.conclude import write_tables
from coterie.experiment.config import Config
from coterie.experiment.execute import local_like
from coterie.experiment.result import Result
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Round, Simulation
from coterie.experiment.stopping import Stop, early_stop
from coterie.parts import robust
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

if TYPE_CHECKING:
    from coterie.deploy.server import Server


@dataclass
class Rounds:
    """Runs the rounds of a federation whose members are known."""

    server: Server
    ledger: Ledger
    messenger: Messenger
    folder: RunFolder
    facts: FederationFacts
    setup: Setup
    sim: Simulation
    forms: Forms
    asks: RoundRequests
    records: RoundRecords
    secure_form: agreement.Form | None  # of messages that are summed securely
    errands: Errands | None = None  # what peers asked each other for in this round
    secure: SecureSum | None = None  # this round's

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
        requests, bodies, down = self.asks.write(
            number, sampled, list(asked), evaluating=evaluating, secure=self.secure, errands=self.errands
        )
        if self.secure is None:
            answers = self._collect(number, requests, bodies, training)
        else:
            answers = self._sum(self.secure, number, requests, bodies, training)
        if evaluating:
            self.records.evaluate(answers)
        self.records.close()
        stop = early_stop(self.config, self.setup.metric, self.records.federated) if evaluating else None
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
            name: messages.Finish(
                **self.messenger.route(number, name), facts=facts, selected=selected, selected_alone=alone
            )
            for name in self.names
        }
        self.messenger.deliver(number, requests, {}, self._take_finished, frozenset(), need=0)
        reference = None
        if self.records.alone:
            local = self.setup.with_method(local_like(self.server.method))
            beside = self.records.reference.path
            ended = None if stopped is None else stopped.of_reference(self.config.method)
            reference = outcome.conclude(local, beside, self.records.alone, self.ledger.best_alone, None, stopped=ended)
            write_tables(reference, beside)
        best = self.ledger.best
        result = outcome.conclude(
            self.setup, self.server.out, self.records.federated, best, None, reference, stopped=stopped
        )
        write_tables(result, self.server.out)
        self.ledger.finished = True
        self.ledger.save(self.server.out)
        return result

    def _agree(self, number: int, sampled: list[int]) -> SecureSum | None:
        """Let the sampled sites agree on masks, if messages are summed securely; or go on where a server ended."""
        if self.secure_form is None or not sampled:
            return None
        session, route = at_server.new_session(self.ledger, number), functools.partial(self.messenger.route, number)
        secure = SecureSum(self.ledger, self.server.rules, self.secure_form, session, route, self.server.out)
        if not secure.resume(self.forms.info, self.forms.alone_info):
            need = math.ceil(self.server.rules.quorum * len(sampled))
            secure.agree([self.names[i] for i in sampled], functools.partial(self.messenger.deliver, number), need)
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
        return secure.unmask(functools.partial(self.messenger.deliver, number), examples)

    def _run_errands(self, number: int, sampled: list[int], asked: list[str], evaluating: bool) -> Errands | None:
        """Let peers ask each other, if the method has them do so."""
        if self.forms.offer is None or self.forms.near is None:
            return None
        errands = Errands(self.ledger, number, self.forms.near, self.forms.offer)

        def deliver(requests: Mapping[str, messages.Work], bodies: Mapping[str, bytes], take: Take) -> None:
            if requests:
                self.messenger.deliver(number, requests, bodies, take, frozenset(requests), need=0)

        errands.ask(
            {name: messages.Ask(**self.asks.work(number, name, sampled, evaluating)) for name in asked}, deliver
        )
        offers, bodies = {}, {}
        for name, askers in sorted(errands.askers.items()):
            listed, content = self.asks.mail(name)
            bodies[name] = wire.encode({"mail": content})
            work = self.asks.work(number, name, sampled, evaluating)
            offers[name] = guard.with_body(
                messages.Offer(**work, mail=listed, askers=tuple(sorted(askers))), bodies[name]
            )
        errands.fetch(offers, bodies, deliver)
        return errands

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
        if self.setup.config.robust and self.setup.peers is None and training:
            need = max(need, robust.fewest(self.setup.config.robust))  # fewer could not be combined
        self.messenger.deliver(number, requests, bodies, take, training or frozenset(requests), need)
        return intake.answers

    def _take_finished(self, name: str, envelope: Envelope, message: FromSite) -> bool:
        if (message.run, message.life, message.round) != (self.ledger.run, self.ledger.life, self.ledger.round + 1):
            raise Refused("late")
        guard.open_body(envelope, {})
        if isinstance(message, messages.Refusal):
            raise Refused(message.code, "the site could not write its model")
        return isinstance(message, messages.Finished)

    def _combine(self, number: int, answers: Mapping[str, Answer], down: Tree, ids: list[int]) -> Tree:
        heard = self.sim.heard_of(number, ids)
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
            self.ledger.mail.heard[number] = [self.names[i] for i in self.sim.heard_of(number, ids)]
        result = Round(ids, info, server_info, up, down_bytes)
        alone = None
        if self.forms.alone_info:
            alone = Round(ids, tree.stack([each.alone_info for each in accepted]), {}, 0, 0)
        self.records.begin(number, result, alone)
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
