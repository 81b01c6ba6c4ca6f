"""Reads the same targets as another kind of task: classes as ordered levels, two columns as a time and its event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.targets import Cox, Labels, Ordered, Survival, Target
from coterie.core.targets.survival import usual_times
from coterie.data.federation import Federation

TASKS = ("classification", "regression", "multilabel", "ordinal", "survival", "cox", "multitask")
OF_COLUMNS = ("multilabel", "survival", "cox", "multitask")  # tasks whose target is several numbers


def make_target(
    task: str | None, y: Tensor, horizons: Sequence[float] = (), names: Sequence[str] = ()
) -> Target | None:
    """Return the target that a task asks for, or None for classes and numbers.

    Args:
        task: one of `TASKS`; None: classes or numbers.
        y: all targets, [examples, ...].
        horizons: of survival, the ends of the intervals; by default they have as many events each.
        names: of labels; by default they are numbered.

    Raises:
        ConfigError: `y` does not suit the task.
    """
    if task in (None, "classification", "regression"):
        return None
    shape = f"targets of shape {tuple(y.shape[1:])}"
    if task == "ordinal":
        if y.ndim != 1 or bool((y != y.floor()).any() if y.is_floating_point() else False) or bool((y < 0).any()):
            raise ConfigError([f"task = 'ordinal' needs one level an example, 0, 1, ..., and these are {shape}"])
        return Ordered(max(2, int(y.max()) + 1))
    if task == "multilabel":
        if y.ndim != 2:
            raise ConfigError([f"task = 'multilabel' needs a row of 0 and 1 for each example, and these are {shape}"])
        return Labels(tuple(names) or tuple(f"label-{k + 1}" for k in range(y.shape[1])))
    if task in ("survival", "cox"):
        if y.ndim != 2 or y.shape[1] != 2:
            raise ConfigError([f"task = '{task}' needs a time and an event for each example, and these are {shape}"])
        return Cox() if task == "cox" else Survival(tuple(horizons) or usual_times(y.cpu().double().numpy()))
    raise ConfigError([f"task = '{task}': say which targets there are, with target=coterie.targets.Several(...)"])


def with_task(federation: Federation, task: str | None, horizons: Sequence[float] = ()) -> Federation:
    """Return the same examples with their targets read as `task` says.

    Raises:
        ConfigError: they cannot be.
    """
    given = federation.declared
    if task is None and not horizons:
        return federation
    if isinstance(given, Survival) and horizons and task in (None, "survival"):
        return replace(federation, declared=Survival(tuple(horizons)))
    if horizons and task != "survival":
        raise ConfigError([f"horizons are for task = 'survival', and this is {federation.target.words}"])
    if task in (None, federation.kind):
        return federation
    if task == "ordinal" and federation.num_classes is not None and given is None and federation.y.ndim == 1:
        return replace(federation, declared=Ordered(federation.num_classes))
    target = make_target(task, federation.y, horizons)
    if target is not None:
        return replace(federation, y=federation.y.to(target.dtype), num_classes=target.num_values, declared=target)
    if federation.num_classes is None or federation.y.ndim > 1:
        raise ConfigError([f"task = '{task}': {federation.name} is {federation.target.words}"])
    if task == "classification":
        return replace(federation, declared=None)
    return replace(federation, y=federation.y.float(), num_classes=None, classes=(), declared=None)


def stacked(ys: Sequence[Tensor]) -> Tensor:
    """Return all clients' targets, or raise `ConfigError` if they have different shapes."""
    if len({tuple(y.shape[1:]) for y in ys}) > 1:
        raise ConfigError(["the clients' targets have different shapes"])
    return torch.cat(list(ys))
