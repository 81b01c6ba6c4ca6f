"""What sites and server tell each other about the federation, and what they build from it.

A site declares the number and shape of its examples when it joins. From all declarations the server makes
`FederationFacts`, which accompany every message. With them a site builds the same model, minibatches and message
formats as a simulation does, without any data of other sites.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from coterie.core import rng, tree
from coterie.core.batches import Batches
from coterie.core.decode import Decode
from coterie.core.errors import ConfigError, DataError
from coterie.core.method import Population
from coterie.core.task import Task, make_task
from coterie.core.tree import Tree
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.deploy.refused import Refused
from coterie.engine.engine import one_thread
from coterie.experiment.config import Config
from coterie.experiment.setup import Model
from coterie.methods.fields import AnyMethod
from coterie.models import find_model

DTYPES = {str(each).removeprefix("torch."): each for each in (torch.float32, torch.float64, torch.uint8, torch.int64)}


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a site declares about its data: numbers and shapes of examples, but no values."""

    train: int
    validation: int
    test: int
    shape: tuple[int, ...]  # of an input
    y_shape: tuple[int, ...]  # of a target
    classes: int | None  # None: regression
    dtype: str = "float32"  # of the inputs
    decode: Any = None  # how bytes become numbers, as JSON

    @classmethod
    def read(cls, values: Any) -> Declaration:
        """Check and parse a received declaration; raise `Refused` if it is malformed."""
        try:
            sizes = {key: values[key] for key in ("train", "validation", "test")}
            shapes = {key: tuple(values[key]) for key in ("shape", "y_shape")}
            numbers = [*sizes.values(), *shapes["shape"], *shapes["y_shape"]]
            classes = values["classes"]
            if any(type(number) is not int or number < 1 for number in numbers) or max(sizes.values()) > 10**9:
                raise ValueError
            Decode.from_json(values["decode"])
            if values["dtype"] not in DTYPES:
                raise ValueError
            if classes is not None and (type(classes) is not int or not 2 <= classes <= 10**6):
                raise ValueError
        except (TypeError, KeyError, ValueError, DataError) as error:
            raise Refused("bad-header", "the site's declaration cannot be read") from error
        form = (shapes["shape"], shapes["y_shape"], classes, values["dtype"], values["decode"])
        return cls(sizes["train"], sizes["validation"], sizes["test"], *form)


def declare(federation: Federation) -> Declaration:
    """Declare the data of a federation with one client."""
    split, decode = federation.split(0), federation.decode
    shapes = tuple(federation.x.shape[1:]), tuple(federation.y.shape[1:])
    sizes = len(split.train), len(split.validation), len(split.test)
    dtype = str(federation.x.dtype).removeprefix("torch.")
    return Declaration(*sizes, *shapes, federation.num_classes, dtype, decode and decode.to_json())


@dataclasses.dataclass(frozen=True)
class FederationFacts:
    """What every site needs to know about the federation."""

    size: int  # number of clients
    audience: int  # maximum number of clients in one round
    shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    classes: int | None
    largest: int  # training examples of the largest site
    dtype: str = "float32"  # of the inputs
    decode: Any = None

    @classmethod
    def read(cls, values: Any) -> FederationFacts:
        """Parse received facts; raise `Refused` if they are malformed."""
        try:
            fields = {field.name: values[field.name] for field in dataclasses.fields(cls)}
            return cls(**{**fields, "shape": tuple(fields["shape"]), "y_shape": tuple(fields["y_shape"])})
        except (TypeError, KeyError) as error:
            raise Refused("bad-header", "the server's facts about the federation cannot be read") from error

    @property
    def kind(self) -> Any:
        return "regression" if self.classes is None else "classification"

    @property
    def outputs(self) -> int:
        return self.classes or int(np.prod(self.y_shape, dtype=int))

    def blank(self, number: int) -> torch.Tensor:
        """Return zero inputs of the right shape and type."""
        return torch.zeros(number, *self.shape, dtype=DTYPES[self.dtype])

    def plan(self, config: Config) -> Plan:
        """Return how much a site trains in a round."""
        return dataclasses.replace(config.plan(), width=min(config.batch_size, self.largest))


def gather_facts(config: Config, declared: Mapping[str, Declaration]) -> FederationFacts:
    """Combine all declarations; raise `DataError` with the names of sites that do not match."""
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
    return FederationFacts(len(declared), audience, *forms)


def federation_without_data(config: Config, declared: Mapping[str, Declaration], facts: FederationFacts) -> Federation:
    """Make the federation as the server knows it: names and sizes, with zeros for examples that take no memory."""
    splits, start = {}, 0
    for name, each in declared.items():
        ends = np.cumsum([start, each.train, each.validation, each.test])
        splits[name] = Split(*(np.arange(a, b) for a, b in itertools.pairwise(ends)))
        start = int(ends[-1])
    x = torch.zeros(1, dtype=torch.uint8).expand(start, *facts.shape)
    y = torch.zeros(1, dtype=torch.float32 if facts.classes is None else torch.int64).expand(start, *facts.y_shape)
    return Federation(config.data, x, y, splits, facts.classes)


def build_task(config: Config, model: Model, facts: FederationFacts) -> Task:
    """Build the same initial model on every machine, from the seed alone."""
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


def population(
    facts: FederationFacts, task: Task, names_keys: torch.Tensor | None = None, near: int | None = None
) -> Population:
    audience = facts.audience if near is None else min(facts.audience, near)
    return Population(facts.size, audience, task, names_keys)


def population_of_peer(
    facts: FederationFacts, task: Task, names_keys: torch.Tensor, near: int, index: int
) -> Population:
    return population(facts, task, names_keys, near)._replace(holds=torch.tensor([index]))


def message_forms(
    method: AnyMethod, task: Task, server: Tree, config: Config, facts: FederationFacts, index: int = 0
) -> tuple[Tree, Tree]:
    """Return a client's message and its info as the method makes them, from an update on two masked zero examples.

    Only the names, shapes and types of the result are meaningful. `server` must hold the rows of client `index`.
    """
    plan = facts.plan(config)
    steps = torch.zeros(1 if plan.steps else plan.epochs, plan.steps or 1, 2, dtype=torch.int64)
    x = facts.blank(2)
    y = torch.zeros(2, *facts.y_shape, dtype=torch.float32 if facts.classes is None else torch.int64)
    batches = Batches(x, y, steps, steps.float(), steps[..., 0], torch.tensor(2.0))
    down = tree.rows(method.dispatch(server, torch.tensor([index]), torch.Generator()), 0)
    with one_thread():
        _, up, info = method.local_update(task, method.init_client(task.init()), down, batches)
    return up, info


def _form(declared: Declaration) -> tuple[Any, ...]:
    """Return what all sites must have in common."""
    return declared.shape, declared.y_shape, declared.classes is None, declared.dtype, declared.decode


def _targets(declared: Declaration) -> str:
    return "numbers to predict" if declared.classes is None else f"{declared.classes} classes"
