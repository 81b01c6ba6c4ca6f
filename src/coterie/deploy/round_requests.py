"""What the server asks of sites in a round, and what it sends with that: the method's messages, masks, and mail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coterie.core import rng, tree
from coterie.core.tree import Tree
from coterie.deploy import guard, messages, wire
from coterie.deploy.errands import Errands
from coterie.deploy.federation_facts import FederationFacts
from coterie.deploy.intake import Forms
from coterie.deploy.ledger import Ledger, Record
from coterie.deploy.messages import Neighbours
from coterie.deploy.messenger import Messenger
from coterie.deploy.secure.at_server import SecureSum
from coterie.deploy.wire import as_leaf
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation

if TYPE_CHECKING:
    from coterie.deploy.server import Server


@dataclass
class RoundRequests:
    """Writes the messages of a federation's rounds."""

    server: Server
    messenger: Messenger
    ledger: Ledger
    facts: FederationFacts
    setup: Setup
    sim: Simulation
    forms: Forms

    @property
    def names(self) -> tuple[str, ...]:
        """The sites, in the order of their numbers."""
        return self.setup.federation.names

    def write(
        self,
        number: int,
        sampled: list[int],
        asked: list[str],
        *,
        evaluating: bool,
        secure: SecureSum | None,
        errands: Errands | None,
    ) -> tuple[dict[str, messages.Round], dict[str, bytes], Tree]:
        """Return the round's messages, their bodies, and what the method dispatches to all who were sampled.

        Args:
            number: the round.
            sampled: numbers of the sites that train.
            asked: names of the sites that train or evaluate.
            evaluating: whether the last round is evaluated.
            secure: the sum of the round's messages, if it is taken securely.
            errands: what peers asked each other for before, if they do.
        """
        if self.setup.peers is not None:
            pairs = {name: self._to_peer(number, name, sampled, evaluating, errands) for name in asked}
            return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}, ()
        drawn = self.sim.sample(number) if sampled else []  # with those who did not agree on masks
        train = self._dispatched(self.server.method.dispatch, drawn, "dispatch", number) if drawn else ()
        everyone = list(range(len(self.names)))
        deploy: Tree = ()
        if evaluating:
            deploy = self._dispatched(self.server.method.deploy, everyone, "dispatch for evaluation", number - 1)
        shared = self.server.method.global_model(self.sim.state.server) if evaluating else None
        shared = None if shared is None else self.setup.task.sent(shared)
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
            if secure is not None and secure.total is None and index in place:
                masking, content["shares"] = secure.masking(name)
            bodies[name] = wire.encode(content)
            work = self.work(number, name, sampled, evaluating)
            message = messages.Round(**work, **self._best(), masking=masking)
            requests[name] = guard.with_body(message, bodies[name])
        return requests, bodies, train

    def _to_peer(
        self, number: int, name: str, sampled: list[int], evaluating: bool, errands: Errands | None
    ) -> tuple[messages.Round, bytes]:
        caught_up = errands is not None and name in errands.caught_up
        listed, content = ((), {}) if caught_up else self.mail(name)
        offers = [] if errands is None else errands.of(name)
        message = messages.Round(
            **self.work(number, name, sampled, evaluating),
            **self._best(),
            mail=listed,
            caught_up=caught_up,
            offers=tuple((each.sender, len(each.data)) for each in offers),
        )
        body = wire.encode({"mail": content, "offers": {str(i): as_leaf(each.data) for i, each in enumerate(offers)}})
        return guard.with_body(message, body), body

    def mail(self, name: str) -> tuple[tuple[tuple[int, str, int], ...], Tree]:
        """Return a peer's mail that its state does not have yet: a list, and the letters."""
        mail = self.ledger.mail.of(name, self.ledger.base.get(name, 0))
        listed = tuple((each.round, each.sender, len(each.data)) for each in mail)
        return listed, {str(i): as_leaf(each.data) for i, each in enumerate(mail)}

    def _best(self) -> Record:
        return {"best": self.ledger.best, "best_alone": self.ledger.best_alone}

    def work(self, number: int, name: str, sampled: list[int], evaluating: bool) -> Record:
        """Return what a site is told in every message to work; a peer also hears of its neighbours."""
        base, index = self.ledger.base.get(name, 0), self.names.index(name)
        told = {"base": base, "train": index in sampled, "evaluate": evaluating, "facts": self.facts}
        told |= self.messenger.route(number, name)
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

    def _dispatched(self, send: Any, ids: list[int], purpose: str, round: int) -> Tree:
        def draw() -> torch.Generator:
            return rng.torch_generator(self.server.config.seed, purpose, round)

        down = self.sim.place.send(self.server.method, send, self.sim.state.server, torch.tensor(ids), draw)
        return self.setup.task.sent(down)
