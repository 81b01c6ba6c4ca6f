"""The only file that names private parts of PyTorch.

Compiling needs names that PyTorch does not promise to keep. Each is looked for once, when compiling is first asked for;
one that is missing is reported by name, and everything then runs on the plain back-end. `import coterie` needs none.

TorchInductor's modules choose a cache folder when they are imported, so they are imported inside `cache.environment`,
which names ours.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from coterie.compute import cache

NAMES = {
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "config": "torch._inductor:config",
    "codecache": "torch._inductor:codecache",
    "CppCodeCache": "torch._inductor.codecache:CppCodeCache",
    "force_stride_order": "torch._inductor.inductor_prims:force_stride_order",
}
OPTIONAL = {  # without it, compiling takes longer
    "VecISA": "torch._inductor.cpu_vec_isa:VecISA",
}


class MissingName(Exception):
    """This PyTorch has no such private name."""


@functools.cache
def private(name: str) -> Any:
    """Return the private object that `NAMES` or `OPTIONAL` has under `name`.

    Raises:
        MissingName: this PyTorch does not have it.
    """
    path = NAMES.get(name) or OPTIONAL[name]
    module, _, attribute = path.partition(":")
    try:
        with cache.environment():
            found = importlib.import_module(module)
            return getattr(found, attribute, None) or importlib.import_module(f"{module}.{attribute}")
    except ImportError:
        raise MissingName(f"PyTorch {torch.__version__} has no {module}.{attribute}") from None


@functools.cache
def missing() -> str | None:
    """Return, in words, the first of `NAMES` that this PyTorch lacks; None where it has them all."""
    for name in NAMES:
        try:
            private(name)
        except MissingName as error:
            return str(error)
    return None


def has(name: str) -> bool:
    """Tell whether this PyTorch has an optional name."""
    try:
        private(name)
    except MissingName:
        return False
    return True


@functools.cache
def onednn_linear() -> Callable[..., Any] | None:
    """Return oneDNN's linear layer of float32 on the CPU, called with (x, weight, bias, "none", [], "").

    Returns:
        None where PyTorch was built without it, or has another name for it, or the processor has no AVX-512: it is
        for processors of which MKL uses half the width.
    """
    there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not there or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


class _Postponed(types.ModuleType):
    """Stand in for torch._dynamo: what `torch.func.grad` wants of it is here, and anything else imports it."""

    compiled_autograd = types.SimpleNamespace(_disable=contextlib.nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Do not import torch._dynamo for a gradient inside: it takes a second, and is wanted for one function.

    `torch.func.grad` calls that function so that no compiler of gradients is on meanwhile. None is, as long as that
    module has not been imported.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _Postponed("torch._dynamo")
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:  # importing the real one puts it there
            del torch.__dict__["_dynamo"]


def count_flops(work: Callable[[], object]) -> int:
    """Return how many floating-point operations `work` takes, counted as `FlopCounterMode` does.

    That one would import torch._dynamo first.
    """
    with _Flops() as counter:
        work()
    found: int = counter.count
    return found


class _Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, PyTorch imports it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, known = kwargs or {}, flop_registry.get(func._overloadpacket)
        if known is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if parts is NotImplemented else parts
        found = func(*args, **kwargs)
        self.count += known(*args, **kwargs, out_val=found)
        return found
