"""A name for what a step is that is the same in every process: programs on disk are found by it.

Within a process, `coterie.core.scan.identity` compares steps as objects. Here a step is spelled out instead: the
bytecode and constants of its functions, all that they close over (hyper-parameters, the structure of the model, the
loss), and of functions that are neither Coterie's nor PyTorch's also the globals that they name. Added to that are the
shapes and types of its tensors and everything else that machine code depends on: the versions and Coterie's own source,
the processor, the compiler and its settings.

What cannot be spelled out (an object that is known by its address only, a module of somebody else's) has no key, and
its program is not kept.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import json
import os
import platform
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import coterie
from coterie.compute.availability import compiler_name
from coterie.compute.cache import VARIABLE as CACHE_VARIABLE
from coterie.core import tree
from coterie.core.scan import Program
from coterie.core.task import Task

# Code of these packages is known by its name, since their versions, or sources, are part of the key.
KNOWN_PACKAGES = frozenset({"coterie", "torch", "numpy", "builtins"}) | (sys.stdlib_module_names - {"__main__"})
# What a class does when its objects are made, compared or shown is no part of a step: their values are.
NOT_OF_A_STEP = frozenset(
    f"__{name}__"
    for name in (
        *("init", "post_init", "new", "repr", "str", "eq", "ne", "hash", "lt", "le", "gt", "ge", "setattr", "delattr"),
        *("getstate", "setstate", "reduce", "replace", "init_subclass", "annotate", "annotate_func"),
    )
)
SETTINGS = "TORCHINDUCTOR_"  # names in the environment that begin so


class NoKey(Exception):
    """Something in a step cannot be told apart across processes."""


def step_key(program: Program, kinds: Sequence[Any]) -> str | None:
    """Return the key of a lifted step for tensors of these kinds; None where it has none.

    Args:
        program: the lifted step.
        kinds: shape, type and device of all inputs, which are contiguous.
    """
    spelling = _Spelling()
    try:
        names = [list(tree.pack(part)) for part in (program.carry, program.aux)]
        about = [spelling.of(each) for each in (program.step, program.lifts, names, [tuple(kind) for kind in kinds])]
    except (NoKey, RecursionError, ValueError):  # ValueError: a cell of a closure is empty
        return None
    return _digest([about, machine(), _modes()])


@functools.cache
def machine() -> str:
    """Return a digest of what machine code depends on beside the step: versions, sources, processor and compiler."""
    versions = [sys.version, torch.__version__, str(torch.version.git_version), np.__version__]
    settings = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(SETTINGS) and name != CACHE_VARIABLE
    )
    processor = [platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()]
    return _digest([versions, _own_source(), processor, compiler_name(), settings])


def _modes() -> list[Any]:
    """Return PyTorch's settings that may change what is traced or compiled."""
    return [
        torch.get_num_threads(),
        str(torch.get_default_dtype()),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
    ]


def _own_source() -> str:
    root = Path(coterie.__file__).parent
    found = hashlib.sha256()
    for path in sorted(each for each in root.rglob("*") if each.suffix in (".py", ".cpp")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _processor() -> list[str]:
    """Return the processor's name and features; machine code is made for it alone."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return [platform.processor()]
    return [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class _Spelling:
    """Spells values out as lists of strings; what comes again is a number."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}  # {id: (number, the object, which keeps its id)}
        self._tensors: dict[int, str] = {}  # {id: name} of the parameters and buffers of the models that were met

    def of(self, value: Any) -> Any:
        """Spell a value out.

        Raises:
            NoKey: it cannot be.
        """
        if value is None or value is Ellipsis or type(value) in (bool, int, str, complex):
            return [type(value).__name__, repr(value)]
        if type(value) is float:
            return ["float", value.hex()]
        if isinstance(value, bytes):
            return ["bytes", value.hex()]
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return [type(value).__name__, str(value)]
        if isinstance(value, tuple | list):
            return [self._type(value), *map(self.of, value)]
        if isinstance(value, dict):
            return [self._type(value), *([self.of(key), self.of(each)] for key, each in value.items())]
        if isinstance(value, set | frozenset):
            return [self._type(value), *sorted((self.of(each) for each in value), key=json.dumps)]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)][0]]
        self._seen[id(value)] = (len(self._seen), value)
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self.of(value.__func__)]
        if isinstance(value, property):
            return ["property", self.of(value.fget)]
        if isinstance(value, functools.cached_property):
            return ["property", self.of(value.func)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, enum.Enum):
            return ["enum", self.of(type(value)), value.name]
        if isinstance(value, Task):
            return ["task", *map(self.of, value.parts())]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if dataclasses.is_dataclass(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            kind, cached = type(value), functools.cached_property
            own = {key: each for key, each in vars(value).items() if not isinstance(getattr(kind, key, None), cached)}
            return ["dataclass", self.of(kind), self.of(sorted((own | fields).items()))]
        if isinstance(value, types.ModuleType):
            return ["module", _known(value.__name__)]
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, Tensor):
            owner = value.__self__
            named = isinstance(owner, type | types.ModuleType) or owner is None
            return ["builtin", self.of(owner) if named else _known(type(owner).__module__), value.__qualname__]
        if callable(value) and hasattr(value, "__qualname__") and hasattr(value, "__module__"):  # of C, as torch.relu
            return ["callable", _known(value.__module__), value.__qualname__]
        raise NoKey(f"{type(value).__qualname__}")

    def _type(self, value: Any) -> Any:
        return type(value).__name__ if type(value).__module__ == "builtins" else self.of(type(value))

    def _code(self, code: types.CodeType) -> Any:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return ["code", code.co_code.hex(), list(counts), [list(each) for each in names], self.of(code.co_consts)]

    def _function(self, function: types.FunctionType) -> Any:
        about = ["function", function.__qualname__, self.of(function.__code__)]
        about += [self.of(cell.cell_contents) for cell in function.__closure__ or ()]
        about += [self.of(function.__defaults__), self.of(sorted((function.__kwdefaults__ or {}).items()))]
        about += [self.of(sorted((name, each) for name, each in vars(function).items() if name != "__wrapped__"))]
        home = function.__globals__.get("__name__")  # `functools.wraps` changes `__module__`
        if _is_known(home):
            return [*about, str(home)]
        if unknown := _imports_of(function.__code__) or {"globals", "eval", "exec"} & _globals_of(function.__code__):
            raise NoKey(f"a function that reads {sorted(unknown)[0]} when it is called")
        used = {name for name in _globals_of(function.__code__) if name in function.__globals__}
        return [*about, *([name, self.of(function.__globals__[name])] for name in sorted(used))]

    def _class(self, kind: type) -> Any:
        about = ["class", kind.__module__, kind.__qualname__]
        if _is_known(kind.__module__) and "<locals>" not in kind.__qualname__:
            return about
        own = [(name, each) for name, each in sorted(vars(kind).items()) if name not in NOT_OF_A_STEP]
        code = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
        used = [(name, each) for name, each in own if isinstance(each, code) or not name.startswith("__")]
        plain = [(name, each) for name, each in used if not name.startswith(("_abc_", "__pydantic"))]
        return [*about, *map(self.of, kind.__bases__), *([name, self.of(each)] for name, each in plain)]

    def _module(self, module: nn.Module) -> Any:
        tensors: Iterable[tuple[str, Tensor]] = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in tensors:
            self._tensors.setdefault(id(tensor), name)
        return ["model", self.of(type(module)), self.of(vars(module))]

    def _tensor(self, tensor: Tensor) -> Any:
        """Spell a parameter or buffer of a model out: all but its values, which a step is given."""
        if id(tensor) not in self._tensors:
            raise NoKey("a tensor")
        about = (list(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        return ["tensor", self._tensors[id(tensor)], *about]


def _is_known(module: str | None) -> bool:
    return (module or "").partition(".")[0] in KNOWN_PACKAGES


def _known(module: str | None) -> str:
    if not _is_known(module):
        raise NoKey(f"something of the module {module}")
    return str(module)


def _imports_of(code: types.CodeType) -> set[str]:
    """Return the packages of unknown code that a function, or one in it, imports while it runs."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return {name for name in found if not _is_known(name)}.union(*map(_imports_of, inner))


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names of the globals that a function and those in it read."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found.union(*map(_globals_of, inner))
