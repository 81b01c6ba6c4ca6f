"""The C++ kernels of a step, compiled together: in as many files as there are cores, not in a file each.

TorchInductor has a file for every kernel. Most of a compiler's time then goes into reading the same headers and linking
the same libraries again and again. Here the kernels stand side by side in a file, each in a namespace and under a name
of its own. Where TorchInductor is not as it is known here, or a joint file does not compile, it does as it always did.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from coterie.lanes import deal

HEADERS = (
    "#include <torch/csrc/inductor/cpp_prefix.h>\n#define PY_SSIZE_T_CLEAN\n"
    "#include <Python.h>\n#include <sstream>\n#include <cstdlib>\n#include <cerrno>\n"
)
ENTRY = re.compile(r"\bvoid\s+kernel\s*\(")  # how a kernel begins
Kernel = Callable[..., None]


class Source(NamedTuple):
    types: list[str]  # of its arguments
    code: str


@contextlib.contextmanager
def compiled_together(files: int) -> Iterator[None]:
    """Kernels that TorchInductor asks for inside are compiled in at most so many files."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    usual = AsyncCompile.cpp_pybinding
    steps: dict[AsyncCompile, Kernels] = {}

    def ask(self: AsyncCompile, types: list[str], code: str) -> Any:
        if len(ENTRY.findall(code)) != 1 or get_compile_threads() <= 1:  # then nobody waits
            return usual(self, types, code)
        return steps.setdefault(self, Kernels(functools.partial(usual, self), files)).ask(Source(types, code))

    with replaced(AsyncCompile, cpp_pybinding=ask):
        yield


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of somebody else's, for a while."""
    usual = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    try:
        for name in usual:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in usual.items():
            setattr(owner, name, value)


class Kernels:
    """Those of a step: they are compiled when the first of them is waited for, by when all have been asked for."""

    def __init__(self, usual: Callable[[list[str], str], Any], files: int) -> None:
        self._usual, self._files = usual, files
        self._sources: list[Source] = []
        self._done: list[Kernel] = []

    def ask(self, source: Source) -> Any:
        from torch._inductor.codecache import LambdaFuture

        self._sources.append(source)
        return LambdaFuture(functools.partial(self._get, len(self._sources) - 1))

    def _get(self, number: int) -> Kernel:
        if not self._done:
            try:
                self._done = self._together()
            except Exception:
                futures = [self._usual(*source) for source in self._sources]
                self._done = [future.result() if hasattr(future, "result") else future for future in futures]
        return self._done[number]

    def _together(self) -> list[Kernel]:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

        lengths = [len(source.code) for source in self._sources]
        groups = deal(lengths, min(self._files, len(lengths)))
        codes = [HEADERS + "".join(_named(self._sources[k], k, Bindings.suffix_template) for k in g) for g in groups]
        first: list[Any] = [type("Joint", (Bindings,), {"entry_function": f"kernel{group[0]}"}) for group in groups]
        waiting = [one.load_async(code, submit_fn=AsyncCompile.submit) for one, code in zip(first, codes, strict=True)]
        done: dict[int, Kernel] = {}
        for group, wait in zip(groups, waiting, strict=True):
            library = wait()
            done.update({k: getattr(_module(library, f"kernel{k}"), f"kernel{k}") for k in group})
        return [done[k] for k in range(len(done))]


def _named(source: Source, number: int, binding: str) -> str:
    """The kernel and its Python binding under the name kernel<number>."""
    name = f"kernel{number}"
    given = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(source.types))
    call = f"{name}({given}); Py_RETURN_NONE;"
    bound = binding.format(arg_len=len(source.types), call_entry_func=call, entry_func=name, extra_parse_arg="")
    return f"namespace {name}_ {{\n{ENTRY.sub(f'void {name}(', source.code)}\n{bound}\n}}\n"


def _module(library: ModuleType, name: str) -> ModuleType:
    """Another of the modules in a library."""
    whole = f"{library.__name__.rpartition('.')[0]}.{name}"
    if whole not in sys.modules:
        spec = importlib.util.spec_from_file_location(whole, library.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[whole] = module
    return sys.modules[whole]
