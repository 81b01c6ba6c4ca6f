"""A federation in memory: server (or the peers' copies of it), clients, and what happens in a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie import rng, tree
from coterie.batches import Batches
from coterie.data.federation import Federation, SplitName
from coterie.data.minibatches import Plan, draw, pad_positions
from coterie.engine import Central, Engine, Place, in_order
from coterie.engine.engine import Rows
from coterie.errors import CoterieError
from coterie.evaluation import Scores, score
from coterie.hyper import AnyMethod
from coterie.method import Info, Population
from coterie.task import Task
from coterie.tree import Params, Tree

PARTS: tuple[SplitName, ...] = ("validation", "test")
EVALUATION_BYTES = 64 * 2**20  # inputs that a chunk evaluates at once


class State(NamedTuple):
    """All that changes from round to round; a tree, so that a checkpoint is one file."""

    server: Tree  # among peers: leaves [clients, ...], one copy each
    clients: Tree  # leaves [clients, ...]


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
    ) -> Simulation:
        params = task.init() if params is None else params
        size = len(federation.names)
        place = place or Central()
        keys = rng.keys_of(federation.names)
        server = place.start(method, params, Population(size, participants, task, keys))
        clients = tree.broadcast(method.init_client(params), size)
        return cls(method, task, federation, plan, participants, seed, State(server, tree.clone(clients)), place)

    def sample(self, round: int) -> list[int]:
        """The clients of a round."""
        return self._smallest(list(range(len(self.federation.names))), self.participants, "participation", round)

    def _smallest(self, ids: list[int], size: int, purpose: str, round: int) -> list[int]:
        """A random choice: each client draws a number of its own; the smallest are chosen, whatever their order."""
        if size >= len(ids):
            return ids
        ticket = {i: rng.seed_of(self.seed, purpose, round, self.federation.names[i]) for i in ids}
        return sorted(sorted(ticket, key=lambda i: ticket[i])[:size])

    def train(self, round: int, engine: Engine) -> Round:
        """One round: dispatch, local updates, aggregate. The state is replaced only when all of it has worked."""
        ids = self.sample(round)
        down, rows_of = self._work(round, ids)
        results = engine.map(self._local_update, self.federation, ids, rows_of, purpose="train")
        clients, ups, info = in_order(results, ids)
        self._check(round, ids, ups, info)
        at = torch.tensor(ids)
        heard, said = at, ups
        if self.heard is not None:
            those = self._smallest(ids, self.heard, "hearing", round)
            heard, said = torch.tensor(those), tree.rows(ups, torch.tensor([ids.index(i) for i in those]))
        server = self.place.aggregate(self.method, self.state.server, heard, said)
        self.state = State(server, tree.put(self.state.clients, at, clients))
        server_info = self.place.info(self.method, server)
        return Round(ids, info, server_info, *self.place.traffic(self.method, at, ups, down))

    def evaluate(self, round: int, engine: Engine) -> dict[str, Scores]:
        """Every client's validation and test metrics of the model it would deploy now (P).

        Where the method has one model for everybody too (G), its metrics on the same examples have the prefix global_.
        """
        everyone = list(range(len(self.federation.names)))
        rows_of = self._personal(round, everyone)

        def personal(group: list[int]) -> Rows:
            (client, down), batches = rows_of(group)
            return (client, down, self._positions(group)), batches

        scores = self._score(engine.map(self._outputs, self.federation, everyone, personal, purpose="evaluate"))
        shared = self.place.models(self.method, self.state.server, len(everyone))
        if shared is not None:

            def common(group: list[int]) -> Rows:
                return (tree.rows(shared, torch.tensor(group)), self._positions(group)), rows_of(group)[1]

            results = engine.map(self._global_outputs, self.federation, everyone, common, purpose="evaluate globally")
            scores |= {f"global_{part}": by for part, by in self._score(results).items()}
        return scores

    def _positions(self, group: list[int]) -> tuple[Tensor, ...]:
        splits = [self.federation.split(i) for i in group]
        return tuple(pad_positions([split[part] for split in splits]) for part in PARTS)

    def _score(self, results: list[tuple[list[int], Tree]]) -> dict[str, Scores]:
        scores = {}
        for k, part in enumerate(PARTS):
            outputs, positions, owner = [], [], []
            for group, chunk in results:
                for row, i in enumerate(group):
                    own = self.federation.split(i)[part]
                    outputs.append(chunk[k][row, : len(own)])
                    positions.append(torch.from_numpy(own))
                    owner.append(torch.full((len(own),), i))
            y = self.federation.y[torch.cat(positions)]
            clients = len(self.federation.names)
            scores[str(part)] = score(self.task, torch.cat(outputs), y, torch.cat(owner), clients)
        return scores

    def views(self, round: int, engine: Engine) -> Tree:
        """What every client would deploy, as rows."""
        everyone = list(range(len(self.federation.names)))
        rows_of = self._personal(round, everyone)
        return in_order(engine.map(self._view, self.federation, everyone, rows_of, purpose="view"), everyone)

    def probe(self) -> tuple[Any, list[int], Any]:
        """What `choose` measures: the first round's work."""
        ids = self.sample(1)
        return self._local_update, ids, self._work(1, ids)[1]

    def client_steps(self, rounds: int) -> int:
        """Gradient steps of all clients in all rounds, on average over who takes part."""
        everyone = [self.plan.num_steps(len(split.train)) for split in self.federation.clients.values()]
        return round(rounds * self.participants * sum(everyone) / len(everyone))

    def _work(self, round: int, ids: list[int]) -> tuple[Tree, Any]:
        rows_of, down = self._rows(ids, self.method.dispatch, "dispatch", round)

        def with_batches(group: list[int]) -> Rows:
            return rows_of(group), self._draw(group, self.plan, "minibatches", round)

        return down, with_batches

    def _personal(self, round: int, ids: list[int]) -> Any:
        rows_of, _ = self._rows(ids, self.method.deploy, "dispatch for evaluation", round)
        plan = Plan(self.plan.batch_size, epochs=self.method.personalize_epochs)

        def with_batches(group: list[int]) -> Rows:
            return rows_of(group), self._draw(group, plan, "personalize", round)

        return with_batches

    def _rows(self, ids: list[int], send: Any, purpose: str, round: int) -> tuple[Any, Tree]:
        def fresh() -> torch.Generator:
            return rng.torch_generator(self.seed, purpose, round)

        down = self.place.send(send, self.state.server, torch.tensor(ids), fresh)
        place = {client: row for row, client in enumerate(ids)}

        def rows_of(group: list[int]) -> tuple[Tree, Tree]:
            at = torch.tensor([place[i] for i in group])
            return tree.rows(self.state.clients, torch.tensor(group)), tree.rows(down, at)

        return rows_of, down

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

    def _check(self, round: int, ids: list[int], ups: Tree, info: Info) -> None:
        for leaf in [*info.values(), *tree.leaves(ups)]:
            flat = leaf.reshape(len(ids), -1)
            if bool(torch.isfinite(flat.sum())):  # then all of them are; one pass, no copy
                continue
            bad = ~torch.isfinite(flat).all(1)
            if bool(bad.any()):
                name = self.federation.names[ids[int(bad.nonzero()[0])]]
                raise CoterieError(
                    f"training diverged: client '{name}' has NaN or infinite values in round {round}. "
                    "Try a smaller learning rate (--lr); the checkpoints before this round are kept."
                )


def _in_pieces(predict: Callable[[Tensor], Tensor], x: Tensor, positions: tuple[Tensor, ...]) -> Tree:
    width = max(1, EVALUATION_BYTES // max(x[0].numel() * 4 * 32, 1))  # as float32, whatever it is stored as
    return tuple(torch.cat([predict(x[piece]) for piece in torch.split(part, width)]) for part in positions)
