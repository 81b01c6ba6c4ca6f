"""A run's network as its configuration asks for it: with weights from a file, and with an adapter."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from torch import nn

from coterie.core.errors import CheckpointError, ConfigError, CoterieWarning
from coterie.core.task import find_head
from coterie.models.adapters import find_adapter
from coterie.storage import files

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
