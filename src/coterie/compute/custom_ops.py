"""Makes functions of tensors operations of their own, compiled once and apart from the steps that call them.

What a step is traced to grows with each call of a function of many operations, and TorchInductor's time more than that:
pFedBreD's step, which takes seven gradients, took 90 s to compile with its convolutions in it. Such a function is made
an operation of its own here. Steps call it by name; its machine code is made when it is first called with such shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from coterie.compute.inductor import compile_graph
from coterie.compute.torch_private import private

Run = tuple[Callable[..., list[Tensor]], Any]  # a function of tensors, and TorchInductor's code behind it
_found: dict[str, Callable[..., Run]] = {}


def register_op(function: Callable[..., Any], inputs: int, outputs: int) -> Callable[..., Any]:
    """Register `function`, of so many tensors to so many, as an operation on the CPU.

    It is compiled for the shapes of its arguments when it is first called with them.
    """
    name = function.__name__
    runs: dict[Hashable, Run] = {}

    def listed(*given: Tensor) -> list[Tensor]:
        return [function(*given)] if outputs == 1 else list(function(*given))

    def find(*given: Tensor) -> Run:
        key = (torch.get_num_threads(), *[(value.shape, value.stride(), value.dtype) for value in given])
        if key not in runs:
            with private("disable_current_modes")():  # those of whoever traces a step
                runs[key] = compile_graph(private("make_fx")(listed)(*given), list(given))
        return runs[key]

    def run(*given: Tensor) -> Any:
        got = find(*given)[0](*given)
        return got[0] if outputs == 1 else tuple(got)

    _found[name] = find
    names = ", ".join(f"Tensor x{k}" for k in range(inputs))
    torch.library.define(f"coterie::{name}", f"({names}) -> ({', '.join(['Tensor'] * outputs)})")
    torch.library.impl(f"coterie::{name}", "CPU", run)
    torch.library.register_fake(f"coterie::{name}", function)
    return getattr(torch.ops.coterie, name).default  # type: ignore[no-any-return]


def code_of(name: str, *given: Tensor) -> Any:
    """Return the code that TorchInductor wrote for the operation of that name and such tensors."""
    return _found[name](*given)[1]
