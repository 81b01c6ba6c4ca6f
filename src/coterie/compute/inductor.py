"""Makes machine code of a traced step, by TorchInductor; what has been compiled once is kept on disk for other runs.

The cache is TorchInductor's own: in the folder TORCHINDUCTOR_CACHE_DIR, else in the user's cache folder
(~/.cache/coterie, or in XDG_CACHE_HOME), where compiled headers always are. It can be deleted at any time. It holds
sources and what the C++ compiler made of them. TorchInductor could keep whole graphs too, and start sooner, but as
pickles, which we neither write nor read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.compute.cache import cache_folder, environment
from coterie.compute.torch_private import has, private

HEADER_FOLDER = "precompiled_headers"
STEP_SECONDS = (
    4.0  # seconds, about, of a step that is not in the cache: 2 to 6 were seen, and 20 of one with seven gradients
)
MIN_SECONDS = 2.0  # what took less was found in the cache
CONVOLUTION_SECONDS = 15.0  # the same of a step with convolutions, some of which are operations of their own
COLD_SECONDS = 5.0  # more, where no header was ever compiled
_taken: list[float] = []  # seconds, in this process


def compiling_takes(convolves: bool = False, alike: int = 1) -> float:
    """Return how many seconds compiling a step may take: what the last one took; the first starts the compiler, too.

    Args:
        convolves: the step has convolutions.
        alike: how many steps will be compiled, about: each bears a share of what only the first one takes.
    """
    if len(_taken) > 1:
        return max(MIN_SECONDS, _taken[-1])
    cold = not _taken and not any((cache_folder() / HEADER_FOLDER).glob("*.gch"))
    return min([CONVOLUTION_SECONDS if convolves else STEP_SECONDS, *_taken]) + COLD_SECONDS * cold / alike


def compile_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
    """Compile a traced graph for tensors of the shapes of `example`.

    Returns:
        The graph as a function of such tensors, and the Python code that TorchInductor wrote for it (or None).

    Raises:
        Whatever TorchInductor raises.
    """
    begin = time.perf_counter()
    made = list[Any]()
    compile_inner = private("compile_fx_inner")

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_inner(*args, **kwargs))
        return made[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(environment())
        stack.enter_context(private("config").patch(fx_graph_cache=False))
        for each in (_own_headers, _processor_known):
            stack.enter_context(each())
        run: Any = private("compile_fx")(graph, list[Any](example), inner_compile=inner)
    _taken.append(time.perf_counter() - begin)
    return run, getattr(made[0], "current_callable", None) if made else None


def compile_source(text: str) -> Any:
    """Compile C++ to a library.

    Raises:
        Whatever TorchInductor raises.
    """
    with environment(), _own_headers(), _processor_known():
        return private("CppCodeCache").load(text)


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of somebody else's other values for a while; those that are not there are left alone."""
    usual = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in usual:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def _own_headers() -> Iterator[None]:
    """Headers are compiled once a machine, and TorchInductor keeps them in /tmp whatever folder is chosen."""
    folder = cache_folder() / HEADER_FOLDER
    with _replaced(private("codecache"), _HEADER_DIR=str(folder), _HEADER_LOCK_DIR=str(folder / "locks")):
        yield


@contextlib.contextmanager
def _processor_known() -> Iterator[None]:
    """PyTorch knows what the processor can do; TorchInductor would find out by compiling six small programs.

    What is beyond AVX (bfloat16, tiles) comes with -march=native.
    """
    config = private("config")
    if (
        not has("VecISA")
        or config.cpp.vec_isa_ok is not None
        or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    ):
        yield
        return
    with _replaced(private("VecISA"), check_build=lambda *_: False), config.patch({"cpp.vec_isa_ok": True}):
        yield
