"""What a module holds and what it is: its tensors by name, where they are, its head, and its structure."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.tree import Params

NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def find_head(module: nn.Module, name: str | None) -> str | None:
    """Return the name of a model's head: `name` if it has such a layer, by default its last linear layer, if any."""
    if name is None:
        linear = [key for key, m in module.named_modules() if isinstance(m, nn.Linear)]
        return linear[-1] if linear else None
    known = [key for key, m in module.named_modules() if key and any(True for _ in m.parameters())]
    if name not in known:
        raise ValueError(f"the model has no layer '{name}' with parameters; it has {', '.join(known)}")
    return name


def tensors_of(module: nn.Module) -> Params:
    """Return parameters and buffers by every name they have (tied ones have several)."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def first_names(module: nn.Module) -> dict[str, str]:
    """Return {every name: the first name of the same tensor}; a model is keyed by first names only."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(module).items()}


def places_of(module: nn.Module, first_name: dict[str, str]) -> list[tuple[dict[str, Any], str, str, Any]]:
    """Return where a module has its tensors: the dict and the key there, the tensor's first name, and the tensor."""
    places = []
    for name, first in first_name.items():
        owner, _, key = name.rpartition(".")
        inside = module.get_submodule(owner)
        home: dict[str, Any] = inside._parameters if key in inside._parameters else inside._buffers
        places.append((home, key, first, home[key]))
    return places


def structure_of(module: nn.Module) -> tuple[Any, ...]:
    """Return all that a module is but for the values of its parameters and buffers.

    What cannot be compared (a tensor that is no buffer, an object of another library) stands for itself: such modules
    differ from all others.
    """
    known = {id(tensor): ("tensor", name) for name, tensor in tensors_of(module).items()}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = (tuple(value.shape), value.dtype, value.requires_grad)
            return known[id(value)] + shape if id(value) in known else ("object", id(value))
        if isinstance(value, nn.Module):
            return type(value), plain(vars(value))
        if isinstance(value, dict):
            return tuple((key, plain(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(plain, value))
        if isinstance(value, set):
            return frozenset(value)
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return type(value), value
        if isinstance(value, type | types.BuiltinFunctionType):
            return value
        if isinstance(value, types.FunctionType) and not value.__closure__:
            return value.__code__, id(value.__globals__), plain(value.__defaults__), plain(value.__kwdefaults__)
        return "object", id(value)

    return type(module), plain(vars(module))
