"""The hot loop: everything a client does with data is a scan of a small pure step over its minibatches.

    carry = scan(step, carry, aux, batches)          step(carry, aux, batch) -> carry, for ONE client

Outside `torch.func.vmap` this is a Python loop. Under `vmap` it is not traced op by op: the rule below receives the
stacked clients, lifts the *step* over them once, and runs the same loop over lifted steps (nested `vmap`s nest). Inside
`with compiling():` the step is traced to a graph and compiled to machine code; clients of every size, rounds, and
methods with the same step share one compiled step.

All that a step reads goes through `carry` and `aux`, never through a closure over tensors; what it does close over
(task, hyper-parameters, functions) identifies the step in the cache of compiled steps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from coterie import tree
from coterie.batches import Batch, Batches
from coterie.conv import FewChannelConvolution
from coterie.device import on
from coterie.machine_code import compile_graph
from coterie.pooling import DECOMPOSITIONS
from coterie.products import Descent, faster_products
from coterie.tree import Tree

log = logging.getLogger("coterie")
Step = Callable[[Any, Any, Batch], Any]
Runner = Callable[..., list[Tensor]]

GATHERED = 2**20  # bytes of examples that are read at once

_compile: ContextVar[bool] = ContextVar("compile", default=False)
_compiled: dict[Hashable, _Compiled | None] = {}  # None: could not be compiled, runs eagerly


def scan(step: Step, carry: Tree, aux: Tree, batches: Batches) -> Tree:
    """Fold `step` over all minibatches of all epochs in `batches`; a fully masked step leaves `carry` as it is."""
    identity(step)  # complains of closures over tensors in every engine, not only where it would go wrong
    program = _Program(step, carry, aux)
    time = (batches.index.flatten(0, 1), batches.mask.flatten(0, 1), batches.key.flatten(0, 1))
    flat = _Scan.apply(  # type: ignore[no-untyped-call]
        program, *tree.leaves(carry), *tree.leaves(aux), batches.x, batches.y, *time
    )
    values = iter(flat)
    return tree.map(lambda _: next(values), carry)


@contextlib.contextmanager
def compiling(enabled: bool = True) -> Iterator[None]:
    """Compile the steps of the scans inside."""
    token = _compile.set(enabled)
    try:
        yield
    finally:
        _compile.reset(token)


def compilations() -> int:
    """How many steps this process has compiled."""
    return sum(run is not None for run in _compiled.values())


def refusals() -> int:
    """How many steps could not be compiled in this process: no C++ compiler, or an operation that does not allow it."""
    return len(_compiled) - compilations()


@dataclass(frozen=True)
class _Program:
    """A step, the structure of what it carries, and the `vmap`s it has been lifted through, innermost first."""

    step: Step
    carry: Tree  # structure only
    aux: Tree  # structure only
    lifts: tuple[tuple[int | None, ...], ...] = ()  # per vmap: 0 or None for each leaf of (aux, x, y)

    @property
    def num_carry(self) -> int:
        return len(tree.leaves(self.carry))

    @property
    def num_aux(self) -> int:
        return len(tree.leaves(self.aux))

    def function(self, select: bool) -> Runner:
        """The lifted step on flat tensors: carry, aux, x and y of the minibatch, mask, key -> carry."""

        def one_client(*flat: Tensor) -> list[Tensor]:
            values = iter(flat)
            carry = tree.map(lambda _: next(values), self.carry)
            aux = tree.map(lambda _: next(values), self.aux)
            new = self.step(carry, aux, Batch(*values))
            # Leaves by name, in the order and type they came in: every step then sees the same program.
            new = tree.map(lambda old, value: value.to(old.dtype), carry, new)
            if select:  # a client whose minibatches are used up stays where it is
                new = tree.where(flat[-2].any(), new, carry)
            return tree.leaves(new)

        function: Runner = one_client
        for dims in self.lifts:
            in_dims = (*[0] * self.num_carry, *dims[:-2], 0, 0, 0, 0)
            function = vmap(function, in_dims=in_dims, randomness="error")
        return function

    def gather(self, pool: Tensor, index: Tensor, which: int) -> Tensor:
        """The examples at `index`, [steps, clients ..., batch]; `pool` is x (which = -2) or y (which = -1)."""
        if all(dims[which] is None for dims in self.lifts):  # one pool for all: rows are copied, twice as fast
            return pool.index_select(0, index.flatten()).view(*index.shape, *pool.shape[1:])

        def take(pool: Tensor, index: Tensor) -> Tensor:
            return pool[index]

        for dims in self.lifts:
            take = vmap(take, in_dims=(dims[which], 0))
        return vmap(take, in_dims=(None, 0))(pool, index)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(program: _Program, *flat: Tensor) -> tuple[Tensor, ...]:
        with on(flat[-1].device):  # under `vmap`, the one that is around all this does not reach here
            return tuple(_run(program, [value.detach() for value in flat]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: _Program, *flat: Tensor) -> Any:
        dims = in_dims[1:]
        front = [value if dim is None else value.movedim(dim, 0) for value, dim in zip(flat, dims, strict=True)]
        num_carry, num_fixed = program.num_carry, program.num_carry + program.num_aux + 2
        # What changes along the scan gets a client axis, what does not (a shared pool of examples) need not have one.
        everyone = [
            value if dim is not None or num_carry <= i < num_fixed else value.expand(info.batch_size, *value.shape)
            for i, (value, dim) in enumerate(zip(front, dims, strict=True))
        ]
        lift = tuple(None if dim is None else 0 for dim in dims[num_carry:num_fixed])
        out = _Scan.apply(  # type: ignore[no-untyped-call]
            replace(program, lifts=(*program.lifts, lift)), *everyone
        )
        return out, tuple(0 for _ in out)


@torch.no_grad()
def _run(program: _Program, flat: list[Tensor]) -> list[Tensor]:
    levels = len(program.lifts)
    carry, fixed, time = flat[: program.num_carry], flat[program.num_carry : -3], flat[-3:]
    # Time first, so that each step reads contiguous tensors of one shape, however many steps there are.
    index, mask, key = (value.movedim(levels, 0).contiguous() for value in time)
    # Steps that at least one client takes; the meta device, which has shapes only, takes all.
    alive = [True] * len(mask) if mask.is_meta else mask.flatten(1).any(1).tolist()
    if not any(alive):
        return [value.clone() for value in carry]
    run: Runner = program.function(select=levels > 0 and (mask.is_meta or not bool(mask.any(-1).all())))
    carry = [value.contiguous() for value in carry]
    *aux, x, y = (value.contiguous() for value in fixed)
    steps = [t for t, used in enumerate(alive) if used]
    index, mask, key = index[steps], mask[steps], key[steps]
    together = max(1, GATHERED // max(index[0].numel() * x[0].nbytes, 1))
    for start in range(0, len(steps), together):
        some = slice(start, start + together)
        batches = (program.gather(x, index[some], -2), program.gather(y, index[some], -1), mask[some], key[some])
        for number, batch in enumerate(zip(*batches, strict=True), start):
            if _compile.get() and number == 0:
                compiled = _compile_step(program, [*carry, *aux, *batch])
                if compiled is not None:
                    run = compiled
                    carry = [v.clone() if at in compiled.in_place else v for at, v in enumerate(carry)]
            carry = run(*carry, *aux, *batch)
    return carry


@dataclass(frozen=True)
class _Compiled:
    """A compiled step, finished by what `faster_products` left of it."""

    graph: Runner
    descents: tuple[Descent, ...]
    num_carry: int

    @property
    def in_place(self) -> set[int]:
        """The leaves of the carry that it changes."""
        return {descent.at for descent in self.descents}

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        outputs = self.graph(*flat)
        if not self.descents:
            return outputs
        new = list(outputs[: self.num_carry])
        for descent in self.descents:
            new[descent.at] = descent.apply(flat, outputs)
        return new


def _compile_step(program: _Program, example: list[Tensor]) -> _Compiled | None:
    shapes = tuple((tuple(value.shape), value.dtype, str(value.device)) for value in example)
    names = (*tree.pack(program.carry), "|", *tree.pack(program.aux))
    place = (identity(program.step), names, program.lifts, shapes, torch.get_num_threads())
    if place not in _compiled:
        try:
            with torch.random.fork_rng(devices=[]):  # trying the step out must not use up random numbers
                graph, descents = _trace(program, example), tuple[Descent, ...]()
                if example[0].device.type == "cpu":
                    graph, descents = faster_products(graph, program.num_carry)
                run = compile_graph(graph, example)
                run(*example)
            _compiled[place] = _Compiled(run, descents, program.num_carry)
        except Exception as error:  # no C++ compiler, an operation that cannot be compiled, ...
            log.info("running this step without compiling it: %s", str(error).splitlines()[:1])
            _compiled[place] = None
    return _compiled[place]


def _trace(program: _Program, example: list[Tensor]) -> torch.fx.GraphModule:
    function = program.function(select=bool(program.lifts))  # one client alone never takes a masked step
    with FewChannelConvolution(alone=not program.lifts):
        graph: torch.fx.GraphModule = make_fx(
            lambda *flat: [value.contiguous() for value in function(*flat)],
            decomposition_table=DECOMPOSITIONS if example[0].device.type == "cpu" else None,
        )(*example)
    for node in graph.graph.nodes:
        # Compiled code has a random generator of its own: such a step would change with the engine.
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(f"the model draws random numbers of its own ({node.target})")
    return graph


def identity(step: Any) -> Hashable:
    """What makes two steps the same program: their code and all that they close over."""
    if isinstance(step, functools.partial):
        return (identity(step.func), *map(identity, step.args), *((k, identity(v)) for k, v in step.keywords.items()))
    if isinstance(step, types.MethodType):
        return (identity(step.__func__), identity(step.__self__))
    if isinstance(step, types.FunctionType):
        cells = tuple(identity(cell.cell_contents) for cell in step.__closure__ or ())
        named = tuple((key, identity(value)) for key, value in sorted((step.__kwdefaults__ or {}).items()))
        return (step.__code__, cells, tuple(identity(value) for value in step.__defaults__ or ()), named)
    if isinstance(step, Tensor) or (isinstance(step, dict | tuple | list) and _has_tensor(step)):
        raise TypeError("a step closes over a tensor: pass everything it reads through `carry` or `aux`")
    try:
        hash(step)
    except TypeError as error:
        raise TypeError(f"a step closes over {step!r}, which cannot be hashed: {error}") from error
    return step  # type: ignore[no-any-return]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
