"""Clients with networks of different architecture: who has which, and what they share.

Models of different shapes cannot be stacked, so clients are grouped by architecture (`Group`), one stack a group. The
server hears all of them, which takes a method whose server and messages hold nothing of a body (`Method.mixes_models`):
class prototypes, or the head. Heads have other names in other networks; on the way to and from the server they are
called as in the first group.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.client_rows import ClientRows
from coterie.core.errors import ConfigError, CoterieError
from coterie.core.task import Task
from coterie.core.tree import Params, Tree
from coterie.methods import METHODS

OWN_MODELS = "own-models"  # what config.toml says of models that came from Python
OWN_MODEL = "own-model"
Models = Sequence[str] | Mapping[str, Any] | Callable[[str], Any]


@dataclass(frozen=True)
class Group:
    """Clients that have the same network."""

    model: str  # its name, or `own-model`
    task: Task
    ids: tuple[int, ...]  # numbers of its clients among all
    begins: tuple[Params, ...]  # each client's initial model
    names: Mapping[str, str]  # {a head's name in the first group: its name here}


@dataclass(frozen=True)
class Mixed:
    """The groups of a run; the first one, whose head all begin with, has the smallest model."""

    groups: tuple[Group, ...]

    def task(self, client: int) -> Task:
        """Return the task of the client with this number."""
        return self._of(client).task

    def model(self, client: int) -> str:
        """Return the name of a client's model."""
        return self._of(client).model

    def _of(self, client: int) -> Group:
        return next(group for group in self.groups if client in group.ids)

    def describe(self) -> str:
        """Say in words how many clients have which model."""
        return ", ".join(f"{group.model} ({len(group.ids)})" for group in self.groups)


def assigned(models: Sequence[str], clients: Sequence[str]) -> list[str]:
    """Return each client's model by the words of `--models`.

    `PATTERN=MODEL` is the model of all clients whose names fit, of several the first; models without a pattern are
    dealt out in turn to the others, in their order.

    Raises:
        ConfigError: a pattern fits no client, or a client has no model.
    """
    rules, turns = [], []
    for word in models:
        before, equals, after = word.partition("=")
        if equals and ":" not in before:
            rules.append((before.strip(), after.strip()))
        else:
            turns.append(word.strip())
    problems = [
        f"models: no client is called {pattern}; there are {', '.join(clients)}"
        for pattern, _ in rules
        if not fnmatch.filter(clients, pattern)
    ]
    found, lost, number = [], list[str](), 0
    for client in clients:
        fit = next((model for pattern, model in rules if fnmatch.fnmatch(client, pattern)), None)
        if fit is None and turns:
            fit, number = turns[number % len(turns)], number + 1
        if fit is None:
            lost.append(client)
        found.append(fit or "")
    if lost:
        problems.append(f"models: nothing is said of {', '.join(lost)}; add a model for all others, as in *=mlp")
    if problems:
        raise ConfigError(problems)
    return found


def of_clients(models: Models, clients: Sequence[str]) -> list[Any]:
    """Return each client's model: a name, a module or a factory.

    Raises:
        ConfigError: a client has none, or there is one for nobody.
    """
    if callable(models):
        return [models(client) for client in clients]
    if isinstance(models, Mapping):
        problems = [f"models: there is no client '{name}'" for name in models if name not in clients]
        problems += [f"models: client '{client}' has none" for client in clients if client not in models]
        if problems:
            raise ConfigError([*problems, f"the clients are {', '.join(clients)}"])
        return [models[client] for client in clients]
    return list(assigned(models, clients))


def spelled(models: Models, clients: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return what config.toml says of `models`, of which `found` are the names, client by client."""
    if not callable(models) and not isinstance(models, Mapping):
        return list(models)
    if OWN_MODEL not in found:
        return [f"{client}={model}" for client, model in zip(clients, found, strict=True)]
    return [OWN_MODELS]


def grouped(tasks: Sequence[Task], models: Sequence[Any], method: Any) -> Mixed:
    """Group clients whose tasks are equal.

    Args:
        tasks: each client's task.
        models: each client's model: its name, or an object.
        method: what they are to run.

    Raises:
        ConfigError: the method shares bodies, or features or heads do not agree.
    """
    check_method(method)
    kinds: list[Task] = []
    for task in tasks:
        kinds += [] if task in kinds else [task]
    kinds.sort(key=_size)
    groups = []
    for task in kinds:
        ids = tuple(i for i, each in enumerate(tasks) if each == task)
        name = models[ids[0]] if isinstance(models[ids[0]], str) else OWN_MODEL
        begins = tuple(tasks[i].init() for i in ids)
        groups.append(Group(name, task, ids, begins, _heads(kinds[0], task)))
    check_method(method, groups)
    return Mixed(tuple(groups))


ALONE = "nothing"  # of `Method.mixes_models`: clients share nothing at all


def check_method(method: Any, groups: Sequence[Group] = ()) -> None:
    """Raise `ConfigError` in words if clients of this method cannot have different models, or not those of `groups`."""
    if not method.mixes_models:
        can = ", ".join(name for name, cls in METHODS.items() if cls.mixes_models)
        raise ConfigError(
            [
                f"models: {type(method).__name__} shares more of a model than its head, so all clients need the same "
                f"one; with different ones, choose {can}"
            ]
        )
    if groups and method.mixes_models != ALONE:
        _check_heads(groups)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a tree whose dicts have other keys."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(each, names) for key, each in value.items()}
    if isinstance(value, tuple):
        parts = [renamed(each, names) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


class GroupedRows(ClientRows):
    """Rows of clients that are trees of other names and shapes in other groups."""

    def __init__(self, mixed: Mixed, rows: Sequence[Tree]) -> None:
        self._rows = tuple(rows)
        self._places = {i: (g, k) for g, group in enumerate(mixed.groups) for k, i in enumerate(group.ids)}

    def __len__(self) -> int:
        return len(self._places)

    def take(self, ids: Tensor) -> Tree:
        """Return rows of clients of one group."""
        places = [self._places[int(i)] for i in ids]
        if len({group for group, _ in places}) > 1:
            raise CoterieError("these clients have models of different architecture, which are no one tree")
        return tree.rows(self._rows[places[0][0]], torch.tensor([row for _, row in places]))

    def put(self, ids: Tensor, new: Tree) -> ClientRows:
        raise NotImplementedError("views are made as a whole")

    def mean(self, weights: Tensor) -> Tree:
        raise CoterieError("models of different architecture have no mean")


def _heads(first: Task, task: Task) -> dict[str, str]:
    def prefix(name: str | None) -> str:
        return f"{name}." if name else ""

    def own(of: Task) -> dict[str, str]:
        return {name.removeprefix(prefix(of.head_module)): name for name in of.head_names}

    mine, its = own(task), own(first)
    return {its[suffix]: mine[suffix] for suffix in its if suffix in mine}


def _size(task: Task) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    params = task.init()
    return sum(leaf.numel() for leaf in params.values()), [(name, tuple(leaf.shape)) for name, leaf in params.items()]


def _check_heads(groups: Sequence[Group]) -> None:
    """Raise `ConfigError` unless all heads have the same form, and so features are as wide everywhere."""
    forms = []
    for group in groups:
        head = None if group.task.head_module is None else group.task.head_layer
        if not isinstance(head, nn.Linear):
            raise ConfigError([f"models: {group.model} has no linear head: name it with --head"])
        forms.append((head.in_features, head.out_features, head.bias is not None))
    if len(set(forms)) > 1:
        words = [f"{group.model} has {form[0]}" for group, form in zip(groups, forms, strict=True)]
        raise ConfigError(
            [
                f"models: heads and prototypes are shared, so all heads need the same shape and as many features: "
                f"{', '.join(words)} features"
            ]
        )
