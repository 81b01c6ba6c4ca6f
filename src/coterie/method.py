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
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.batches import Batches
from coterie.task import Task
from coterie.tree import Params, Tree

Server = TypeVar("Server")
Client = TypeVar("Client")
Down = TypeVar("Down")
Up = TypeVar("Up")
Info = dict[str, Tensor]


class Population(NamedTuple):
    """Who takes part: `size` clients in all, of which at most `audience` are heard in one round."""

    size: int
    audience: int


class Sized(NamedTuple):
    """A message shared by the methods that average models by number of examples."""

    params: Params
    count: Tensor  # type: ignore[assignment]  # []; the client's number of training examples, n_i


class Method(ABC, Generic[Server, Client, Down, Up]):
    """A method is a frozen dataclass: its fields are its hyper-parameters, and its flags on the command line."""

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

    def server_info(self, server: Server) -> Info:
        """Tensors of the server worth logging each round, such as who learned from whom."""
        return {}
