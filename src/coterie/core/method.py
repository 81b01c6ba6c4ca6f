"""THE INTERFACE: what a method is, and what it may see.

Every personalised federated method repeats three verbs:

    infer      client i:  theta_i <- argmin f_i(theta) + R(theta; prior_i)     (`local_update`)
    say        client i sends a message: parameters, a log-weight, ...         (the `Up` it returns)
    combine    the messages become each client's next prior                    (`aggregate`, `dispatch`)

A run calls the functions of a method in this order:

    scheduled                                     when the run's number of rounds is known
    init_server, init_client                      once
    dispatch, local_update, aggregate             in every round, for the clients of the round
    deploy, personalize, predict                  whenever models are evaluated, and at the end
    onboard                                       for a client that joins after the run

Client functions (`init_client`, `local_update`, `personalize`, `predict`) see one client: their trees have no client
axis, and an engine may run many clients at once under `torch.func.vmap`. Server functions (`init_server`, `dispatch`,
`aggregate`, `deploy`) see the clients of a round: the leaves of messages have the client axis first. States and
messages are trees of tensors (`coterie.core.tree`); "nothing" is the empty tuple. All functions are pure: they modify
nothing that they are given, and draw random numbers only from what they are given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from coterie.core import routes, tree
from coterie.core.batches import Batches
from coterie.core.client_rows import RowStore
from coterie.core.task import Task
from coterie.core.tree import Params, Tree

Server = TypeVar("Server")  # the server's state
Client = TypeVar("Client")  # one client's private state, which never leaves it
Down = TypeVar("Down")  # the message from the server to one client
Up = TypeVar("Up")  # the message from one client to the server
Info = dict[str, Tensor]  # values worth logging, by name
EXAMPLE_COUNT_NAMES = {"count", "size", "class_size"}  # leaves of a message with these names count examples


class Population(NamedTuple):
    """The clients that a server is made for.

    A server that holds a part of the model (its body) or something for each class needs `task` to know names and
    shapes; most servers do not. A server that draws random numbers for each client draws them from the clients' `keys`
    (`coterie.core.rng.uniform`), so that they belong to the client and not to its position. One that begins with
    random numbers of its own, such as the parameters of a module beside the model (`coterie.parts.auxiliary`), draws
    them from `seed`. One that draws in `aggregate` keeps `seed` in its state, as an int64 tensor, with a count of its
    rounds, and hashes the two (`coterie.core.rng.normals`; see `methods/qlsd_ft.py`). Copies at peers then agree, and
    a resumed run draws the same.
    """

    size: int  # the number of all clients
    audience: int  # the largest number of clients that are heard in one round
    task: Task | None = None
    keys: Tensor | None = None  # [size] int64, a hash of each client's name; None if clients have no names
    store: RowStore | None = None  # decides where rows of many clients are kept; None keeps them in memory
    holds: Tensor | None = None  # int64; among peers, whose rows a copy of the server needs to hold; None: everybody's
    seed: int = 0  # for random numbers of the server's own; the same for all copies of it

    def rows(self, first: Tree) -> Any:
        """Return a row for every client, all equal to `first` at the start.

        Read and replace these rows only with `coterie.core.client_rows.take` and `put`: they may be kept in files.
        """
        return tree.broadcast(first, self.size) if self.store is None else self.store.rows(first, self.size)


class CountedParams(NamedTuple):
    """The message of methods that average models by number of examples."""

    params: Params
    count: Tensor  # type: ignore[assignment]  # []; n_i, the client's number of training examples


class TrainedAndBuffers(NamedTuple):
    """The message of methods whose server may step beyond the average in trained parameters, but not in buffers."""

    trained: Params
    buffers: Params
    count: Tensor  # type: ignore[assignment]  # []; n_i, the client's number of training examples

    def relaxed_mean(self, server: Params, weights: Tensor, beta: float) -> Params:
        """Return (1 - beta) server + beta mean over the clients. Call it on the messages of a round.

        Buffers are averaged whatever `beta` is, since extrapolating could make a variance negative.

        Args:
            server: the server's model, whose names are those of `trained` and `buffers` together.
            weights: [clients], what each client counts in the mean.
            beta: the relaxation; 1 gives the mean, more extrapolates.
        """
        mean = tree.mean(self.trained, weights)
        new = tree.mix({name: server[name] for name in mean}, mean, beta)
        return {**server, **new, **tree.mean(self.buffers, weights)}


class Newcomer(NamedTuple):
    """A client that took no part in the run, with its own copy of the finished server; see `Method.onboard`."""

    server: Any  # if the server has rows for clients, the last row is the newcomer's
    params: Params  # the model that its `init_client` is given
    only: frozenset[str] | None = None  # the names of the parameters it trains; None: those that everybody trains


class Method(ABC, Generic[Server, Client, Down, Up]):
    """A method is a frozen dataclass: its fields are its hyper-parameters, and its flags on the command line."""

    # False: the method needs one server, because copies of the server at the clients would not stay consistent.
    peer_to_peer: ClassVar[bool] = True
    # Completes the sentence "this model learned from ..." in the model card.
    learns_from: ClassVar[str] = "all clients, through the model that they share"
    # Completes "the file of this model holds ..." in the model card: what of the training data a view holds, if any.
    view_holds: ClassVar[str] = ""
    # Whether clients may have models of different architecture: "nothing" (clients share nothing), "heads" or
    # "prototypes" say what they share; empty: more of a model than that, so that all need the same one.
    mixes_models: ClassVar[str] = ""
    law_contexts: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Options (names of fields with values) beside which other options come into play.

    The laws (`coterie.testing`) change one option at a time. One that matters only together with another, such as a
    step size of something that is off by default, changes nothing alone: the method names the company it needs here.
    """

    exempt: ClassVar[Mapping[int, str]] = {}
    """The laws (`coterie.testing`) that do not apply to this method, by number, each with the reason in words."""

    not_meant_to_learn: ClassVar[Mapping[str, str]] = {}
    """Settings in which the method need not learn within the few steps of law 4, each with the reason in words.

    A key is "option = value", an option (whatever its other values are), or "defaults".
    """

    @property
    def averaged(self) -> tuple[str, ...] | None:
        """The fields of its messages that reach the server's state by nothing but their weighted mean.

        `--robust` (`coterie.parts.robust`) acts on these. None: the models of `CountedParams` and of
        `TrainedAndBuffers`, if the method's messages are of these types, and else nothing. An empty tuple: the
        server uses models in another way.
        """
        return None

    @property
    def stepped(self) -> tuple[str, ...] | None:
        """The fields of the server's state that hold these means, from round to round.

        `--server-optimizer` (`coterie.parts.server_optimizers`) takes its steps there. None: all of the state, if that
        is a model. An empty tuple: there are none, and such an optimiser is refused.
        """
        return None

    @property
    def beyond_sums(self) -> str:
        """Why these means cannot be taken by secure sums (`coterie.parts.sums`), in words; empty if they can."""
        return ""

    def largest_weight(self, examples: int) -> float:
        """Return the most that a message of a client with so many training examples may weigh in these means."""
        return float(examples)

    def scheduled(self, rounds: int) -> Self:
        """Return the method for a run of so many rounds; by default itself.

        Override it if a hyper-parameter is `auto` and depends on the number of rounds, such as a step size of a
        theorem about K rounds: return a copy in which it is a number. It is called wherever a configuration, or an
        instance given from Python, becomes the method of a run, so that simulator, Flower and peers agree.

        Args:
            rounds: the number of communication rounds of the run.
        """
        return self

    @abstractmethod
    def init_server(self, params: Params, population: Population) -> Server:
        """Return the server's state before the first round.

        Args:
            params: the initial model, buffers included.
            population: the clients, of which the server may hold one row each.
        """

    @abstractmethod
    def init_client(self, params: Params) -> Client:
        """Return a client's private state before the first round it takes part in.

        Args:
            params: the initial model, buffers included; it is the same for all clients.
        """

    @abstractmethod
    def dispatch(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        """Return what the server sends to the clients of a round.

        Args:
            server: the server's state.
            ids: [clients of the round] int64, their numbers among all clients.
            rng: a generator for this round. Draw a fixed number of values from it and hash the clients' keys with
                them (`coterie.core.rng.uniform`), so that draws do not depend on which clients are asked for together.

        Returns:
            Messages with leaves [len(ids), ...]. `tree.broadcast` sends the same to all without copying.
        """

    @abstractmethod
    def local_update(self, task: Task, client: Client, down: Down, batches: Batches) -> tuple[Client, Up, Info]:
        """Do one client's work of one round.

        Args:
            task: the model and its loss.
            client: the client's private state.
            down: what the server sent to this client, without the client axis.
            batches: the client's minibatches of this round. The examples that `withheld_share` asks for are in none of
                them, but in `batches.of_withheld()`.

        Returns:
            The client's new private state, its message to the server, and scalars worth logging, by name. The console
            shows the one called "loss".
        """

    @abstractmethod
    def aggregate(self, server: Server, ids: Tensor, ups: Up) -> Server:
        """Combine the messages of a round into the server's new state.

        Args:
            server: the server's state, as it was dispatched.
            ids: [clients of the round] int64, the senders' numbers among all clients.
            ups: their messages, leaves [len(ids), ...].
        """

    @abstractmethod
    def personalize(self, task: Task, client: Client, down: Down, batches: Batches) -> Tree:
        """Return the view: what this client would deploy now, usually a model.

        Args:
            task: the model and its loss.
            client: the client's private state; that of `init_client` if it has not taken part yet.
            down: what `deploy` sent to this client, without the client axis.
            batches: `personalize_epochs` epochs of the client's training data, and the withheld ones; never validation
                or test data. A method whose predictions are random can put a key from `batches.key` into the view, or
                constant ones (`methods/pfedbayes.py`).
        """

    def deploy(self, server: Server, ids: Tensor, rng: torch.Generator) -> Down:
        """Return what the server sends to the clients `ids` to make their views; by default `dispatch`.

        Override it if a round explores, or if views need less than a round does. Arguments and result are those of
        `dispatch`.
        """
        return self.dispatch(server, ids, rng)

    def onboard(self, task: Task, newcomer: Newcomer, ids: Tensor, ups: Up | None) -> Newcomer:
        """Let a client join that took no part in the run.

        The newcomer works on its own copy of the server, so the other clients' models are not touched. There it is
        dispatched to, updates and personalises like a client that has not taken part before. By default its messages
        change nothing: what the server learned from the others is its prior in every round.

        Args:
            task: the model and its loss.
            newcomer: the newcomer before this call.
            ids: [1] int64, the newcomer's number in its copy of the server.
            ups: None before its first round, and after each round its message, with leaves [1, ...].

        Returns:
            The newcomer from now on. `params` and `only` are read once, before its first round.
        """
        return newcomer

    def predict(self, task: Task, view: Any, x: Tensor) -> Tensor:
        """Return the view's predictions for the examples `x` [batch, ...]: logits [batch, classes], or outputs."""
        return task.logits(view, x)

    @property
    def personalize_epochs(self) -> int:
        """The number of epochs of its training data that a client needs to make its view; 0 if it needs none."""
        return 0

    @property
    def withheld_share(self) -> float:
        """The share of its training examples that a client never trains on, but may measure models on; 0 for none.

        They are the same in every round, at least one (none if a client has a single example), and come to
        `local_update` and `personalize` as `batches.of_withheld()`. They are no validation data of the run: those
        select the round, and what a method has looked at would be selected with a bias.
        """
        return 0.0

    def offer(self, server: Server, ids: Tensor) -> Tree:
        """Return what each of the clients `ids` gives to those who ask for it, leaves [len(ids), ...].

        It is what `dispatch` and `deploy` put into `coterie.core.routes.Asked`. Methods in which no client asks another
        have nothing to offer.
        """
        return ()

    def global_model(self, server: Server) -> Params | None:
        """Return the method's one model for everybody, which is then evaluated too (G); None if it has none.

        Return None as well if the clients deploy that model anyway.
        """
        return None

    def message_bytes(self, ups: Up) -> int:
        """Return how many bytes the clients would send for the messages `ups` (leaves [clients, ...]).

        Override it if messages have room that is not always used.
        """
        return routes.sent_bytes(ups)

    def implausible(self, up: Up, examples: int) -> str | None:
        """Explain what in a message cannot be true; return None if everything can. A deployed server asks this first.

        By default, leaves whose names are in `EXAMPLE_COUNT_NAMES` may neither be negative nor add up to more than
        the declared examples. Override it if a message makes other claims that can be checked.

        Args:
            up: one client's message, without the client axis.
            examples: the number of training examples that the client declared when it joined.
        """
        for path, leaf in tree.pack(up).items():
            if path.rpartition("/")[2] in EXAMPLE_COUNT_NAMES:
                total, least = float(leaf.double().sum()), float(leaf.min()) if leaf.numel() else 0.0
                if least < 0 or not 0 < total <= examples:
                    return f"'{path}' counts {total:g} examples of {examples} declared"
        return None

    def server_info(self, server: Server) -> Info:
        """Return tensors of the server's state worth logging after each round, such as who learned from whom.

        "collaboration" [clients, clients] and "weight" [clients] are drawn in the report.
        """
        return {}

    @property
    def pull_option(self) -> str:
        """The option that the method's terms beside the loss grow with: "mu", or "1/sigma2" if they shrink with it.

        `coterie plan` then measures these terms and warns where they do nothing, or hold the model where it is. Empty:
        the method adds no such term.
        """
        return ""

    def cautions(self, task: Task, population: Population) -> list[str]:
        """Say what in this model, or for these clients, makes the method do nothing of its own, and what to do.

        `coterie plan` and the first lines of a run show these sentences. Name what is so, then the remedy.
        """
        return []


def body_cautions(task: Task) -> list[str]:
    """Return the `cautions` of a method that shares the body of a model, while heads are the clients' own."""
    if not task.head_names:
        return ["the model has no head, so all of it is shared, as in FedAvg: name the layer with --head"]
    if not set(task.init()) - task.head_names:
        return ["the model is nothing but its head, so nothing is shared: choose a --model with more than one layer"]
    return []
