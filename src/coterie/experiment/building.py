"""A run's network and task as its configuration asks for them: with weights from a file, an adapter, a loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import rng
from coterie.core.errors import CheckpointError, ConfigError, CoterieWarning
from coterie.core.losses import find_loss
from coterie.core.make_task import make_task
from coterie.core.modules import find_head
from coterie.core.targets import Classes, Target
from coterie.core.task import Augment, Task
from coterie.core.user_code import in_user_code
from coterie.data import Federation
from coterie.engine.samplers import Turnout
from coterie.evaluation.metrics import add
from coterie.evaluation.scoring import default_metric, names_of
from coterie.experiment.config import Config
from coterie.experiment.given import Objects
from coterie.models import find_model
from coterie.models.adapters import find_adapter
from coterie.storage import files

Model = str | nn.Module | Callable[[tuple[int, ...], int], nn.Module]
SHOWN = 6  # names in a sentence


def completed(module: nn.Module, pretrained: str | None, adapter: str | None, head: str | None) -> nn.Module:
    """Return a network with the weights of a file, if one is named, and then with an adapter, if one is.

    Raises:
        ConfigError: the file does not fit the network, or there is no such adapter or layer.
    """
    if pretrained is not None:
        module = with_weights(module, Path(pretrained), head)
    return module if adapter is None else find_adapter(adapter)(module, head)


def with_weights(module: nn.Module, path: Path, head: str | None = None) -> nn.Module:
    """Return a copy of a network with the weights of a safetensors file, under the names that the network has.

    A head that the file does not have, or has for other classes, begins anew, and names that the network lacks are
    left out; a warning says both.

    Raises:
        ConfigError: the file cannot be read, or lacks a weight or has it in another shape.
    """
    try:
        given = files.read_tensors(path)
    except (CheckpointError, OSError) as error:
        raise ConfigError([f"pretrained = '{path}': {error}"]) from error
    module = copy.deepcopy(module)
    own, top = module.state_dict(), find_head(module, head)
    in_head = {name for name in own if top is not None and name.startswith(f"{top}.".lstrip("."))}
    missing = [name for name in own if name not in given and name not in in_head]
    shapes = {name: (tuple(own[name].shape), tuple(given[name].shape)) for name in own if name in given}
    other = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    problems = []
    if missing:
        problems.append(f"pretrained = '{path}' lacks {_some(missing)} of the model; it has {_some(list(given))}")
    for name, (mine, its) in other.items():
        if name not in in_head:
            problems.append(f"pretrained = '{path}': '{name}' has shape {its}, and the model's has {mine}")
    if problems:
        raise ConfigError(problems)
    anew = [name for name in own if name in in_head and (name not in given or name in other)]
    extra = [name for name in given if name not in own]
    if anew or extra:
        words = [f"the head ({_some(anew)}) begins anew"] if anew else []
        words += [f"{_some(extra)} {'is' if len(extra) == 1 else 'are'} not in the model and left out"] if extra else []
        warnings.warn(f"pretrained = '{path}': {', and '.join(words)}", CoterieWarning, stacklevel=2)
    with torch.no_grad():
        for name, value in own.items():
            if name in given and name not in anew:
                value.copy_(given[name])
    return module


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def task_and_metric(
    config: Config, federation: Federation, model: Model, augment: Augment | None, given: Objects | None = None
) -> tuple[Task, str]:
    """Build the task and find the metric, and check at once all that can only be checked with the data at hand."""
    problems, participants = [], config.participants(len(federation.names))
    if participants > len(federation.names):
        problems.append(
            f"clients_per_round = {config.clients_per_round}, but there are {len(federation.names)} clients"
        )
    elif config.sampler is not None:
        try:
            Turnout(config.sampler, federation.names, federation.sizes, participants, config.seed).of(1)
        except ConfigError as error:
            problems += error.problems
    target, metrics = federation.target, given.metrics if given else add(config.metric or ())
    names = (*names_of(target), *metrics)
    metric = config.select or default_metric(target)
    if metric not in names:
        problems.append(f"select = '{metric}': {target.words} has {', '.join(names)}")
    problems += unsuited(config, target)
    task = None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)
            module = completed(_module(model, federation), config.pretrained, config.adapter, config.head)
        own: dict[str, Any] = {"head": config.head, "decode": federation.decode, "bf16": config.bf16}
        own |= {"augment": augment, "loss": (given and given.loss) or named_loss(config, target), "metrics": metrics}
        task = make_task(module, federation.target, None, federation.x, **own)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(str(error))
    if task is None or problems:
        raise ConfigError(problems)
    return task, metric


def named_loss(config: Config, target: Target) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the loss that a configuration names, or None for the target's own."""
    return None if config.loss is None else find_loss(config.loss, target)


def unsuited(config: Config, target: Target) -> list[str]:
    """Return a sentence for each setting that this kind of target has no use for."""
    found = []
    if not isinstance(target, Classes) and target.kind != "regression":
        asked = {"threshold": config.threshold is not None, "calibrate": config.calibrate}
        found += [f"{key}: it is for a classification, and this is {target.words}" for key, on in asked.items() if on]
    if target.joint and config.take_home == "best":
        found.append(
            f"take_home = 'best' compares losses of single examples, and in {target.words} an example has none of its "
            "own: take_home = 'federated', or task = 'survival'"
        )
    return found


def _module(model: Any, federation: Federation) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    shape = tuple(federation.x.shape[1:])
    factory = find_model(model) if isinstance(model, str) else model
    try:
        module = factory(shape, num_outputs(federation))
    except Exception as error:
        why = f"{error}{in_user_code(error)}"
        raise ConfigError([f"model '{model}' cannot be built for inputs of shape {shape}: {why}"]) from error
    if not isinstance(module, nn.Module):
        raise ConfigError([f"model '{model}' gave a {type(module).__name__}, not an nn.Module"])
    return module


def num_outputs(federation: Federation) -> int:
    """Return how many outputs a model needs: one per class or, in a regression, per target value."""
    return federation.target.num_outputs or 1


def input_dtype(federation: Federation, task: Task) -> str:
    """Return the type of numbers that a model which was taken home is given: "int64" for tokens, else "float32"."""
    whole = federation.x.dtype in (torch.int16, torch.int32, torch.int64) and task.decode is None
    return "int64" if whole else "float32"
