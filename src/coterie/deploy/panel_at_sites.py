"""Trains the candidates of a recommendation at real sites: what is asked of them, and what their answers may be."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.core.errors import CoterieError
from coterie.core.tree import Tree
from coterie.data import Federation
from coterie.deploy import guard, messages, wire
from coterie.deploy.federation_facts import Declaration, FederationFacts, gather_facts
from coterie.deploy.intake import check_reply
from coterie.deploy.ledger import Ledger
from coterie.deploy.messages import FromSite
from coterie.deploy.messenger import Messenger
from coterie.deploy.refused import Refused
from coterie.deploy.server import Server
from coterie.deploy.site_evidence import evidence_of, no_evidence
from coterie.deploy.trial_run import TrialRun
from coterie.deploy.wire import Envelope
from coterie.experiment.pick_engine import Choices
from coterie.experiment.progress import Progress
from coterie.experiment.tuning.candidates import Engines, Train, Trained, Trainee
from coterie.experiment.tuning.evidence import Evidence, joined
from coterie.experiment.tuning.panel import Scored
from coterie.experiment.tuning.recommend import Panel
from coterie.experiment.tuning.recommendation import Look
from coterie.experiment.tuning.search import MethodSearch
from coterie.storage.run_folder import safe_name


class Outcome(NamedTuple):
    """What a site did for one candidate."""

    scores: dict[str, float | None] | None
    up: Tree
    failed: bool


@dataclasses.dataclass
class AtSites:
    """Trains a panel at real sites; a `Place` of `coterie.experiment.tuning.recommend`."""

    server: Server
    ledger: Ledger
    messenger: Messenger
    panel: Panel

    def look(self) -> Look:
        """Describe the sites by their sizes: labels and inputs stay where they are."""
        sizes = [each.train + each.validation for each in self.ledger.declared.values()]
        return Look(len(sizes), min(sizes), int(np.median(sizes)), max(sizes), None, None)

    def trainer(self, fold: int) -> Train:
        """Return what trains the candidates of a fold."""

        def train(trainees: Sequence[Trainee], until: int, engines: Engines, *, keep: bool) -> list[Trained]:
            begin = time.perf_counter()
            facts, known = self._facts(fold)
            runs = [
                TrialRun.begin(
                    _id(fold, each.states.path.name),
                    self._blank(each.setup, fold),
                    facts,
                    each.done if (each.states.path / "base.json").exists() else 0,
                    until,
                    states=each.states.path,
                    keep=False,
                )
                for each in trainees
            ]
            there = {_id(fold, each.name) for each in trainees[0].states.path.parent.glob("*")}
            self._play(runs, fold, facts, known, there)
            for run, each in zip(runs, trainees, strict=True):
                if keep and not run.diverged:
                    run.save(each.states.path)
            share = (time.perf_counter() - begin) / len(runs)
            return [Trained(tuple(run.curve), share, run.diverged) for run in runs]

        return train

    def score(
        self, searches: Sequence[MethodSearch], fold: int, tell: Progress, choices: Choices
    ) -> Iterator[tuple[str, Scored]]:
        """Train what each search chose once more, all side by side; the sites predict what the fold holds out."""
        if not searches:
            return
        begin = time.perf_counter()
        facts, known = self._facts(fold)
        runs = {}
        for search in searches:
            setup = self._blank(search.chosen_setup(search.setup), fold)
            rounds = setup.config.rounds
            begin_at = _id(fold, search.label), setup, facts, 0, rounds
            runs[search.label] = TrialRun.begin(*begin_at, states=None, keep=True)
        self.server.say(f"fold {fold}: {', '.join(runs)} as they were chosen")
        self._play(list(runs.values()), fold, facts, known, ())
        share = (time.perf_counter() - begin) / len(runs)
        for label, run in runs.items():
            if run.diverged and not run.best:
                raise CoterieError(f"{label}: {run.diverged}")
        self._hold(list(runs.values()), fold, facts)
        for label, run in runs.items():
            yield label, Scored(None, run.sent / run.until, share / run.until)

    def evidence(self, scored: Mapping[str, Sequence[Scored]]) -> Evidence:
        """Ask every site how good each method was on what was held out."""
        methods, metric = tuple(scored), self.panel.setup.metric
        number = self._next("the sites compare what was held out")
        facts = gather_facts(self.server.config, self.ledger.declared)
        about: dict[str, Any] = {"facts": facts, "folds": len(self.panel.folds), "methods": methods, "metric": metric}
        requests = {
            name: messages.Judge(**self.messenger.route(number, name), **about) for name in self.ledger.declared
        }
        found: dict[str, Evidence] = {}

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            judged = check_reply(self.ledger, number, message, messages.Judged, requests[name])
            guard.open_body(envelope, {})
            declared = self.ledger.declared[name]
            found[name] = evidence_of(judged, methods, metric, declared.train + declared.validation)
            return True

        self._deliver(number, requests, {}, take)
        nothing = no_evidence(methods)
        return joined([found.get(name, nothing) for name in self.ledger.declared])

    def close(self) -> None:
        """Let the sites delete what they kept for this."""
        number = self._next("the sites forget it")

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            return isinstance(message, messages.Finished) and message.run == self.ledger.run

        requests = {name: messages.Close(**self.messenger.route(number, name)) for name in self.ledger.declared}
        self._deliver(number, requests, {}, take, need=0)

    def _facts(self, fold: int) -> tuple[FederationFacts, dict[str, Declaration]]:
        """Return what sites declare of a fold, which follows from what they declared when they joined."""
        made = self._federation(fold)
        known = {}
        for name, each in self.ledger.declared.items():
            split = made.clients[name]
            sizes = {"train": len(split.train), "validation": len(split.validation), "test": len(split.test)}
            known[name] = each.model_copy(update=sizes)
        return gather_facts(self.server.config, known), known

    def _federation(self, fold: int) -> Federation:
        return self.panel.folds[fold - 1] if fold else self.panel.setup.federation

    def _blank(self, setup: Any, fold: int) -> Any:
        return dataclasses.replace(setup, federation=self._federation(fold))

    def _play(
        self,
        runs: Sequence[TrialRun],
        fold: int,
        facts: FederationFacts,
        known: Mapping[str, Declaration],
        there: Collection[str],
    ) -> None:
        """Train candidates side by side to their ends."""
        while going := [run for run in runs if not run.over]:
            what, last = (
                " and ".join(dict.fromkeys(run.setup.config.method for run in going)),
                min(r.step for r in going),
            )
            stage = f"round {last}" if last <= going[0].until else f"after round {last - 1}"
            number = self._next(f"{f'fold {fold}' if fold else 'the settings'}: {what}, {stage}")
            asked = [run.requests() for run in going]
            requests, bodies, places = {}, {}, {}
            for name in self.ledger.declared:
                mine = [k for k, each in enumerate(asked) if name in each]
                if mine:
                    places[name] = mine
                    content = {str(i): asked[k][name][1] for i, k in enumerate(mine)}
                    trials = tuple(asked[k][name][0] for k in mine)
                    requests[name], bodies[name] = self._tries(number, name, fold, facts, trials, content, there)
            training = frozenset(name for name, mine in places.items() if any(asked[k][name][0].train for k in mine))
            answers = self._answers(number, requests, bodies, training, places, going, known)
            for k, run in enumerate(going):
                given = {name: each[places[name].index(k)] for name, each in answers.items() if k in places[name]}
                scores = {name: each.scores for name, each in given.items() if each.scores is not None}
                ups = {name: each.up for name, each in given.items() if each.up is not None}
                run.absorb(scores, ups, sum(each.failed for each in given.values()))

    def _answers(
        self,
        number: int,
        requests: Mapping[str, messages.Tries],
        bodies: Mapping[str, bytes],
        training: frozenset[str],
        places: Mapping[str, list[int]],
        going: Sequence[TrialRun],
        known: Mapping[str, Declaration],
    ) -> dict[str, list[Outcome]]:
        answers: dict[str, list[Outcome]] = {}

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            if name in answers:
                raise Refused("replay")
            mine = [going[k] for k in places[name]]
            answers[name] = self._open(name, envelope, message, number, requests[name], mine, known[name])
            return True

        self._deliver(number, requests, bodies, take, counted=training or frozenset(requests))
        return answers

    def _hold(self, runs: Sequence[TrialRun], fold: int, facts: FederationFacts) -> None:
        number = self._next(f"fold {fold}: the sites predict what it holds out")
        requests, bodies = {}, {}
        for name in self.ledger.declared:
            trials = tuple(run.spec(name, hold=True) for run in runs)
            content: dict[str, Tree] = {str(i): {} for i in range(len(trials))}
            requests[name], bodies[name] = self._tries(number, name, fold, facts, trials, content, ())

        def take(name: str, envelope: Envelope, message: FromSite) -> bool:
            check_reply(self.ledger, number, message, messages.Tried, requests[name])
            guard.open_body(envelope, {})
            return True

        self._deliver(number, requests, bodies, take)

    def _open(
        self,
        name: str,
        envelope: Envelope,
        message: FromSite,
        number: int,
        request: messages.Tries,
        runs: Sequence[TrialRun],
        known: Declaration,
    ) -> list[Outcome]:
        """Check an answer; return (scores or None, message or None, whether training failed) for each candidate."""
        tried = check_reply(self.ledger, number, message, messages.Tried, request)
        trains = [i for i, trial in enumerate(request.trials) if trial.train]
        if len(tried.scores) != len(request.trials) or not {*tried.failed} <= {*trains}:
            raise Refused("bad-header", "answers for other candidates than were asked about")
        forms: dict[str, Tree] = {
            str(i): dict(zip(("up", "info"), runs[i].forms, strict=True)) for i in trains if i not in tried.failed
        }
        content = guard.open_body(envelope, forms)
        found: list[Outcome] = []
        for i, (run, trial) in enumerate(zip(runs, request.trials, strict=True)):
            up, failed = None, i in tried.failed
            if str(i) in content:
                up, info = content[str(i)]["up"], content[str(i)]["info"]
                try:
                    run.check(name, up, info, known.train, self.server.rules.norm_bound)
                except Refused as refused:
                    self.ledger.sites[name].refuse(refused.code)
                    up, failed = None, True
            found.append(Outcome(tried.scores[i] if trial.evaluate else None, up, failed))
        return found

    def _tries(
        self,
        number: int,
        name: str,
        fold: int,
        facts: FederationFacts,
        trials: tuple[messages.Trial, ...],
        content: dict[str, Tree],
        there: Collection[str],
    ) -> tuple[messages.Tries, bytes]:
        body = wire.encode(content)
        about: dict[str, Any] = {"facts": facts, "folds": len(self.panel.folds), "fold": fold}
        open_ = tuple(sorted(there))
        request = messages.Tries(**self.messenger.route(number, name), **about, trials=trials, open=open_)
        return guard.with_body(request, body), body

    def _next(self, doing: str) -> int:
        """Return the number of the next message, and show what it is about."""
        self.ledger.round += 1
        self.ledger.rounds, self.ledger.doing = self.ledger.round, doing
        self.ledger.save(self.server.out)
        return self.ledger.round

    def _deliver(
        self,
        number: int,
        requests: Mapping[str, messages.FromServer],
        bodies: Mapping[str, bytes],
        take: Any,
        *,
        counted: frozenset[str] | None = None,
        need: int | None = None,
    ) -> None:
        counted = frozenset(requests) if counted is None else counted
        need = max(1, math.ceil(self.server.rules.quorum * len(counted))) if need is None else need
        self.messenger.deliver(number, requests, bodies, take, counted, need)


def _id(fold: int, label: str) -> str:
    return f"fold-{fold}-{safe_name(label)}".replace(".", "_")
