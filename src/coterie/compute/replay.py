"""A scan without Python between its steps: a compiled step's own kernels, called from C++ with rows of pointers.

Called from Python, a compiled step of a small network spends more time on making tensors and checking them than on
numbers. What TorchInductor's code does is the same in every step: it calls kernels, and matrix products, on memory that
only changes its place. So it is watched once, on memory of ours (`captured`), and then repeated by `native.cpp`: what
it was given in the first step, and what it made, are columns of a row of pointers, which is another one in every step.
A carry has two places, and steps go to and fro between them. The steps of all clients are one call. They are not
stacked: each client takes its own steps, on one core, and threads take the clients, the largest first. So nothing is
padded, and what a client gets depends on nobody else.

The products are our own, too. MKL is made for large ones; in a step they have a minibatch of rows, and are many. What
is compiled apart is a part of the step here, where there are no threads to share its work.

A step that does anything else (another convolution, say) is not repeated but called, as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.apart import code_of
from coterie.machine_code import compile_source
from coterie.products import Descent

FEW, MOST = 32, 128  # arguments of a kernel: it is given so many, whoever takes fewer
FIELDS = 23  # of an Op in native.cpp
KERNEL, PRODUCT, READ = range(3)
LINES = 4  # of gram.cpp
SOURCES = ("native.cpp", "gram.cpp", "draws.cpp")
KERNELS = re.compile(r"kernel\d*")  # names of TorchInductor's, and of `coterie.kernels`

_own: ContextVar[bool] = ContextVar("own", default=False)
Pool = tuple[Tensor, Tensor]  # x and y of all examples
LINE = 64  # bytes of a cache's line
READS, LENGTH = 2, 6  # the first operations read x and y; which field of theirs is the length of the pool


class NotNative(Exception):
    """This step does what cannot be repeated."""


@dataclass
class Watch:
    """What a call of compiled code does, in order."""

    inputs: list[Tensor]
    ops: list[list[int]] = field(default_factory=list)
    columns: list[tuple[int, int]] = field(default_factory=list)  # (whose memory, bytes from its start)
    memory: list[torch.UntypedStorage] = field(default_factory=list)  # of the inputs first
    where: dict[int, int] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)  # memory that only the call itself uses

    def __post_init__(self) -> None:
        for value in self.inputs:
            self.owner(value)
        if len(self.memory) < len(self.inputs):
            raise NotNative("a tensor without numbers")

    def owner(self, value: Tensor) -> int:
        """Whose memory it shows; all of it is kept, so that none is used twice."""
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.where:
            self.where[storage.data_ptr()] = len(self.memory)
            self.memory.append(storage)
        return self.where[storage.data_ptr()]

    def op(self, kind: int, values: Sequence[Any], kernel: int = 0, shape: Sequence[int] = ()) -> None:
        if not all(isinstance(value, Tensor) and value.is_cpu for value in values) or len(values) > MOST:
            raise NotNative("a kernel with other arguments")
        self.ops.append([kind, kernel, len(self.columns), len(values), *shape, *[0] * (FIELDS - 4 - len(shape))])
        for value in values:
            storage = self.owner(value)
            self.columns.append((storage, value.data_ptr() - self.memory[storage].data_ptr()))

    def product(
        self, a: Tensor, b: Tensor, c: Tensor, start: Tensor | None = None, end: Tensor | None = None, share: float = 0
    ) -> None:
        """c = a b, or c = start + a b, or c = start + share (end - start) + a b; either of both may be c.

        [m, k], [k, n], [m, n], or with a batch of them.
        """
        add = (start is not None) + (end is not None)
        start = c if start is None else start.expand(c.shape)
        end = start if end is None else end
        if {value.dtype for value in (a, b, c, start, end)} != {torch.float32}:
            raise NotNative("a product of other numbers")
        if end.stride() != start.stride():
            raise NotNative("a start and an end that lie otherwise")
        given = [value[None] if value.ndim == 2 else value for value in (a, b, c, start, end)]
        right, left, *others = (value.mT for value in given)
        for a, b, c, start, end in (given, (left, right, *others)):  # the same, seen from the side
            along_n = b.stride(2) == c.stride(2) == start.stride(2) == 1
            if along_n or (a.stride(2) == 1 and b.stride(1) == 1):
                size = (*c.shape, a.shape[2], add, int(along_n))
                strides = (*a.stride(), *b.stride(), *c.stride(), *start.stride())
                self.op(PRODUCT, (a, b, c, start, end), 0, (*size, *strides, _bits(share)))
                return
        raise NotNative("a product of another layout")

    # What compiled code finds under the names that it calls.

    def kernel(self, fn: Any) -> Callable[..., None]:
        address = ctypes.cast(ctypes.CDLL(fn.__self__.__file__)[fn.__name__], ctypes.c_void_p).value or 0

        def call(*values: Any) -> None:
            self.op(KERNEL, values, address)
            fn(*values)

        return call

    def bmm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        self.product(a, b, out)
        torch.matmul(a, b, out=out)

    mm = bmm

    def addmm(self, start: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float, out: Tensor) -> None:
        if (alpha, beta) != (1, 1) or torch.get_num_threads() > 1:
            raise NotNative("a product of another kind, or of more threads")
        self.product(a, b, out, start)
        torch.addmm(start, a, b, out=out)

    def towards(self, start: Tensor, end: Tensor, share: float, a: Tensor, b: Tensor) -> Tensor:
        out = self.empty(start.shape, start.stride(), start.dtype)
        self.product(a, b, out, start, end, share)
        return torch.lerp(start, end, share, out=out).addmm_(a, b)

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made.add(self.owner(made))
        return made


class Steps(NamedTuple):
    """Minibatches to take a step with each, and whose they are."""

    parts: NDArray[np.int64]  # [clients, 3]: who, and from which step to which one; those that come first begin first
    batches: Sequence[Tensor]  # positions in the pool, mask and key; [steps, ...], contiguous


@dataclass(frozen=True)
class Native:
    """A step that `native.cpp` repeats."""

    ops: NDArray[np.int64]
    owner: NDArray[np.int64]  # of each column: an input, or some memory of ours
    offset: NDArray[np.int64]
    memory: list[torch.UntypedStorage]
    num_inputs: int
    swaps: dict[int, int]  # which leaf of the carry goes to and fro between its place and which of ours
    _rooms: list[list[torch.UntypedStorage]] = field(default_factory=list, repr=False)  # of threads, but the first
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)  # one scan at a time

    @functools.cached_property
    def width(self) -> int:
        """Of a row of pointers: whoever takes few arguments is handed those of others, too."""
        return max(int(first) + (FEW if number <= FEW else MOST) for _, _, first, number, *_ in self.ops.tolist())

    def scan(
        self, start: Sequence[Tensor], aux: Sequence[Tensor], pool: Pool, steps: Steps, threads: int = 1
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Each client's steps, one after another; so many clients at a time.

        `start` and `aux` have rows for all clients, of which each is contiguous. Returns the carry after the last step,
        in rows too, and when each thread began and ended (ns).
        """
        done = [leaf.new_empty(leaf.shape) for leaf in start]
        parts, batches = steps
        owners = self.num_inputs + len(self.memory)
        apart, ahead = np.zeros((2, owners), np.int64), np.zeros((1, owners), np.int64)
        apart[:, : len(done) + len(aux)] = [_apart(leaf) for leaf in (*done, *aux)]
        for leaf, place in self.swaps.items():
            apart[1, leaf], apart[1, place] = 0, apart[0, leaf]
        ahead[0, self.num_inputs - len(batches) : self.num_inputs] = [_apart(part) for part in batches]
        leaves = [
            (old.data_ptr(), _apart(old), new.data_ptr(), new.nbytes // len(new))
            for old, new in zip(start, done, strict=True)
        ]
        arrays = (self.ops, self._operands(apart), self._operands(ahead), parts, np.array(leaves, np.int64))
        ops, *where = (array.ctypes.data for array in arrays)
        given = [ops, len(self.ops), self.width, *where[:2], where[2], len(parts), where[3], len(leaves)]
        threads = max(1, min(threads, len(parts)))
        told, times = np.array(given, np.int64), np.zeros((threads, 2), np.int64)  # all arrays live until C++ is done
        with self._lock:
            rooms = [self._room(number, done, (*aux, *pool, *batches)) for number in range(threads)]
            places = np.array([[array.ctypes.data for array in room[:2]] for room in rooms], np.int64)
            self.ops[:READS, LENGTH] = [len(part) for part in pool]
            _go(library().scan, told.ctypes.data, places.ctypes.data, threads, times.ctypes.data)
        return done, times.tolist()

    def _operands(self, owners: NDArray[np.int64], offset: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
        """Of each operand what `owners` [any, owners] is of the memory that it is in."""
        found = np.zeros((len(owners), self.width), np.int64)
        found[:, : len(self.owner)] = owners[:, self.owner] + offset
        return found

    def _room(self, number: int, done: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Any, ...]:
        """A thread's own: where the operands are in even steps and in odd ones, and the other places of the carry."""
        while len(self._rooms) < number:
            own = {storage.data_ptr(): storage.clone() for storage in self.memory}  # type: ignore[no-untyped-call]
            self._rooms.append([own[storage.data_ptr()] for storage in self.memory])
        memory = self._rooms[number - 1] if number else self.memory
        where = np.zeros((2, self.num_inputs + len(memory)), np.int64)
        where[:] = [leaf.data_ptr() for leaf in (*done, *given)] + [storage.data_ptr() for storage in memory]
        held = {leaf: torch.empty_like(done[leaf][0]) for leaf in self.swaps}
        others = np.zeros(len(done), np.int64)
        for leaf, place in self.swaps.items():
            others[leaf] = where[0, place] = where[1, leaf] = held[leaf].data_ptr()
            where[1, place] = where[0, leaf]
        return self._operands(where, self.offset), others, held


def _apart(leaf: Tensor) -> int:
    """How many bytes further on the next row is: none, where all are one."""
    return leaf.stride(0) * leaf.element_size()


def _go(function: Any, *given: int) -> None:
    wrong = function(*given)
    if wrong:
        raise RuntimeError(wrong.decode())


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, [rows, outputs]: each number of it is rounded alike, whatever the other rows are. Float32, contiguous."""
    out = x.new_empty(len(x), len(weight))
    size = (1, *out.shape, x.shape[1], 0, 0)
    to = (0, *out.stride())
    op = np.array([PRODUCT, 0, 0, 5, *size, 0, *x.stride(), 0, 1, weight.stride(0), *to, *to, 0], np.int64)
    where = np.array([value.data_ptr() for value in (x, weight, out, out, out)], np.int64)
    _go(library().run, op.ctypes.data, 1, where.ctypes.data)
    return out


def mixed(weights: Tensor, rows: Tensor) -> Tensor:
    """weights @ rows, [n, m] by [m, numbers]; rounded alike, too. Float32, contiguous."""
    out = rows.new_empty(len(weights), rows.shape[1])
    library().mix(weights.data_ptr(), rows.data_ptr(), len(weights), *rows.shape, out.data_ptr())
    return out


def gram(leaves: Sequence[Tensor], centre: bool) -> Tensor:
    """X X', [rows, rows] in float64, over all leaves [rows, numbers] of X; exactly symmetric. With `centre`, of X less
    its mean over the rows. Float32, contiguous."""
    size = len(leaves[0])
    padded = -(-size // LINES) * LINES
    total = np.zeros((padded, padded))
    for leaf in leaves:
        library().gram(leaf.data_ptr(), size, leaf.shape[1], padded, int(centre), total.ctypes.data)
    return torch.from_numpy(total)[:size, :size]


def _bits(value: float) -> int:
    """Of a double, as they are in an Op."""
    return int(np.float64(value).view(np.int64))


def repeatable(graph: torch.fx.GraphModule) -> bool:
    """Whether a step is likely to be: it has no convolution but our own, with one thread, and is on the CPU."""
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    targets = [node.target for node in graph.graph.nodes]
    apart = any("coterie" in str(each) for each in targets) and torch.get_num_threads() > 1
    return not apart and torch.ops.aten.convolution.default not in targets and all(value.is_cpu for value in values)


def captured(call: Any, example: Sequence[Tensor], num_carry: int, descents: Sequence[Descent]) -> Native:
    """What `call`, the code that TorchInductor wrote, does with tensors like `example`; raises where it does more.

    The example is a carry, aux, and x, y, mask and key of a minibatch. `Native` reads x and y itself.
    """
    inputs = [value.clone(memory_format=torch.contiguous_format) for value in example]
    *start, x, y, mask, key = inputs
    pool = tuple(part.flatten(0, mask.ndim - 1) for part in (x.clone(), y.clone()))
    positions = torch.arange(mask.numel()).view(mask.shape)
    watch = Watch([*start, *pool, positions, mask, key])
    for all_of, part in zip(pool, (x, y), strict=True):
        watch.op(READ, (all_of, positions, part), 0, (1, mask.numel(), len(all_of), all_of[0].nbytes))
    outputs = _replayed(call, watch)(list(inputs))
    for descent in descents:
        leaf, first, second = descent.operands(inputs, outputs)
        watch.product(first, second, leaf, leaf)
    swaps = dict[int, int]()
    in_place = {descent.at for descent in descents}
    for at, leaf in enumerate(inputs[:num_carry]):
        new = leaf if at in in_place else outputs[at]
        place = watch.owner(new)
        if place == at:
            continue
        whole = new.is_contiguous() and watch.memory[place].nbytes() == leaf.nbytes and new.dtype == leaf.dtype
        if place < len(watch.inputs) or place in swaps.values() or not whole:
            raise NotNative("a carry that is shown elsewhere")
        swaps[at] = place
    _shared(watch, watch.made - set(swaps.values()))
    owner, offset = (np.array(each, np.int64) for each in zip(*watch.columns, strict=True))
    memory = watch.memory[len(watch.inputs) :]
    native = Native(np.array(watch.ops, np.int64), owner, offset, memory, len(watch.inputs), swaps)
    # What was watched was right (it may have changed `inputs`), so what is repeated must agree with it.
    expected = [value.clone() for value in outputs[:num_carry]]
    for descent in descents:
        expected[descent.at] = descent.apply([value.clone() for value in inputs], outputs)
    rows = [value[None].contiguous() for value in (*example[:num_carry], *start[num_carry:])]
    one = Steps(np.array([[0, 0, 1]]), [part[None] for part in (positions, mask, key)])
    found, _ = native.scan(rows[:num_carry], rows[num_carry:], (pool[0], pool[1]), one)
    if not all(_agree(row[0], other) for row, other in zip(found, expected, strict=True)):
        raise NotNative("it gives other results")
    return native


def _shared(watch: Watch, made: set[int]) -> None:
    """Gives those that were `made` places in one memory: what is used at different times may have the same.

    In a step of many gradients they are many, and a cache holds few.
    """
    used: dict[int, list[int]] = {}  # by which operations, in order
    for at, (_, _, start, number, *_) in enumerate(watch.ops):
        for owner, _ in watch.columns[start : start + number]:
            if owner in made:
                used.setdefault(owner, []).append(at)
    sizes = {owner: watch.memory[owner].nbytes() for owner in used}
    begin = places({owner: (uses[0], uses[-1]) for owner, uses in used.items()}, sizes)
    room = max((begin[owner] + sizes[owner] for owner in used), default=0)
    memory = torch.empty(room, dtype=torch.uint8).untyped_storage()
    watch.columns = [(owner, offset + begin.get(owner, 0)) for owner, offset in watch.columns]
    watch.memory = [memory if owner in used else own for owner, own in enumerate(watch.memory)]


def places(times: dict[int, tuple[int, int]], sizes: dict[int, int]) -> dict[int, int]:
    """Where each begins, so that no two overlap of which one is used between the first and last times of the other.

    The largest come first, each as far to the front as it goes.
    """
    found: dict[int, int] = {}
    for key in sorted(times, key=lambda key: -sizes[key]):
        (first, last), at = times[key], 0
        others = [other for other in found if times[other][0] <= last and times[other][1] >= first]
        for other in sorted(others, key=lambda other: found[other]):
            if at + sizes[key] <= found[other]:
                break
            at = max(at, -(-(found[other] + sizes[other]) // LINE) * LINE)
        found[key] = at
    return found


def _agree(one: Tensor, other: Tensor) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()) + 1e-6, equal_nan=True)


def _replayed(call: Any, watch: Watch) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The same code, whose names mean what `watch` sees; of PyTorch, it has the types of numbers only."""
    code = getattr(call, "__func__", None)
    if not isinstance(code, types.FunctionType):
        raise NotNative("compiled code of another kind")
    names: dict[str, Any] = {
        name: watch.kernel(value)
        for name, value in code.__globals__.items()
        if isinstance(value, types.BuiltinFunctionType) and KERNELS.fullmatch(value.__name__)
    }
    kinds = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ops = types.SimpleNamespace(coterie=_Apart(watch))
    names |= {"torch": types.SimpleNamespace(**kinds, ops=ops), "extern_kernels": watch, "aten": None}
    names["empty_strided_cpu"] = watch.empty
    made = types.FunctionType(code.__code__, code.__globals__ | names, code.__name__, code.__defaults__)
    return functools.partial(made, call.__self__)


@contextlib.contextmanager
def own_products(wanted: bool) -> Iterator[None]:
    """Inside, products of plain tensors (nothing is traced, lifted or differentiated) may be by our own code, if there
    is a compiler for it."""
    token = _own.set(wanted and available())
    try:
        yield
    finally:
        _own.reset(token)


def own(*values: Tensor) -> bool:
    """Whether we are inside, and these are of the kind that our own code is for."""
    return _own.get() and all(value.is_cpu and value.dtype == torch.float32 for value in values)


@dataclass(frozen=True)
class _Apart:
    """Operations that are compiled apart: what their code does belongs to what is watched."""

    watch: Watch

    def __getattr__(self, name: str) -> Any:
        if name == "towards":
            return types.SimpleNamespace(default=self.watch.towards)

        def call(*given: Tensor) -> Any:
            got = _replayed(code_of(name, *given), self.watch)(list(given))
            return got[0] if len(got) == 1 else got

        return types.SimpleNamespace(default=call)


@functools.cache
def available() -> bool:
    """Whether there is a compiler for native.cpp."""
    try:
        library()
    except Exception:  # whatever TorchInductor raises
        return False
    return True


def loaded() -> bool:
    """Whether our own code has been compiled, or read, in this process."""
    return library.cache_info().currsize > 0


@functools.cache
def library() -> Any:
    """What is in `SOURCES`, compiled once a machine."""
    text = "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in SOURCES)
    found = compile_source(text)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    found.run.argtypes = [pointer, number, pointer]
    found.scan.argtypes = [pointer, pointer, number, pointer]
    found.run.restype = found.scan.restype = ctypes.c_char_p
    found.gram.argtypes = [pointer, number, number, number, number, pointer]
    found.mix.argtypes = [pointer, pointer, number, number, number, pointer]
    found.draw.argtypes = [number] * 5 + [pointer] * 6
    found.gram.restype = found.mix.restype = found.draw.restype = None
    return found
