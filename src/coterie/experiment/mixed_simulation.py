"""A simulation of clients with different models: one simulation a group, and one server for all (see `mixed.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import rng, tree
from coterie.core.device import on
from coterie.core.method import Population
from coterie.core.tree import Tree
from coterie.data.federation import Federation, Index
from coterie.engine import Central, ClientRunner, Rows, in_order
from coterie.engine.central import AnyMethod, Draw, Send
from coterie.experiment.mixed import Group, GroupedRows, Mixed, check_method, renamed
from coterie.experiment.setup import Setup
from coterie.experiment.simulation import Simulation
from coterie.storage.paged_rows import Store
from coterie.storage.state import State


def begin(setup: Setup, store: Store | None) -> Simulation:
    """Start the simulation of a setup, whose clients may have different models."""
    config, federation = setup.config, setup.federation
    schedule: tuple[Any, Any, Any] = config.plan(), config.participants(len(federation.names)), config.seed
    if setup.mixed is not None:
        return MixedSimulation.of(setup, setup.mixed, federation, *schedule)
    return Simulation.start(setup.method, setup.task, federation, *schedule, place=setup.peers, store=store)


class _Share(Central):
    """The one server as a group sees it: its clients have numbers among all, and its heads names of their own."""

    def __init__(self, group: Group) -> None:
        self.ids, self.names = torch.tensor(group.ids), group.names

    def send(self, method: AnyMethod, send: Send, server: Tree, ids: Tensor, draw: Draw) -> Tree:
        return renamed(super().send(method, send, server, self.ids.to(ids.device)[ids], draw), self.names)


@dataclass
class MixedSimulation(Simulation):
    """The clients' state is a tuple with the rows of each group, in the order of the group's clients."""

    parts: tuple[Simulation, ...] = ()
    mixed: Mixed = field(default_factory=lambda: Mixed(()))

    @classmethod
    def of(
        cls, setup: Setup, mixed: Mixed, federation: Federation, plan: Any, participants: int, seed: int
    ) -> MixedSimulation:
        """Make the initial state of the server, from the first group's model, and of every client from its own."""
        method, device = setup.method, federation.x.device
        check_method(method)
        first = mixed.groups[0]
        keys = rng.keys_of(federation.names).to(device)
        people = Population(len(federation.names), participants, first.task, keys, seed=rng.server_seed(seed))
        # Minibatches are as wide as those of the largest client of all, whoever is in its group.
        plan = replace(plan, width=plan.width or (None if plan.poisson else min(plan.batch_size, federation.largest)))
        with on(device):
            begins = [[_to(begin, device) for begin in group.begins] for group in mixed.groups]
            server = method.init_server(begins[0][0], people)
            clients = tuple(tree.stack([method.init_client(each) for each in group]) for group in begins)
        parts = tuple(
            Simulation(
                method,
                group.task,
                replace(federation, clients={federation.names[i]: federation.split(i) for i in group.ids}),
                plan,
                len(group.ids),
                seed,
                State(server, rows),
                _Share(group),
            )
            for group, rows in zip(mixed.groups, clients, strict=True)
        )
        state = State(server, clients)
        return cls(method, first.task, federation, plan, participants, seed, state, parts=parts, mixed=mixed)

    def _up_to_date(self) -> list[tuple[Group, Simulation, dict[int, int]]]:
        """Return the groups, their simulations in the current state, and {number among all: number in the group}."""
        found = []
        for group, part, rows in zip(self.mixed.groups, self.parts, self.state.clients, strict=True):
            part.state = State(self.state.server, rows)
            found.append((group, part, {i: k for k, i in enumerate(group.ids)}))
        return found

    def _updates(self, round: int, ids: list[int], engine: ClientRunner) -> Any:
        news, told, order = list[Any](), list[Any](), list[int]()
        for group, part, place in self._up_to_date():
            local = [place[i] for i in ids if i in place]
            if not local:
                news.append(None)
                continue
            _, rows_of = part._work(round, local)
            results = engine.map(part._local_update, part.federation, local, rows_of, purpose="train")
            clients, ups, info = tree.clone(in_order(results, local))
            back = {own: common for common, own in group.names.items()}
            news.append((torch.tensor(local, device=self.federation.x.device), clients))
            told.append((renamed(ups, back), info))
            order += [group.ids[k] for k in local]
        places = torch.tensor([order.index(i) for i in ids], device=self.federation.x.device)
        ups, info = tree.map(lambda *leaf: torch.cat(leaf)[places], told[0], *told[1:])
        down = self._send(ids, self.method.dispatch, "dispatch", round)
        return down, None, (tuple(news), ups, info)

    def _put(self, at: Tensor, clients: Any) -> Any:
        pairs = zip(self.state.clients, clients, strict=True)
        return tuple(rows if new is None else tree.put(rows, *new) for rows, new in pairs)

    def own_results(self, round: int, engine: ClientRunner, ids: list[int], pool: Index | None = None) -> Any:
        """Map the models of `ids`, group by group."""
        found = []
        for group, part, place in self._up_to_date():
            local = [place[i] for i in ids if i in place]
            if local:
                results = part.own_results(round, engine, local, pool)
                found += [([group.ids[k] for k in chunk], tree.clone(rows)) for chunk, rows in results]
        return found

    def views_are_at_hand(self) -> bool:
        """Return False: they are made group by group."""
        return False

    def view_of(self, client: int, round: int, engine: ClientRunner) -> Tree:
        """Return what one client would deploy."""
        _, part, place = next(each for each in self._up_to_date() if client in each[2])
        return part.view_of(place[client], round, engine)

    def views(self, round: int, engine: ClientRunner) -> Any:
        """Return what every client would deploy."""
        return GroupedRows(self.mixed, [tree.clone(part.views(round, engine)) for _, part, _ in self._up_to_date()])

    def probe(self, round: int = 1) -> tuple[Any, list[int], Any]:
        """Return a round's work of the largest group, whose engine all groups get."""
        group, part, place = max(self._up_to_date(), key=lambda each: len(each[0].ids))
        fn, local, rows_of = part.probe(round)

        def of_all(ids: list[int]) -> Rows:
            rows: Rows = rows_of([place[i] for i in ids])
            return rows

        return fn, [group.ids[k] for k in local], of_all

    def _diverged(self, round: int, client: int, rows_of: Callable[[list[int]], Rows] | None) -> str:
        _, part, place = next(each for each in self._up_to_date() if client in each[2])
        return part._diverged(round, place[client], part._work(round, [place[client]])[1])


def _to(params: Tree, device: torch.device) -> Tree:
    return tree.map(lambda leaf: leaf.to(device), params)
