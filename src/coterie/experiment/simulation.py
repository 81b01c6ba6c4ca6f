"""Simulate a federation in memory: the server (or the peers' copies of it), the clients, and a round of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from coterie.core import client_rows, rng, tree
from coterie.core.batches import Batches
from coterie.core.device import on
from coterie.core.errors import CoterieError
from coterie.core.method import Info, Population
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.data.federation import Federation, Index
from coterie.data.minibatches import Plan, draw, pad_positions
from coterie.engine import Central, ClientRunner, Place, Rows, in_order, samplers
from coterie.engine.engine import one_thread, threads_for
from coterie.evaluation import Predictions, Scores
from coterie.experiment.divergence import find_divergence, first_not_finite, told
from coterie.experiment.privacy.site_level import Shares
from coterie.experiment.scored_examples import PARTS, Examples, in_pieces
from coterie.methods.fields import AnyMethod
from coterie.profiling import span, timed
from coterie.storage.paged_rows import Paged, Store
from coterie.storage.state import State

POOL_PURPOSE = "evaluate on the pool"  # that is, on the test examples of all clients


class Round(NamedTuple):
    """Report who took part in a round, what their updates and the server measured, and the traffic."""

    participants: list[int]
    info: Info  # leaves [participants]
    server_info: Info
    bytes_up: int
    bytes_down: int


@dataclass
class Simulation:
    """Hold a federation's state, train it round by round, and evaluate it."""

    method: AnyMethod
    task: Task
    federation: Federation
    plan: Plan
    participants: int  # clients per round
    seed: int
    state: State
    place: Place = field(default_factory=Central)  # where messages are combined
    heard: int | None = None  # how many participants are aggregated; None: all
    store: Store | None = None  # keeps the rows of many clients; None: they are in memory
    shares: Shares | None = None  # how messages are clipped and noised; None: they are sent as they are
    # (round, ids, down, ups) -> the messages as hostile clients make them; None: nobody is hostile
    tamper: Callable[[int, list[int], Tree, Tree], Tree] | None = None
    hostile: frozenset[int] = frozenset()  # ids of clients that may diverge, since nobody believes them anyway
    sampler: samplers.Function | None = None  # chooses who takes part; None: all have the same chance

    @classmethod
    def start(
        cls,
        method: AnyMethod,
        task: Task,
        federation: Federation,
        plan: Plan,
        participants: int,
        seed: int,
        params: Params | None = None,
        place: Place | None = None,
        store: Store | None = None,
    ) -> Self:
        """Make the initial state of the server and of every client.

        Args:
            method: the method.
            task: the model and its loss.
            federation: the clients' data.
            plan: the minibatches of a client's local update.
            participants: clients per round.
            seed: seeds participation, minibatches and whatever else is random.
            params: the initial model; by default the task's.
            place: where messages are combined; by default one server.
            store: keeps the rows of many clients; by default they are in memory.

        Returns:
            A simulation before its first round.
        """
        params = tree.map(lambda leaf: leaf.to(federation.x.device), task.init() if params is None else params)
        size = len(federation.names)
        place = place or Central()
        keys = rng.keys_of(federation.names).to(federation.x.device)
        with on(federation.x.device):
            people = Population(size, participants, task, keys, store, seed=rng.server_seed(seed))
            server, client = place.start(method, params, people), method.init_client(params)
            clients = tree.clone(tree.broadcast(client, size)) if store is None else store.rows(client, size)
        return cls(method, task, federation, plan, participants, seed, State(server, clients), place, store=store)

    def _at(self, ids: list[int]) -> Tensor:
        return self._all if ids == self._everyone else torch.tensor(ids, device=self.federation.x.device)

    @functools.cached_property
    def _all(self) -> Tensor:
        return torch.tensor(self._everyone, device=self.federation.x.device)

    def sample(self, round: int) -> list[int]:
        """Return the clients that take part in a round, by number."""
        return self._turnout.of(round)

    @functools.cached_property
    def _turnout(self) -> samplers.Turnout:
        names, sizes = self.federation.names, self.federation.sizes
        return samplers.Turnout(self.sampler, names, sizes, self.participants, self.seed)

    def heard_of(self, round: int, ids: list[int]) -> list[int]:
        """Return whose messages are aggregated: `heard` of them, who by their names drew the smallest numbers."""
        if self.heard is None or self.heard >= len(ids):
            return ids
        tickets = rng.seeds_of((self.seed, "hearing", round), [self.federation.names[i] for i in ids])
        return [ids[k] for k in samplers.smallest(tickets, self.heard)]

    def train(self, round: int, engine: ClientRunner) -> Round:
        """Run a round: dispatch, local updates, aggregation.

        Args:
            round: its number, from 1.
            engine: computes the clients' updates.

        Returns:
            Who took part, and what was measured.

        Raises:
            CoterieError: training diverged. The state is then what it was before the round.
        """
        ids = self.sample(round)
        down, rows_of, (clients, ups, info) = self._updates(round, ids, engine)
        # A second thread, once woken, keeps a worker's core busy for milliseconds, so little work gets none.
        with threads_for((clients, ups, info)), on(self.federation.x.device):
            names = [self.federation.names[i] for i in ids]
            if self.shares is not None and self.shares.level != "site-central":
                ups = self.shares.apply(self.seed, round, names, down, ups)
            ups = ups if self.tamper is None else self.tamper(round, ids, down, ups)
            if self.shares is not None and self.shares.level == "site-central":  # a server clips false messages, too
                ups = self.shares.apply(self.seed, round, names, down, ups)
            self._check(round, ids, ups, info, rows_of)
            at = self._at(ids)
            heard, messages = at, ups
            if self.heard is not None:
                those = self.heard_of(round, ids)
                heard, messages = self._at(those), tree.rows(ups, self._at([ids.index(i) for i in those]))
            server = self.place.aggregate(self.method, self.state.server, heard, messages)
            server_info = self.place.info(self.method, server)
            self.state = State(server, self._put(at, clients))
        return Round(ids, info, server_info, *self.place.traffic(self.method, at, ups, self.task.sent(down)))

    def _updates(self, round: int, ids: list[int], engine: ClientRunner) -> Any:
        """Return what the clients are sent, what gathers their rows, and their states, messages and infos as rows."""
        down, rows_of = self._work(round, ids)
        results = engine.map(self._local_update, self.federation, ids, rows_of, purpose="train")
        with threads_for(tuple(rows for _, rows in results)), on(self.federation.x.device):
            return down, rows_of, in_order(results, ids)

    def _put(self, at: Tensor, clients: Tree) -> Any:
        return client_rows.put(self.state.clients, at, clients)

    @timed("evaluate")
    def evaluate(self, round: int, engine: ClientRunner, *, own_only: bool = False) -> dict[str, Scores]:
        """Measure the model that each client would deploy now (P) on its validation and test examples.

        Args:
            round: its number.
            engine: computes what is not computed on the spot.
            own_only: leave out the model for everybody (G).

        Returns:
            Metrics by part, "validation" and "test". If the method also has one model for everybody (G), its metrics
            on the same examples are in "global_validation" and "global_test".
        """
        shared = None if own_only else self.shared_model()
        with one_thread():
            scores = self._examples.score(self._own_outputs(round, engine))
            if shared is not None:
                common = self._examples.score(self._shared_outputs(round, engine, shared))
                scores |= {f"global_{part}": by for part, by in common.items()}
        return scores

    @timed("evaluate")
    def predictions(self, round: int, engine: ClientRunner) -> Predictions:
        """Return the outputs of every client's model for its own test examples, which `evaluate` scores."""
        return self.all_predictions(round, engine)["test"]

    @timed("evaluate")
    def all_predictions(self, round: int, engine: ClientRunner) -> dict[str, Predictions]:
        """Return the same by part: for validation and for test examples."""
        with one_thread():
            outputs = self._own_outputs(round, engine)
            return {part: self._examples.predictions(outputs, part) for part in PARTS}

    @functools.cached_property
    def _everyone(self) -> list[int]:
        return list(range(len(self.federation.names)))

    @functools.cached_property
    def _examples(self) -> Examples:
        return Examples(self.federation, self.task)

    @functools.cached_property
    def _none(self) -> list[Batches]:
        """Return empty minibatches for each client, for methods that make a view without training."""
        none = self._draw(self._everyone, replace(self.plan, epochs=0, steps=None), "personalize", 0)
        return [Batches(none.x, none.y, *tree.rows(none[2:], i)) for i in self._everyone]

    def _own_outputs(self, round: int, engine: ClientRunner) -> Tensor:
        """Return each client's own model's outputs for its validation and test examples, in the order of `Examples`."""
        if self._examples.fits() and self.views_are_at_hand():
            with on(self.federation.x.device):
                views = self.views_at_hand(round)
                if self._examples.is_inline("P", functools.partial(self.method.predict, self.task, views[0])):
                    return self._examples.outputs("P", lambda task, i, x: self.method.predict(task, views[i], x))
        return self._examples.from_results(self.own_results(round, engine, self._everyone))

    def views_are_at_hand(self) -> bool:
        """Return whether views need no training, and clients' states are in memory."""
        return not self.method.personalize_epochs and not isinstance(self.state.clients, Paged)

    def views_at_hand(self, round: int) -> list[Tree]:
        """Return each client's view, made here one after another (if `views_are_at_hand`)."""
        down = self._send(self._everyone, *self._for_evaluation, round)
        rows = ((tree.rows(self.state.clients, i), tree.rows(down, i)) for i in self._everyone)
        return [self._view(*row, batches) for row, batches in zip(rows, self._none, strict=True)]

    def _shared_outputs(self, round: int, engine: ClientRunner, shared: Params) -> Tensor:
        """Return the outputs of the model for everybody for the same examples."""
        if self._examples.fits():
            with on(self.federation.x.device):
                if self._examples.is_inline("G", functools.partial(self.task.logits, tree.rows(shared, 0))):
                    return self._examples.outputs("G", lambda task, i, x: task.logits(tree.rows(shared, i), x))
        return self._examples.from_results(self.shared_results(round, engine, shared, self._everyone))

    def own_results(self, round: int, engine: ClientRunner, ids: list[int], pool: Index | None = None) -> Any:
        """Map the models of `ids` over their validation and test examples or, if it is given, over `pool`."""
        rows_of = self._evaluated(round, ids, pool)
        purpose = "evaluate" if pool is None else POOL_PURPOSE
        return engine.map(self._outputs, self.federation, ids, rows_of, purpose=purpose)

    def _evaluated(self, round: int, ids: list[int], pool: Index | None = None) -> Any:
        rows_of = self._personal(round, ids)

        def personal(group: list[int]) -> Rows:
            (client, down), batches = rows_of(group)
            return (client, down, self._positions(group, pool)), batches

        return personal

    def shared_results(
        self, round: int, engine: ClientRunner, shared: Params, ids: list[int], pool: Index | None = None
    ) -> Any:
        """Do the same with the model for everybody, of which `shared` has a row for each client."""

        def common(group: list[int]) -> Rows:
            none = self._draw(group, replace(self.plan, epochs=0, steps=None), "personalize", round)
            return (tree.rows(shared, self._at(group)), self._positions(group, pool)), none

        purpose = "evaluate globally" if pool is None else POOL_PURPOSE
        return engine.map(self._global_outputs, self.federation, ids, common, purpose=purpose)

    def shared_model(self) -> Params | None:
        """Return the model for everybody (G), one row per client, if the method has one."""
        return self.place.models(self.method, self.state.server, len(self.federation.names))

    def _positions(self, group: list[int], pool: Index | None = None) -> tuple[Tensor, ...]:
        if pool is not None:
            return (torch.from_numpy(pool).to(self.federation.x.device).expand(len(group), -1),)
        splits = [self.federation.split(i) for i in group]
        return tuple(pad_positions([split[part] for split in splits]).to(self.federation.x.device) for part in PARTS)

    def views(self, round: int, engine: ClientRunner) -> Any:
        """Return what every client would deploy, one row per client; paged if the clients' states are."""
        everyone = self._everyone
        rows_of = self._personal(round, everyone)

        def of(ids: list[int]) -> Tree:
            return in_order(engine.map(self._view, self.federation, ids, rows_of, purpose="view"), ids)

        size = tree.nbytes(self.task.init())
        if self.store is None or not self.store.pages(size * len(everyone)):
            return of(everyone)
        views, some = None, max(1, self.store.memory // (4 * size))
        for ids in (everyone[start : start + some] for start in range(0, len(everyone), some)):
            part = of(ids)
            views = self.store.rows(tree.rows(part, 0), len(everyone)) if views is None else views
            views = client_rows.put(views, torch.tensor(ids), part)
        return views

    def view_of(self, client: int, round: int, engine: ClientRunner) -> Tree:
        """Return what one client would deploy."""
        rows_of = self._personal(round, [client])
        results = engine.map(self._view, self.federation, [client], rows_of, purpose="view")
        return client_rows.take(in_order(results, [client]), 0)

    def probe(self, round: int = 1) -> tuple[Any, list[int], Any]:
        """Return a round's work, without doing it: a function, its clients, and their rows."""
        ids = self.sample(round)
        return self._local_update, ids, self._work(round, ids)[1]

    def probe_evaluation(self, round: int = 1) -> tuple[Any, list[int], Any]:
        """Return the same of an evaluation."""
        return self._outputs, self._everyone, self._evaluated(round, self._everyone)

    def client_steps(self, rounds: int) -> int:
        """Return how many gradient steps all clients take in `rounds` rounds, on average over who takes part."""
        plan = self._withholding(self.plan)
        everyone = [plan.num_steps(len(split.train)) for split in self.federation.clients.values()]
        return round(rounds * self.participants * sum(everyone) / len(everyone))

    def _work(self, round: int, ids: list[int]) -> tuple[Tree, Any]:
        with span("dispatch"):
            down = self._send(ids, self.method.dispatch, "dispatch", round)
        rows_of = self._rows(ids, down)

        def with_batches(group: list[int]) -> Rows:
            return rows_of(group), self._draw(group, self.plan, "minibatches", round)

        return down, with_batches

    def _personal(self, round: int, ids: list[int]) -> Any:
        rows_of = self._rows(ids, self._send(ids, *self._for_evaluation, round))
        pacing = self.plan.pacing and self.plan.pacing.at_full_pace()
        plan = replace(self.plan, epochs=self.method.personalize_epochs, steps=None, poisson=False, pacing=pacing)

        def with_batches(group: list[int]) -> Rows:
            return rows_of(group), self._draw(group, plan, "personalize", round)

        return with_batches

    @property
    def _for_evaluation(self) -> tuple[Any, str]:
        return self.method.deploy, "dispatch for evaluation"

    def _send(self, ids: list[int], send: Any, purpose: str, round: int) -> Tree:
        def fresh() -> torch.Generator:
            return rng.torch_generator(self.seed, purpose, round)

        with on(self.federation.x.device):
            return self.place.send(self.method, send, self.state.server, self._at(ids), fresh)

    def _rows(self, ids: list[int], down: Tree) -> Any:
        place = {client: row for row, client in enumerate(ids)}
        everyone = ids == self._everyone and not isinstance(self.state.clients, Paged)

        def rows_of(group: list[int]) -> tuple[Tree, Tree]:
            if group == ids:
                return self.state.clients if everyone else client_rows.take(self.state.clients, self._at(ids)), down
            at = self._at([place[i] for i in group])
            # A model that all clients share is not copied for each of them.
            sent = tree.map(lambda leaf: leaf[: len(at)] if tree.is_broadcast(leaf) else tree.rows(leaf, at), down)
            return client_rows.take(self.state.clients, self._at(group)), sent

        return rows_of

    def _draw(self, group: list[int], plan: Plan, purpose: str, round: int) -> Batches:
        return draw(self.federation, group, self._withholding(plan), seed=self.seed, purpose=purpose, round=round)

    def _withholding(self, plan: Plan) -> Plan:
        return replace(plan, withheld=self.method.withheld_share)

    def _local_update(self, client: Tree, down: Tree, batches: Batches) -> Any:
        return self.method.local_update(self.task, client, down, batches)

    def _view(self, client: Tree, down: Tree, batches: Batches) -> Tree:
        return self.method.personalize(self.task, client, down, batches)

    def _outputs(self, client: Tree, down: Tree, positions: tuple[Tensor, ...], batches: Batches) -> Tree:
        view = self._view(client, down, batches)
        return in_pieces(lambda x: self.method.predict(self.task, view, x), batches.x, positions)

    def _global_outputs(self, params: Params, positions: tuple[Tensor, ...], batches: Batches) -> Tree:
        return in_pieces(lambda x: self.task.logits(params, x), batches.x, positions)

    @timed("aggregate")
    def _check(self, round: int, ids: list[int], ups: Tree, info: Info, rows_of: Callable[[list[int]], Rows]) -> None:
        """Raise `CoterieError` if a client reports NaN or infinite values."""
        if self.hostile:
            honest = torch.tensor([i not in self.hostile for i in ids])
            ids = [i for i in ids if i not in self.hostile]
            ups, info = tree.rows((ups, info), honest)
        client = first_not_finite(ids, [*info.values(), *tree.leaves(ups)])
        if client is not None:
            raise CoterieError(self._diverged(round, client, rows_of))

    def _diverged(self, round: int, client: int, rows_of: Callable[[list[int]], Rows]) -> str:
        """Say which client diverged, in which step, and what to try."""
        found = find_divergence(self.method.local_update, self.task, rows_of([client]))
        return told(found, self.method, self.federation.names[client], round)
