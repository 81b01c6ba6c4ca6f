"""What sites and server tell each other about the federation, and what they build from it.

A site declares the number and shape of its examples when it joins. From all declarations the server makes
`FederationFacts`, which accompany every message. With them a site builds the same model, minibatches and message
formats as a simulation does, without any data of other sites.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, FiniteFloat

from coterie.core import rng, tree
from coterie.core.batches import Batches
from coterie.core.decode import Decode
from coterie.core.errors import ConfigError, DataError
from coterie.core.make_task import make_task
from coterie.core.method import Population
from coterie.core.targets import Target, from_json, known
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.data.augment import find_augmentation
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.deploy.refused import Refused
from coterie.deploy.schema import MAX_SITES, Classes, Examples, Scaling, Shape, Strict, TargetText
from coterie.engine.engine import one_thread
from coterie.evaluation.metrics import add
from coterie.experiment.building import Model, completed, named_loss
from coterie.experiment.config import Config
from coterie.methods.fields import AnyMethod
from coterie.models import find_model

FROZEN_ROUNDING = 1e-3  # frozen parameters of other weights differ by far more, those of another processor by less
InputType = Literal["float32", "float64", "uint8", "int64"]


class Declaration(Strict):
    """What a site declares about its data: numbers and shapes of examples, but no values."""

    train: Examples
    validation: Examples
    test: Examples
    shape: Shape  # of an input
    y_shape: Shape  # of a target
    classes: Classes | None  # of which a target is one; None: it is something else
    dtype: InputType = "float32"
    decode: Scaling | None = None  # how bytes become numbers
    task: TargetText = ""  # what is to be predicted, if it is neither classes nor numbers


def declare(federation: Federation) -> Declaration:
    """Declare the data of a federation with one client."""
    split, decode = federation.split(0), federation.decode
    shapes = tuple(federation.x.shape[1:]), tuple(federation.y.shape[1:])
    dtype: Any = str(federation.x.dtype).removeprefix("torch.")
    return Declaration(
        train=len(split.train),
        validation=len(split.validation),
        test=len(split.test),
        shape=shapes[0],
        y_shape=shapes[1],
        classes=federation.num_classes,
        dtype=dtype,
        decode=None if decode is None else Scaling(mean=decode.mean, std=decode.std),
        task="" if federation.declared is None else json.dumps(federation.declared.to_json(), sort_keys=True),
    )


class FederationFacts(Strict):
    """What every site needs to know about the federation."""

    size: Annotated[int, Field(ge=1, le=MAX_SITES)]  # number of clients
    audience: Annotated[int, Field(ge=1, le=MAX_SITES)]  # maximum number of clients in one round
    shape: Shape
    y_shape: Shape
    classes: Classes | None
    largest: Examples  # training examples of the largest site
    dtype: InputType = "float32"
    decode: Scaling | None = None
    task: TargetText = ""
    frozen: Annotated[tuple[FiniteFloat, ...], Field(max_length=4)] = ()  # `frozen_in_short` of the server's model

    @property
    def declared(self) -> Target | None:
        """What is to be predicted, if it is neither classes nor numbers."""
        return from_json(json.loads(self.task)) if self.task else None

    @property
    def target(self) -> Target:
        """What is to be predicted."""
        return self.declared or known(self.classes, self.y_shape)

    def blank(self, number: int) -> torch.Tensor:
        """Return zero inputs of the right shape and type."""
        return torch.zeros(number, *self.shape, dtype=getattr(torch, self.dtype))

    def plan(self, config: Config) -> Plan:
        """Return how much a site trains in a round."""
        return dataclasses.replace(config.plan(), width=min(config.batch_size, self.largest))


def gather_facts(config: Config, declared: Mapping[str, Declaration]) -> FederationFacts:
    """Combine all declarations; raise `DataError` with the names of sites that do not match most of them."""
    usual, _ = Counter(_form(each) for each in declared.values()).most_common(1)[0]
    like, first = next((name, each) for name, each in declared.items() if _form(each) == usual)
    for name, each in declared.items():
        if _form(each) != usual:
            raise DataError(
                f"site '{name}' has inputs of shape {each.shape} ({each.dtype}) and {_targets(each)}, but "
                f"'{like}' has {first.shape} ({first.dtype}) and {_targets(first)}: sites need the same columns"
            )
    return FederationFacts(
        size=len(declared),
        audience=config.participants(len(declared)),
        shape=first.shape,
        y_shape=first.y_shape,
        classes=None if first.classes is None else max(each.classes or 2 for each in declared.values()),
        largest=max(each.train for each in declared.values()),
        dtype=first.dtype,
        decode=first.decode,
        task=first.task,
    )


def check_facts(facts: FederationFacts, own: Declaration) -> None:
    """Check what a server says of the federation against a site's own data; raise `Refused` if it does not fit."""
    classes = own.classes is None or (facts.classes is not None and facts.classes >= own.classes)
    if _form(facts) != _form(own) or not classes or facts.largest < own.train or facts.audience > facts.size:
        raise Refused("unlike", "the server describes other data than this site's")


def federation_without_data(config: Config, declared: Mapping[str, Declaration], facts: FederationFacts) -> Federation:
    """Make the federation as the server knows it: names and sizes, with zeros for examples that take no memory."""
    one = np.zeros(1, np.int64)  # the only example there is, in everybody's place
    splits = {
        name: Split(*(np.broadcast_to(one, number) for number in (each.train, each.validation, each.test)))
        for name, each in declared.items()
    }
    x = torch.zeros(1, dtype=torch.uint8).expand(1, *facts.shape)
    y = torch.zeros(1, dtype=facts.target.dtype).expand(1, *facts.y_shape)
    return Federation(config.data, x, y, splits, facts.classes, declared=facts.declared)


def build_task(config: Config, model: Model, facts: FederationFacts) -> Task:
    """Build the same initial model on every machine, from the seed alone."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)
        factory = find_model(model) if isinstance(model, str) else model
        module = (
            factory if isinstance(factory, torch.nn.Module) else factory(facts.shape, facts.target.num_outputs or 1)
        )
        if not isinstance(module, torch.nn.Module):
            raise ConfigError([f"model '{model}' gave a {type(module).__name__}, not an nn.Module"])
        module = completed(module, config.pretrained, config.adapter, config.head)
    try:
        own: dict[str, Any] = {
            "head": config.head,
            "decode": facts.decode and Decode(facts.decode.mean, facts.decode.std),
            "bf16": config.bf16,
            "augment": config.augment and find_augmentation(config.augment),
            "loss": named_loss(config, facts.target),
            "metrics": add(config.metric or ()),
        }
        return make_task(module, facts.target, None, facts.blank(2), **own)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def frozen_in_short(task: Task) -> tuple[float, ...]:
    """Return a few numbers that depend on all frozen parameters of a model, which are never sent; () without any."""
    values = [leaf.double().flatten() for name, leaf in sorted(task.init().items()) if name in task.unsent]
    values = [leaf for leaf in values if leaf.any()]  # counts of minibatches are 0
    norm = math.sqrt(sum(float(leaf.square().sum()) for leaf in values))
    waves = [torch.cos(torch.arange(len(leaf), dtype=torch.float64)) for leaf in values]
    found = [sum(float((leaf * wave**k).sum()) for leaf, wave in zip(values, waves, strict=True)) for k in (1, 2, 3)]
    return (norm, *(each / norm for each in found)) if norm else ()


def check_frozen(facts: FederationFacts, task: Task) -> None:
    """Check that a site's frozen parameters are the server's, but for rounding; raise `Refused` if not."""
    here = frozen_in_short(task)
    same = len(here) == len(facts.frozen) and np.allclose(
        here, facts.frozen, rtol=FROZEN_ROUNDING, atol=FROZEN_ROUNDING
    )
    if facts.frozen and not same:
        raise Refused("unlike", "the frozen weights of the model here are not the server's: all need the same")


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
    batches = Batches(x, facts.target.blank(2), steps, steps.float(), steps[..., 0], torch.tensor(2.0))
    down = tree.rows(method.dispatch(server, torch.tensor([index]), torch.Generator()), 0)
    with one_thread():
        _, up, info = method.local_update(task, method.init_client(task.init()), down, batches)
    return up, info


def _form(declared: Declaration | FederationFacts) -> tuple[Any, ...]:
    """Return what all sites must have in common."""
    return declared.shape, declared.y_shape, declared.classes is None, declared.dtype, declared.decode, declared.task


def _targets(declared: Declaration) -> str:
    if declared.task:
        return f"the target {declared.task}"
    return "numbers to predict" if declared.classes is None else f"{declared.classes} classes"
