"""What sites and server tell each other about the federation, and what follows from it.

A site declares its sizes and the form of its examples when it joins. From all declarations the server makes `Facts`,
which go with every message, so that a site builds the same model, the same minibatches and the same form of messages
as in a simulation: nothing of it depends on other sites' data.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from coterie import rng, tree
from coterie.batches import Batches
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.decode import Decode
from coterie.deploy.refused import Refused
from coterie.engine.engine import one_thread
from coterie.errors import ConfigError, DataError
from coterie.experiment.config import Config
from coterie.experiment.setup import Model
from coterie.hyper import AnyMethod
from coterie.method import Population
from coterie.models import find_model
from coterie.task import Task, make_task
from coterie.tree import Tree

DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float64, torch.uint8, torch.int64)}


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a site says of its data: how much there is and of what form; no value of it."""

    train: int
    validation: int
    test: int
    shape: tuple[int, ...]  # of an input
    y_shape: tuple[int, ...]  # of a target
    classes: int | None  # None: regression
    dtype: str = "float32"  # of the inputs
    decode: Any = None  # how bytes become numbers, as JSON

    @classmethod
    def read(cls, told: Any) -> Declaration:
        try:
            sizes = {key: told[key] for key in ("train", "validation", "test")}
            shapes = {key: tuple(told[key]) for key in ("shape", "y_shape")}
            numbers = [*sizes.values(), *shapes["shape"], *shapes["y_shape"]]
            classes = told["classes"]
            if any(type(number) is not int or number < 1 for number in numbers) or max(sizes.values()) > 10**9:
                raise ValueError
            Decode.from_json(told["decode"])
            if told["dtype"] not in DTYPES:
                raise ValueError
            if classes is not None and (type(classes) is not int or not 2 <= classes <= 10**6):
                raise ValueError
        except (TypeError, KeyError, ValueError, DataError) as error:
            raise Refused("bad-header", "what the site declares cannot be read") from error
        form = (shapes["shape"], shapes["y_shape"], classes, told["dtype"], told["decode"])
        return cls(sizes["train"], sizes["validation"], sizes["test"], *form)


def declare(federation: Federation) -> Declaration:
    """Of a federation that holds one client."""
    split, decode = federation.split(0), federation.decode
    shapes = tuple(federation.x.shape[1:]), tuple(federation.y.shape[1:])
    sizes = len(split.train), len(split.validation), len(split.test)
    dtype = str(federation.x.dtype).removeprefix("torch.")
    return Declaration(*sizes, *shapes, federation.num_classes, dtype, decode and decode.to_json())


@dataclasses.dataclass(frozen=True)
class Facts:
    size: int  # clients
    audience: int  # most that are heard in one round
    shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    classes: int | None
    largest: int  # training examples of the largest site
    dtype: str = "float32"  # of the inputs
    decode: Any = None

    @classmethod
    def read(cls, told: Any) -> Facts:
        try:
            values = {field.name: told[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**values, "shape": tuple(told["shape"]), "y_shape": tuple(told["y_shape"])})
        except (TypeError, KeyError) as error:
            raise Refused("bad-header", "what the server tells of the federation cannot be read") from error

    @property
    def kind(self) -> Any:
        return "regression" if self.classes is None else "classification"

    @property
    def outputs(self) -> int:
        return self.classes or int(np.prod(self.y_shape, dtype=int))

    def blank(self, number: int) -> torch.Tensor:
        """Inputs of the right form."""
        return torch.zeros(number, *self.shape, dtype=DTYPES[self.dtype])

    def plan(self, config: Config) -> Plan:
        return dataclasses.replace(config.plan(), width=min(config.batch_size, self.largest))


def gather(config: Config, declared: Mapping[str, Declaration]) -> Facts:
    """Raises `DataError` naming the sites that do not fit together."""
    first_name, first = next(iter(declared.items()))
    for name, each in declared.items():
        if _form(each) != _form(first):
            raise DataError(
                f"site '{name}' has inputs of shape {each.shape} ({each.dtype}) and {_targets(each)}, but "
                f"'{first_name}' has {first.shape} ({first.dtype}) and {_targets(first)}: sites need the same columns"
            )
    classes = None if first.classes is None else max(each.classes or 2 for each in declared.values())
    largest = max(each.train for each in declared.values())
    audience = config.participants(len(declared))
    forms = (first.shape, first.y_shape, classes, largest, first.dtype, first.decode)
    return Facts(len(declared), audience, *forms)


def hollow(config: Config, declared: Mapping[str, Declaration], facts: Facts) -> Federation:
    """The federation as the server knows it: names and sizes; its examples are zeros that take no memory."""
    splits, start = {}, 0
    for name, each in declared.items():
        ends = np.cumsum([start, each.train, each.validation, each.test])
        splits[name] = Split(*(np.arange(a, b) for a, b in itertools.pairwise(ends)))
        start = int(ends[-1])
    x = torch.zeros(1, dtype=torch.uint8).expand(start, *facts.shape)
    y = torch.zeros(1, dtype=torch.float32 if facts.classes is None else torch.int64).expand(start, *facts.y_shape)
    return Federation(config.data, x, y, splits, facts.classes)


def build_task(config: Config, model: Model, facts: Facts) -> Task:
    """The same initial model on every machine: from the seed alone."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)
        factory = find_model(model) if isinstance(model, str) else model
        module = factory if isinstance(factory, torch.nn.Module) else factory(facts.shape, facts.outputs)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError([f"model '{model}' gave a {type(module).__name__}, not an nn.Module"])
    try:
        own: dict[str, Any] = {"head": config.head, "decode": Decode.from_json(facts.decode), "bf16": config.bf16}
        return make_task(module, facts.kind, facts.classes, facts.blank(2), **own)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def population(facts: Facts, task: Task, names_keys: torch.Tensor | None = None, near: int | None = None) -> Population:
    audience = facts.audience if near is None else min(facts.audience, near)
    return Population(facts.size, audience, task, names_keys)


def message_forms(method: AnyMethod, task: Task, server: Tree, config: Config, facts: Facts) -> tuple[Tree, Tree]:
    """(a client's message, its info) as the method would make them: an update on two blank examples, all masked.

    Only names, shapes and types of the result mean anything.
    """
    plan = facts.plan(config)
    steps = torch.zeros(1 if plan.steps else plan.epochs, plan.steps or 1, 2, dtype=torch.int64)
    x = facts.blank(2)
    y = torch.zeros(2, *facts.y_shape, dtype=torch.float32 if facts.classes is None else torch.int64)
    batches = Batches(x, y, steps, steps.float(), steps[..., 0], torch.tensor(2.0))
    down = tree.rows(method.dispatch(server, torch.tensor([0]), torch.Generator()), 0)
    with one_thread():
        _, up, info = method.local_update(task, method.init_client(task.init()), down, batches)
    return up, info


def _form(declared: Declaration) -> tuple[Any, ...]:
    """What all sites must have in common."""
    return declared.shape, declared.y_shape, declared.classes is None, declared.dtype, declared.decode


def _targets(declared: Declaration) -> str:
    return "numbers to predict" if declared.classes is None else f"{declared.classes} classes"
