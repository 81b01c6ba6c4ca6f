"""THE INTERFACE: what a method is, and what it may see.

Every personalised federated method repeats three verbs:

    infer      client i:  theta_i <- argmin f_i(theta) + R(theta; prior_i)     (`local_update`)
    say        client i sends a message: parameters, a log-weight, ...         (the `Up` it returns)
    combine    the messages become each client's next prior                    (`aggregate`, `dispatch`)

Client functions see ONE client and no client axis; server functions always see the client axis first. State and
messages are trees of tensors (`coterie.tree`); "nothing" is the empty tuple. All functions are pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie import tree
from coterie.batches import Batches
from coterie.paged import Store
from coterie.task import Task
from coterie.tree import Params, Tree

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Up = TypeVar("Up")
Info = dict[str, Tensor]
COUNTS = {"count", "size", "class_size"}  # leaves of these names are numbers of examples


class Population(NamedTuple):
    """Who takes part: `size` clients in all, of which at most `audience` are heard in one round, and in what task.

    A server that holds a part of the model (its body) or something for each class needs the task to know their names
    and shapes; most do not. One that draws random numbers for each client draws them from the clients' `keys`
    (`coterie.rng.uniform`), so that they belong to the client and not to its position.
    """

    size: int
    audience: int
    task: Task | None = None
    keys: Tensor | None = None  # [size] int64, a hash of each client's name; None: they have numbers only
    store: Store | None = None  # where rows of many clients may be; None: in memory

    def rows(self, first: Tree) -> Any:
        """`first` for every client, to be read and replaced by `coterie.paged.take` and `put` only."""
        return tree.broadcast(first, self.size) if self.store is None else self.store.rows(first, self.size)


class Sized(NamedTuple):
    """A message shared by the methods that average models by number of examples."""

    params: Params
    count: Tensor  # type: ignore[assignment]  # []; the client's number of training examples, n_i


class Parts(NamedTuple):
    """A message shared by the methods whose server may go beyond the average: with parameters, but not with buffers."""

    trained: Params
    buffers: Params
    count: Tensor  # type: ignore[assignment]  # []; the client's number of training examples, n_i

    def relax(self, server: Params, weights: Tensor, beta: float) -> Params:
        """(1 - beta) server + beta mean over the clients; buffers are averaged, as no variance may fall below 0."""
        mean = tree.mean(self.trained, weights)
        new = tree.mix({name: server[name] for name in mean}, mean, beta)
        return {**server, **new, **tree.mean(self.buffers, weights)}


class Newcomer(NamedTuple):
    """A site that took no part, with a copy of the finished server that is its own: the others' are not touched."""

    server: Any  # with one more row for it, the last, where the server has rows for clients
    params: Params  # the model that its `init_client` is given
    only: frozenset[str] | None = None  # what of the model it trains; None: what everybody does


class Method(ABC, Generic[Server, Client, Down, Up]):
    """A method is a frozen dataclass: its fields are its hyper-parameters, and its flags on the command line."""

    peer_to_peer: ClassVar[bool] = True  # False: it needs one server (its peers' copies would not stay consistent)
    learns_from: ClassVar[str] = "all clients, through the model that they share"  # for the model card

    @abstractmethod
    def init_server(self, params: Params, population: Population) -> Server: ...

    @abstractmethod
    def init_client(self, params: Params) -> Client: ...

    @abstractmethod
    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        """What the clients `ids` are sent; leaves [len(ids), ...]."""

    @abstractmethod
    def local_update(self, task: Task, client: Client, down: Down, batches: Batches) -> tuple[Client, Up, Info]:
        """One client's work of one round: its new private state, its message, and scalars worth logging."""

    @abstractmethod
    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        """Combine the messages of the clients `ids`; leaves of `ups` are [len(ids), ...]."""

    @abstractmethod
    def personalize(self, task: Task, client: Client, down: Down, batches: Batches) -> Tree:
        """The view: what this client would deploy now. `batches` holds `personalize_epochs` epochs of its data."""

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        """What the clients `ids` are sent to make their views of; the same as in a round, unless a round explores."""
        return self.dispatch(server, ids, rng)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        """How a site joins that took no part: before its first round (`ups` None) and with its message after each.

        It is client `ids` of its own copy of the server, and there it dispatches, updates and personalises like any
        client that has not taken part before. By default what it says changes nothing: what the server has learned
        from the others is its prior in every round. `params` and `only` are read once, before the first round.
        """
        return newcomer

    def predict(self, task: Task, view: Any, x: Tensor) -> Tensor:
        """Logits (or regression outputs) of the deployed view."""
        return task.logits(view, x)

    @property
    def personalize_epochs(self) -> int:
        """How many epochs of its training data a client needs to make its view (0: none)."""
        return 0

    def global_model(self, server: Server) -> Params | None:
        """One model for everybody, if the method has one beside the clients' own; it is then evaluated too (G)."""
        return None

    def message_bytes(self, ups: Up) -> int:
        """What the clients would send; less than the tensors' own size where they have room that is not used."""
        return tree.nbytes(ups)

    def implausible(self, up: Up, examples: int) -> str | None:
        """What a client that has `examples` examples cannot truthfully say in its message; None: nothing. A deployed
        server asks before it combines. By default, leaves named as in `COUNTS` may not add up to more examples."""
        for path, leaf in tree.pack(up).items():
            if path.rpartition("/")[2] in COUNTS:
                total, least = float(leaf.double().sum()), float(leaf.min()) if leaf.numel() else 0.0
                if least < 0 or not 0 < total <= examples:
                    return f"'{path}' counts {total:g} examples of {examples} declared"
        return None

    def server_info(self, server: Server) -> Info:
        """Tensors of the server worth logging each round, such as who learned from whom."""
        return {}
