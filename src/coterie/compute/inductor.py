"""From a traced step to machine code, by TorchInductor; what has been compiled once is kept on disk for other runs.

The cache is TorchInductor's own: in the folder TORCHINDUCTOR_CACHE_DIR, else in the user's cache folder
(~/.cache/coterie, or in XDG_CACHE_HOME), where compiled headers always are. It can be deleted at any time. It holds
sources and what the C++ compiler made of them. TorchInductor could keep whole graphs too, and start sooner, but as
pickles, which we neither write nor read. Most of its modules choose a folder in /tmp when they are imported, so none of
them is before one is chosen here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.kernels import compiled_together, replaced

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = "precompiled_headers"
TAKES = 4.0  # seconds, about, of a step that is not in the cache: 2 to 6 were seen, and 20 of one with seven gradients
LEAST = 2.0  # what took less was found in the cache
CONVOLUTIONS = 15.0  # the same of a step with convolutions, some of which are compiled apart
COLD = 5.0  # more, where no header was ever compiled
_taken: list[float] = []  # seconds, in this process


def compiling_takes(convolves: bool = False) -> float:
    """Seconds that compiling a step may take: what the last one took here; the first starts the compiler, too."""
    if len(_taken) > 1:
        return max(LEAST, _taken[-1])
    cold = not _taken and not any((cache_folder() / HEADERS).glob("*.gch"))
    return min([CONVOLUTIONS if convolves else TAKES, *_taken]) + COLD * cold


def compile_graph(graph: torch.fx.GraphModule, example: list[Tensor]) -> tuple[Callable[..., list[Tensor]], Any]:
    """(the graph as a function of tensors of the shapes of `example`, the code behind it).

    Raises what TorchInductor raises.
    """
    os.environ.setdefault(FOLDER, str(cache_folder()))
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    begin = time.perf_counter()
    made = list[Any]()

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        for each in (no_garbage, _own_headers, _processor_known, _all_remembered):
            stack.enter_context(each())
        stack.enter_context(compiled_together(os.cpu_count() or 1))
        run: Any = compile_fx(graph, list[Any](example), inner_compile=inner)
    _taken.append(time.perf_counter() - begin)
    return run, getattr(made[0], "current_callable", None) if made else None


def compile_source(text: str) -> Any:
    """C++ as a library. Raises what TorchInductor raises."""
    os.environ.setdefault(FOLDER, str(cache_folder()))
    from torch._inductor.codecache import CppCodeCache

    with _own_headers(), _processor_known():
        return CppCodeCache.load(text)


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Nothing is looked through for garbage meanwhile: a graph and its code are many objects, all in use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _own_headers() -> Iterator[None]:
    """Headers are compiled once a machine, and TorchInductor keeps them in /tmp whatever folder is chosen."""
    from torch._inductor import codecache

    folder = cache_folder() / HEADERS
    with replaced(codecache, _HEADER_DIR=str(folder), _HEADER_LOCK_DIR=str(folder / "locks")):
        yield


@contextlib.contextmanager
def _processor_known() -> Iterator[None]:
    """PyTorch knows what the processor can do; TorchInductor would find out by compiling six small programs.

    What is beyond AVX (bfloat16, tiles) comes with -march=native.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.vec_isa_ok is not None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        yield
        return
    with replaced(cpu_vec_isa.VecISA, check_build=lambda *_: False), config.patch({"cpp.vec_isa_ok": True}):
        yield


@contextlib.contextmanager
def _all_remembered() -> Iterator[None]:
    """TorchInductor simplifies an index by SymPy for each use of it, and remembers the last 128: a step has more."""
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    names = ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range")
    found = {name: getattr(getattr(sizevars, name, None), "__wrapped__", None) for name in names}
    wide = {name: functools.cache(function) for name, function in found.items() if function}
    with replaced(sizevars, **wide), replaced(cpp, **wide):
        yield


@functools.cache
def cache_folder() -> Path:
    """Where nobody else can write: what is found there is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "coterie" / "torchinductor"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home folder, or a full or read-only one
        return Path(tempfile.mkdtemp(prefix="coterie-"))
