"""Records what a compiled step does, so that C++ can repeat it (`coterie.compute.replay`).

TorchInductor's generated function is run once with other globals: its kernels, `extern_kernels` and `empty_strided_cpu`
are those of a `Recorder`, which notes each operation and then does it. What a step does beside these (another
convolution of PyTorch's, say) has no name there, and the step is not repeated but called. What was recorded is checked
once against what the step gave.
"""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.compute.custom_ops import code_of
from coterie.compute.replay import KERNEL, MAX_ARGUMENTS, OP_FIELDS, PRODUCT, READ, ClientSteps, Kernel, ReplayedStep

CACHE_LINE = 64  # bytes
MAX_CHANGE = 0.02  # by which a step that is repeated may differ from what was recorded, of what a step changes


class NotReplayable(Exception):
    """The step does what cannot be repeated."""


@dataclass
class Recorder:
    """The operations of one call, in order, and the memory that they use."""

    inputs: list[Tensor]
    ops: list[list[int]] = field(default_factory=list)
    operands: list[tuple[int, int]] = field(default_factory=list)  # (number of the memory, bytes from its start)
    memory: list[torch.UntypedStorage] = field(default_factory=list)  # of the inputs first
    number_of: dict[int, int] = field(default_factory=dict)  # {address: number of the memory}
    made: set[int] = field(default_factory=set)  # memory that only the call itself uses
    kernels: dict[int, Kernel] = field(default_factory=dict)  # by address

    def __post_init__(self) -> None:
        for value in self.inputs:
            self.owner(value)
        if len(self.memory) < len(self.inputs):
            raise NotReplayable("it has a tensor without numbers")

    def owner(self, value: Tensor) -> int:
        """Return the number of the memory that a tensor shows; it is kept alive, so that no address is used twice."""
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.number_of:
            self.number_of[storage.data_ptr()] = len(self.memory)
            self.memory.append(storage)
        return self.number_of[storage.data_ptr()]

    def op(self, kind: int, values: Sequence[Any], kernel: int = 0, shape: Sequence[int] = ()) -> None:
        """Note an operation; `shape` is what an Op of replay.cpp has after its first four fields."""
        if not all(isinstance(value, Tensor) and value.is_cpu for value in values) or len(values) > MAX_ARGUMENTS:
            raise NotReplayable("it has a kernel with other arguments")
        about = [kind, kernel, len(self.operands), len(values), *shape]
        self.ops.append([*about, *[0] * (OP_FIELDS - len(about))])
        for value in values:
            number = self.owner(value)
            self.operands.append((number, value.data_ptr() - self.memory[number].data_ptr()))

    def product(self, a: Tensor, b: Tensor, c: Tensor, start: Tensor | None = None) -> None:
        """Note c = a b, or c = start + a b; [m, k], [k, n], [m, n], or a batch of them. `start` may be c."""
        add = int(start is not None)
        start = c if start is None else start.expand(c.shape)
        if {value.dtype for value in (a, b, c, start)} != {torch.float32}:
            raise NotReplayable("it has a product that is not float32")
        given = [value[None] if value.ndim == 2 else value for value in (a, b, c, start)]
        right, left, *others = (value.mT for value in given)
        for a, b, c, start in (given, (left, right, *others)):  # the same, transposed
            along_n = b.stride(2) == c.stride(2) == start.stride(2) == 1
            if along_n or (a.stride(2) == 1 and b.stride(1) == 1):
                size = (*c.shape, a.shape[2], add, int(along_n))
                strides = (*a.stride(), *b.stride(), *c.stride(), *start.stride())
                self.op(PRODUCT, (a, b, c, start), 0, (*size, *strides))
                return
        raise NotReplayable("it has a product of another memory layout")

    # What generated code finds under the names that it calls.

    def kernel(self, function: Any) -> Callable[..., None]:
        """Wrap a kernel of TorchInductor's so that its calls are noted."""
        exported = ctypes.CDLL(function.__self__.__file__)[function.__name__]
        address = ctypes.cast(exported, ctypes.c_void_p).value or 0
        self.kernels[address] = Kernel(function.__self__.__file__, function.__name__)

        def call(*values: Any) -> None:
            self.op(KERNEL, values, address)
            function(*values)

        return call

    def bmm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        self.product(a, b, out)
        torch.matmul(a, b, out=out)

    mm = bmm

    def addmm(self, start: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float, out: Tensor) -> None:
        self._added(torch.addmm, start, a, b, alpha, beta, out)

    def baddbmm(self, start: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float, out: Tensor) -> None:
        self._added(torch.baddbmm, start, a, b, alpha, beta, out)

    def _added(
        self, do: Callable[..., Tensor], start: Tensor, a: Tensor, b: Tensor, alpha: float, beta: float, out: Tensor
    ) -> None:
        if (alpha, beta) != (1, 1) or torch.get_num_threads() > 1:
            raise NotReplayable("it has a product with factors, or more than one thread")
        self.product(a, b, out, start)
        do(start, a, b, out=out)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made.add(self.owner(made))
        return made


def may_be_replayable(graph: torch.fx.GraphModule) -> bool:
    """Tell, before compiling, whether a step is likely to be: on the CPU, without PyTorch's own convolutions."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    targets = [node.target for node in graph.graph.nodes]
    threaded = any("coterie" in str(each) for each in targets) and torch.get_num_threads() > 1
    return not threaded and torch.ops.aten.convolution.default not in targets and all(value.is_cpu for value in values)


def record(call: Any, example: Sequence[Tensor], num_carry: int, num_time: int = 3) -> ReplayedStep:
    """Record what a compiled step does.

    Args:
        call: the function, or method, that TorchInductor wrote.
        example: the inputs of a step: the leaves of the carry and of aux, and x, y, mask and key (and maybe more) of a
            minibatch. A `ReplayedStep` reads x and y from the pool itself.
        num_carry: how many leaves the carry has.
        num_time: how many tensors have a part for every minibatch; positions in the pool, in place of x and y, are one.

    Raises:
        NotReplayable: the step does what C++ cannot repeat.
    """
    inputs = [value.clone(memory_format=torch.contiguous_format) for value in example]
    start, (x, y, mask, *others) = _parted(inputs, num_time)
    pool = tuple(part.flatten(0, mask.ndim - 1) for part in (x.clone(), y.clone()))
    positions = torch.arange(mask.numel()).view(mask.shape)
    recorder = Recorder([*start, *pool, positions, mask, *others])
    for everything, part in zip(pool, (x, y), strict=True):
        recorder.op(READ, (everything, positions, part), 0, (1, mask.numel(), len(everything), everything[0].nbytes))
    reads = {recorder.owner(part) for part in (x, y)}
    outputs = _with_recorder(call, recorder)(list(inputs))
    swaps = dict[int, int]()
    for at, leaf in enumerate(inputs[:num_carry]):
        new = outputs[at]
        place = recorder.owner(new)
        if place == at:
            continue
        whole = new.is_contiguous() and recorder.memory[place].nbytes() == leaf.nbytes and new.dtype == leaf.dtype
        if place < len(recorder.inputs) or place in swaps.values() or not whole:
            raise NotReplayable("it returns a carry that shares memory with something else")
        swaps[at] = place
    beside = range(len(recorder.inputs), len(recorder.memory))
    has_constants = not recorder.made | reads >= set(beside)
    _share_memory(recorder, recorder.made - set(swaps.values()))
    owner, offset = (np.array(each, np.int64) for each in zip(*recorder.operands, strict=True))
    buffers = recorder.memory[len(recorder.inputs) :]
    ops, inputs_number = np.array(recorder.ops, np.int64), len(recorder.inputs)
    step = ReplayedStep(ops, owner, offset, buffers, inputs_number, swaps, recorder.kernels, has_constants)
    if not repeats(step, example, [value.clone() for value in outputs[:num_carry]], num_time):
        raise NotReplayable("repeated, it gives other results")
    return step


def repeats(step: ReplayedStep, example: Sequence[Tensor], expected: Sequence[Tensor], num_time: int = 3) -> bool:
    """Tell whether a step by C++, from `example`, gives the carry that is `expected`, but for rounding."""
    start, (x, y, mask, *others) = _parted([value.contiguous() for value in example], num_time)
    pool = x.flatten(0, mask.ndim - 1), y.flatten(0, mask.ndim - 1)
    positions = torch.arange(mask.numel()).view(mask.shape)
    rows = [value[None] for value in start]
    one = ClientSteps(np.array([[0, 0, 1]]), [part[None] for part in (positions, mask, *others)])
    found, _ = step.scan(rows[: len(expected)], rows[len(expected) :], pool, one)
    return all(
        row.shape[1:] == new.shape and _agree(row[0], new) and _same_change(row[0], new, old)
        for row, new, old in zip(found, expected, start[: len(expected)], strict=True)
    )


def _parted(inputs: list[Tensor], num_time: int) -> tuple[list[Tensor], list[Tensor]]:
    """Part the inputs of a step into its carry and aux, and what it has of a minibatch: x, y, mask and others."""
    of_batch = num_time + 1
    return inputs[:-of_batch], inputs[-of_batch:]


def _agree(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    finite = other[other.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * scale + 1e-6, equal_nan=True)


def _same_change(one: Tensor, other: Tensor, before: Tensor) -> bool:
    """Tell whether what a step changes is the same: one step changes little, and may do it with another step size.

    Norms are compared, since a few numbers may differ much (Adam divides small gradients by themselves).
    """
    if not other.is_floating_point() or not bool(other.isfinite().all()):
        return True
    one, other, before = (value.double() for value in (one, other, before))
    rounding = 16 * torch.finfo(torch.float32).eps * float(other.norm() + before.norm())
    return float((one - other).norm()) <= MAX_CHANGE * float((other - before).norm()) + rounding + 1e-6


def _with_recorder(call: Any, recorder: Recorder) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Return the same code with globals that `recorder` sees; of PyTorch, it has the types of numbers only."""
    code = getattr(call, "__func__", call)  # a method, or (TORCHINDUCTOR_GRAPH_PARTITION=0, older versions) a function
    if not isinstance(code, types.FunctionType):
        raise NotReplayable(f"its code is a {type(call).__name__}")
    names: dict[str, Any] = {
        name: recorder.kernel(value)
        for name, value in code.__globals__.items()
        if isinstance(value, types.BuiltinFunctionType) and value.__name__ == "kernel"
    }
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ops = types.SimpleNamespace(coterie=_CustomOps(recorder))
    names |= {"torch": types.SimpleNamespace(**dtypes, ops=ops), "extern_kernels": recorder, "aten": None}
    names["empty_strided_cpu"] = recorder.empty
    made = types.FunctionType(code.__code__, code.__globals__ | names, code.__name__, code.__defaults__)
    return functools.partial(made, call.__self__) if code is not call else made


@dataclass(frozen=True)
class _CustomOps:
    """Our own operations (`coterie.compute.custom_ops`): what their code does is recorded as a part of the step."""

    recorder: Recorder

    def __getattr__(self, name: str) -> Any:
        def call(*given: Tensor) -> Any:
            got = _with_recorder(code_of(name, *given), self.recorder)(list(given))
            return got[0] if len(got) == 1 else got

        return types.SimpleNamespace(default=call)


def _share_memory(recorder: Recorder, made: set[int]) -> None:
    """Place all of the memory `made` in one arena, in which what is used at different times may overlap.

    A step with many gradients makes many buffers, and a core's cache holds few.
    """
    used: dict[int, list[int]] = {}  # {memory: the operations that use it, in order}
    for at, (_, _, first, number, *_) in enumerate(recorder.ops):
        for owner, _ in recorder.operands[first : first + number]:
            if owner in made:
                used.setdefault(owner, []).append(at)
    sizes = {owner: recorder.memory[owner].nbytes() for owner in used}
    begin = arena_offsets({owner: (uses[0], uses[-1]) for owner, uses in used.items()}, sizes)
    length = max((begin[owner] + sizes[owner] for owner in used), default=0)
    arena = torch.empty(length, dtype=torch.uint8).untyped_storage()
    recorder.operands = [(owner, offset + begin.get(owner, 0)) for owner, offset in recorder.operands]
    recorder.memory = [arena if owner in used else own for owner, own in enumerate(recorder.memory)]


def arena_offsets(times: dict[int, tuple[int, int]], sizes: dict[int, int]) -> dict[int, int]:
    """Return where each buffer begins in one arena; buffers whose times of use overlap do not.

    Args:
        times: {buffer: (first operation that uses it, last one)}.
        sizes: {buffer: bytes}. The largest are placed first, each as far to the front as it fits.
    """
    found: dict[int, int] = {}
    for key in sorted(times, key=lambda key: -sizes[key]):
        (first, last), at = times[key], 0
        others = [other for other in found if times[other][0] <= last and times[other][1] >= first]
        for other in sorted(others, key=lambda other: found[other]):
            if at + sizes[key] <= found[other]:
                break
            at = max(at, -(-(found[other] + sizes[other]) // CACHE_LINE) * CACHE_LINE)
        found[key] = at
    return found
