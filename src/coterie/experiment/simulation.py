"""A federation in memory: server (or the peers' copies of it), clients, and what happens in a round."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie import paged, rng, tree
from coterie.batches import Batches
from coterie.conv import FewChannelConvolution
from coterie.data.federation import Federation, Index
from coterie.data.minibatches import Plan, draw, pad_positions
from coterie.device import on
from coterie.engine import Central, Engine, Place, in_order
from coterie.engine.engine import one_thread, threads_for
from coterie.engine.team import Rows
from coterie.errors import CoterieError
from coterie.evaluation import Predictions, Scores, score
from coterie.evaluation.metrics import mean
from coterie.experiment.examples import PARTS, Examples
from coterie.hyper import AnyMethod
from coterie.method import Info, Population
from coterie.native import own_products
from coterie.paged import Paged, Store
from coterie.spans import span, timed
from coterie.task import Task
from coterie.tree import Params, Tree

PIECE = 12 * 2**20  # bytes of what a layer makes of the examples that are evaluated at once: more leave the cache
PASSES = 10_000_000  # of an example through a client's model, in a global test
POOL = "evaluate on the pool"  # of all clients' test examples
POOLED = 500_000  # of them whose outputs are held at once


class State(NamedTuple):
    """All that changes from round to round; a tree, so that a checkpoint is one file."""

    server: Tree  # among peers: leaves [clients, ...], one copy each
    clients: Any  # leaves [clients, ...]; or the same as rows that are `Paged`


class Round(NamedTuple):
    participants: list[int]
    info: Info  # leaves [participants]
    server_info: Info
    bytes_up: int
    bytes_down: int


@dataclass
class Simulation:
    method: AnyMethod
    task: Task
    federation: Federation
    plan: Plan
    participants: int  # clients a round
    seed: int
    state: State
    place: Place = field(default_factory=Central)  # where messages are combined
    heard: int | None = None  # of those that take part, how many are aggregated; None: all
    store: Store | None = None  # where rows of many clients are; None: in memory

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
    ) -> Simulation:
        paged.keep_memory()
        params = tree.map(lambda leaf: leaf.to(federation.x.device), task.init() if params is None else params)
        size = len(federation.names)
        place = place or Central()
        keys = rng.keys_of(federation.names).to(federation.x.device)
        with on(federation.x.device):
            people = Population(size, participants, task, keys, store)
            server, client = place.start(method, params, people), method.init_client(params)
            clients = tree.clone(tree.broadcast(client, size)) if store is None else store.rows(client, size)
        return cls(method, task, federation, plan, participants, seed, State(server, clients), place, store=store)

    def _at(self, ids: list[int]) -> Tensor:
        return self._all if ids == self._everyone else torch.tensor(ids, device=self.federation.x.device)

    @functools.cached_property
    def _all(self) -> Tensor:
        return torch.tensor(self._everyone, device=self.federation.x.device)

    def sample(self, round: int) -> list[int]:
        """The clients of a round."""
        return self._smallest(self._everyone, self.participants, "participation", round)

    def _smallest(self, ids: list[int], size: int, purpose: str, round: int) -> list[int]:
        """A random choice: each client draws a number of its own; the smallest are chosen, whatever their order."""
        if size >= len(ids):
            return ids
        tickets = rng.seeds_of((self.seed, purpose, round), [self.federation.names[i] for i in ids])
        return sorted(ids[k] for k in tickets.argsort(kind="stable")[:size])

    def train(self, round: int, engine: Engine) -> Round:
        """One round: dispatch, local updates, aggregate. The state is replaced only when all of it has worked."""
        ids = self.sample(round)
        with own_products(engine.compiled):
            down, rows_of = self._work(round, ids)
        results = engine.map(self._local_update, self.federation, ids, rows_of, purpose="train")
        # A second thread, once woken, keeps a worker's core busy for milliseconds: for little work, there is none.
        little = threads_for(tuple(rows for _, rows in results))
        with little, on(self.federation.x.device), own_products(engine.compiled):
            clients, ups, info = in_order(results, ids)
            self._check(round, ids, ups, info)
            at = self._at(ids)
            heard, said = at, ups
            if self.heard is not None:
                those = self._smallest(ids, self.heard, "hearing", round)
                heard, said = self._at(those), tree.rows(ups, self._at([ids.index(i) for i in those]))
            server = self.place.aggregate(self.method, self.state.server, heard, said)
            server_info = self.place.info(self.method, server)
            self.state = State(server, paged.put(self.state.clients, at, clients))
        return Round(ids, info, server_info, *self.place.traffic(self.method, at, ups, down))

    @timed("evaluate")
    def evaluate(self, round: int, engine: Engine) -> dict[str, Scores]:
        """Every client's validation and test metrics of the model it would deploy now (P).

        Where the method has one model for everybody too (G), its metrics on the same examples have the prefix global_.
        """
        shared = self._shared()
        with one_thread():
            scores = self._examples.score(self._own_outputs(round, engine))
            if shared is not None:
                common = self._examples.score(self._shared_outputs(round, engine, shared))
                scores |= {f"global_{part}": by for part, by in common.items()}
        return scores

    @timed("evaluate")
    def predictions(self, round: int, engine: Engine) -> Predictions:
        """What every client's model says of its own test examples: what `evaluate` scores."""
        with one_thread():
            return self._examples.predictions(self._own_outputs(round, engine), "test")

    @timed("evaluate")
    def both_tests(self, round: int, engine: Engine) -> dict[str, Any]:
        """pFedBreD's protocol, where the method has a model for everybody (G) beside the clients' own (P); else {}.

        Global test: a model on the test examples of all clients, pooled; of P, the mean over clients. Local test: on
        the client's own, averaged over clients by their number. At most `PASSES` examples pass through the clients'
        models: beyond that the pool is a random part of all test examples, and `examples` says of how many.
        """
        shared = self._shared()
        if shared is None:
            return {}
        everyone = self._everyone
        own = [self.federation.split(i).test for i in everyone]
        sizes = [float(len(each)) for each in own]
        pool = np.concatenate(own)
        if len(pool) * len(everyone) > PASSES:
            number = max(1, PASSES // len(everyone))
            pool = np.sort(rng.generator(self.seed, "global test").choice(pool, number, replace=False))
        local = {
            "G": self._examples.score(self._shared_outputs(round, engine, shared))["test"],
            "P": self._examples.score(self._own_outputs(round, engine))["test"],
        }
        found: dict[str, list[Scores]] = {"G": [], "P": []}
        copies = everyone[:1] if isinstance(self.place, Central) else everyone  # one server has one G
        step = max(1, POOLED // len(pool))
        for ids in (everyone[start : start + step] for start in range(0, len(everyone), step)):
            found["P"].append(self._pooled(self._own_results(round, engine, ids, pool), ids, pool))
            if some := [i for i in ids if i in copies]:
                found["G"].append(self._pooled(self._shared_results(round, engine, shared, some, pool), some, pool))
        told: dict[str, Any] = {"examples": len(pool)}
        for which, parts in found.items():
            pooled = {metric: mean(np.concatenate([part[metric] for part in parts])) for metric in parts[0]}
            told[which] = {
                "global": pooled,
                "local": {metric: mean(values, sizes) for metric, values in local[which].items()},
            }
        return told

    @functools.cached_property
    def _everyone(self) -> list[int]:
        return list(range(len(self.federation.names)))

    @functools.cached_property
    def _examples(self) -> Examples:
        return Examples(self.federation, self.task)

    @functools.cached_property
    def _none(self) -> list[Batches]:
        """No minibatches, for each client: what those see that need none to make their view."""
        none = self._draw(self._everyone, replace(self.plan, epochs=0, steps=None), "personalize", 0)
        own = zip(none.index, none.mask, none.key, none.count, strict=True)
        return [Batches(none.x, none.y, *each) for each in own]

    def _own_outputs(self, round: int, engine: Engine) -> Tensor:
        """Of every client's own model on its validation and test examples, in the order of `Examples`."""
        if self._examples.fit() and not self.method.personalize_epochs and not isinstance(self.state.clients, Paged):
            down = self._send(self._everyone, *self._for_evaluation, round)
            with on(self.federation.x.device):
                rows = ((tree.rows(self.state.clients, i), tree.rows(down, i)) for i in self._everyone)
                views = [self._view(*row, batches) for row, batches in zip(rows, self._none, strict=True)]
                if self._examples.little("P", functools.partial(self.method.predict, self.task, views[0])):
                    pairs = zip(views, self._examples.x, strict=True)
                    with own_products(engine.compiled):
                        return torch.cat([self.method.predict(self.task, view, x) for view, x in pairs])
        return self._examples.laid(self._own_results(round, engine, self._everyone))

    def _shared_outputs(self, round: int, engine: Engine, shared: Params) -> Tensor:
        """The same of the model for everybody."""
        if self._examples.fit():
            with on(self.federation.x.device):
                if self._examples.little("G", functools.partial(self.task.logits, tree.rows(shared, 0))):
                    pairs = enumerate(self._examples.x)
                    with own_products(engine.compiled):
                        return torch.cat([self.task.logits(tree.rows(shared, i), x) for i, x in pairs])
        return self._examples.laid(self._shared_results(round, engine, shared, self._everyone))

    def _own_results(self, round: int, engine: Engine, ids: list[int], pool: Index | None = None) -> Any:
        """Of the clients `ids`, on their validation and test examples or on those of `pool`."""
        rows_of = self._personal(round, ids)

        def personal(group: list[int]) -> Rows:
            (client, down), batches = rows_of(group)
            return (client, down, self._positions(group, pool)), batches

        purpose = "evaluate" if pool is None else POOL
        return engine.map(self._outputs, self.federation, ids, personal, purpose=purpose)

    def _shared_results(
        self, round: int, engine: Engine, shared: Params, ids: list[int], pool: Index | None = None
    ) -> Any:
        def common(group: list[int]) -> Rows:
            none = self._draw(group, replace(self.plan, epochs=0, steps=None), "personalize", round)
            return (tree.rows(shared, self._at(group)), self._positions(group, pool)), none

        purpose = "evaluate globally" if pool is None else POOL
        return engine.map(self._global_outputs, self.federation, ids, common, purpose=purpose)

    def _shared(self) -> Params | None:
        return self.place.models(self.method, self.state.server, len(self.federation.names))

    def _positions(self, group: list[int], pool: Index | None = None) -> tuple[Tensor, ...]:
        if pool is not None:
            return (torch.from_numpy(pool).to(self.federation.x.device).expand(len(group), -1),)
        splits = [self.federation.split(i) for i in group]
        return tuple(pad_positions([split[part] for split in splits]).to(self.federation.x.device) for part in PARTS)

    def _pooled(self, results: list[tuple[list[int], Tree]], ids: list[int], pool: Index) -> Scores:
        """The metrics of the models of `ids`, each on all of `pool`."""
        (outputs,) = in_order(results, ids)
        y = self.federation.y[torch.from_numpy(pool)]
        owner = torch.arange(len(ids)).repeat_interleave(len(pool))
        return score(self.task, outputs.flatten(0, 1), y.repeat(len(ids), *[1] * (y.ndim - 1)), owner, len(ids))

    def views(self, round: int, engine: Engine) -> Any:
        """What every client would deploy, as rows; paged, where the clients' states are."""
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
            views = paged.put(views, torch.tensor(ids), part)
        return views

    def probe(self) -> tuple[Any, list[int], Any]:
        """What `choose` measures: the first round's work."""
        ids = self.sample(1)
        return self._local_update, ids, self._work(1, ids)[1]

    def client_steps(self, rounds: int) -> int:
        """Gradient steps of all clients in all rounds, on average over who takes part."""
        everyone = [self.plan.num_steps(len(split.train)) for split in self.federation.clients.values()]
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
        plan = replace(self.plan, epochs=self.method.personalize_epochs, steps=None)

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
            return self.place.send(send, self.state.server, self._at(ids), fresh)

    def _rows(self, ids: list[int], down: Tree) -> Any:
        place = {client: row for row, client in enumerate(ids)}
        everyone = ids == self._everyone and not isinstance(self.state.clients, Paged)

        def rows_of(group: list[int]) -> tuple[Tree, Tree]:
            if group == ids:
                return self.state.clients if everyone else paged.take(self.state.clients, self._at(ids)), down
            at = self._at([place[i] for i in group])
            # One model for all is not copied for each.
            sent = tree.map(lambda leaf: leaf[: len(at)] if tree.repeated(leaf) else tree.rows(leaf, at), down)
            return paged.take(self.state.clients, self._at(group)), sent

        return rows_of

    def _draw(self, group: list[int], plan: Plan, purpose: str, round: int) -> Batches:
        return draw(self.federation, group, plan, seed=self.seed, purpose=purpose, round=round)

    def _local_update(self, client: Tree, down: Tree, batches: Batches) -> Any:
        return self.method.local_update(self.task, client, down, batches)

    def _view(self, client: Tree, down: Tree, batches: Batches) -> Tree:
        return self.method.personalize(self.task, client, down, batches)

    def _outputs(self, client: Tree, down: Tree, positions: tuple[Tensor, ...], batches: Batches) -> Tree:
        view = self._view(client, down, batches)
        return _in_pieces(lambda x: self.method.predict(self.task, view, x), batches.x, positions)

    def _global_outputs(self, params: Params, positions: tuple[Tensor, ...], batches: Batches) -> Tree:
        return _in_pieces(lambda x: self.task.logits(params, x), batches.x, positions)

    @timed("aggregate")
    def _check(self, round: int, ids: list[int], ups: Tree, info: Info) -> None:
        said = [*info.values(), *tree.leaves(ups)]
        if math.isfinite(sum(float(leaf.sum()) for leaf in said)):  # then all of them are; one pass, no copy
            return
        for leaf in said:
            bad = ~torch.isfinite(leaf.reshape(len(ids), -1)).all(1)
            if bool(bad.any()):
                name = self.federation.names[ids[int(bad.nonzero()[0])]]
                raise CoterieError(
                    f"training diverged: client '{name}' has NaN or infinite values in round {round}. "
                    "Try a smaller learning rate (--lr); the checkpoints before this round are kept."
                )


def _in_pieces(predict: Callable[[Tensor], Tensor], x: Tensor, positions: tuple[Tensor, ...]) -> Tree:
    width = max(1, PIECE // max(x[0].numel() * 4 * 32, 1))  # as float32, whatever it is stored as, in 32 channels
    stacked = any(torch._C._functorch.is_batchedtensor(part) for part in positions)
    with contextlib.nullcontext() if stacked else FewChannelConvolution(alone=True):
        return tuple(torch.cat([predict(x[piece]) for piece in torch.split(part, width)]) for part in positions)
