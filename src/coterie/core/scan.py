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
import itertools
import logging
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from coterie import pooling, spans, tree, winograd
from coterie.batches import Batch, Batches
from coterie.conv import FewChannelConvolution
from coterie.device import on
from coterie.lanes import Schedule, fitting, schedule
from coterie.machine_code import compile_graph
from coterie.native import Native, Steps, captured, repeatable
from coterie.products import Descent, faster_products
from coterie.tree import Tree

log = logging.getLogger("coterie")
Step = Callable[[Any, Any, Batch], Any]
Runner = Callable[..., list[Tensor]]
Kind = tuple[tuple[int, ...], torch.dtype, torch.device]

GATHERED = 2**20  # bytes of examples that are read at once

DECOMPOSITIONS = {**pooling.DECOMPOSITIONS, **winograd.DECOMPOSITIONS}  # on a CPU

_unrepeatable: set[Hashable] = set()
_called = [0]
_how: ContextVar[_How] = ContextVar("how")
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


class _How(NamedTuple):
    """What `compiling` was told."""

    compiled: bool = False
    width: int | None = None
    threads: int = 1


def _now() -> _How:
    return _how.get(_How())


@contextlib.contextmanager
def compiling(enabled: bool = True, width: int | None = None, threads: int = 1) -> Iterator[None]:
    """Compile the steps of the scans inside, for `width` clients a step (None: for all that are stacked).

    Steps that are not compiled have at most as many. Those that C++ repeats have one: so many `threads` take the
    clients.
    """
    token = _how.set(_How(enabled, width, threads))
    try:
        yield
    finally:
        _how.reset(token)


def compilations() -> int:
    """How many steps this process has compiled."""
    return sum(run is not None for run in _compiled.values())


def refusals() -> int:
    """How many steps could not be compiled in this process: no C++ compiler, or an operation that does not allow it."""
    return len(_compiled) - compilations()


def called() -> int:
    """How many scans of this process had steps that Python called, compiled or not."""
    return _called[0]


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

    @property
    def one_pool(self) -> bool:
        """Whether all clients read the same examples."""
        return all(dims[-2] is None and dims[-1] is None for dims in self.lifts)

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
        if self.one_pool:  # rows are copied, twice as fast
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
    mask = time[1]
    if not mask.is_meta and not bool(mask.any()):
        return [value.clone(memory_format=torch.contiguous_format) for value in carry]
    if _now().compiled and program.one_pool and mask.is_cpu:
        done = _repeated(program, carry, fixed, time)
        if done is not None:
            return done
    carry = [value.contiguous() for value in carry]
    *aux, x, y = (value.contiguous() for value in fixed)
    lanes = _lanes(program, carry, aux, mask) if levels else None
    if lanes is None:
        # Time first, so that each step reads contiguous tensors of one shape, however many steps there are.
        index, mask, key = (value.movedim(levels, 0).contiguous() for value in time)
        if not mask.is_meta:  # which has shapes only, and takes all steps; else those that at least one client takes
            alive = mask.flatten(1).any(1)
            index, mask, key = (value[alive] for value in (index, mask, key))
    else:
        index, mask, key = (lanes.arrange(value, levels) for value in time)
        mask = mask * lanes.live.reshape(*lanes.live.shape, *[1] * (mask.ndim - 2))
        carry, aux = lanes.carry, lanes.aux
    select = levels > 0 and (mask.is_meta or not bool(mask.any(-1).all()))
    first = (program.gather(x, index[:1], -2), program.gather(y, index[:1], -1), mask[:1], key[:1])
    compiled = None
    if _now().compiled:
        example = [*carry, *aux, *(part[0] for part in first)]
        compiled = _compile_step(program, lambda: example, [_kind(value, value.shape) for value in example])
    walk = _Walk(compiled, program, select, carry, aux, own=lanes is not None)
    turns = lanes.schedule.turns if lanes is not None else {}
    for begin, end in itertools.pairwise([0, *sorted(turns), len(index)]):
        if lanes is not None and begin in turns:
            walk.carry = lanes.turn(begin, walk.carry)
        walk.steps(x, y, index[begin:end], mask[begin:end], key[begin:end])
    carry = walk.carry
    return carry if lanes is None else lanes.results(carry)


def _repeated(program: _Program, carry: list[Tensor], fixed: list[Tensor], time: list[Tensor]) -> list[Tensor] | None:
    """The same by C++, which takes the steps of one client after another; None where it cannot repeat them."""
    levels = len(program.lifts)
    if not carry:
        return None
    if not levels:
        flat = [value[None] for value in (*carry, *fixed[:-2])]
        alone = replace(program, lifts=((0,) * program.num_aux + (None, None),))
        done = _repeated(alone, flat[: len(carry)], [*flat[len(carry) :], *fixed[-2:]], [value[None] for value in time])
        return done and [leaf[0] for leaf in done]
    one, lifted = replace(program, lifts=program.lifts[:-1]), [dim is not None for dim in program.lifts[-1][:-2]]
    *aux, x, y = fixed
    carry = [_whole_rows(leaf) for leaf in carry]
    everyone = len(carry[0])
    aux = [leaf if own else leaf.expand(everyone, *leaf.shape) for leaf, own in zip(aux, lifted, strict=True)]
    aux = [_whole_rows(leaf) for leaf in aux]
    pool = x.contiguous(), y.contiguous()
    times = [value.movedim(levels, 1) for value in time]  # [clients, steps, ...]
    real = times[1].flatten(2).any(2)
    batches = [value[real].contiguous() for value in times]  # [all steps of the first client, then of the next; ...]
    rows = [*carry, *aux]

    def first_step() -> list[Tensor]:
        return [
            *(leaf[0] for leaf in rows),
            *(part[batches[0][0]] for part in pool),
            *(part[0] for part in batches[1:]),
        ]

    kinds = [_kind(leaf, leaf.shape[1:]) for leaf in rows]
    kinds += [_kind(part, batches[0].shape[1:] + part.shape[1:]) for part in pool]
    kinds += [_kind(part, part.shape[1:]) for part in batches[1:]]
    compiled = _compile_step(one, first_step, kinds, to_repeat=True)
    if compiled is None or compiled.native is None:
        return None
    sizes = real.sum(1).numpy()
    ends = sizes.cumsum()
    parts = np.stack([np.arange(len(sizes)), ends - sizes, ends], 1)[np.argsort(-sizes, kind="stable")]
    done, spent = compiled.native.scan(carry, aux, pool, Steps(parts, batches), _now().threads)
    spans.beside(spent)
    return done


def _whole_rows(leaf: Tensor) -> Tensor:
    """Each of its rows is contiguous; all of them may be one."""
    return leaf if leaf[:1].is_contiguous() else leaf.contiguous()


class _Walk:
    """A carry on its way through the steps of a scan."""

    def __init__(
        self,
        compiled: _Compiled | None,
        program: _Program,
        select: bool,
        carry: list[Tensor],
        aux: list[Tensor],
        own: bool,
    ) -> None:
        """`own`: nobody else looks at the tensors of this carry, so that they may be changed."""
        self.program, self.aux = program, aux
        self.run = compiled or program.function(select)
        changed = compiled.in_place if compiled is not None else ()
        self.carry = [leaf.clone() if at in changed and not own else leaf for at, leaf in enumerate(carry)]

    def steps(self, x: Tensor, y: Tensor, index: Tensor, mask: Tensor, key: Tensor) -> None:
        _called[0] += 1
        together = max(1, GATHERED // max(index[0].numel() * x[0].nbytes, 1))
        for some in (slice(start, start + together) for start in range(0, len(index), together)):
            read = (self.program.gather(x, index[some], -2), self.program.gather(y, index[some], -1))
            for batch in zip(*read, mask[some], key[some], strict=True):
                self.carry = self.run(*self.carry, *self.aux, *batch)


def _lanes(program: _Program, start: list[Tensor], aux: list[Tensor], mask: Tensor) -> _Lanes | None:
    """The lanes of a scan over stacked clients; None where each client just has its own."""
    *own, shared_x, shared_y = (dim is None for dim in program.lifts[-1])  # of the clients, who are outermost
    if mask.is_meta or not (shared_x and shared_y):
        return None
    real = mask.movedim(len(program.lifts), 1).flatten(2).any(2).cpu().numpy()  # [clients, steps]
    sizes = real.sum(1).tolist()
    number, most = len(sizes), _now().width or len(sizes)
    # A compiled step has one shape, whoever takes part; else as few lanes as do not take more steps.
    width = most if _now().compiled else fitting(sizes, min(most, number))
    if width == number and (min(sizes) == max(sizes) or (_now().compiled and fitting(sizes, number) == number)):
        return None
    return _Lanes(schedule(sizes, width), real, start, aux, [not each for each in own])


class _Lanes:
    """The rows of clients that share lanes: what a lane carries is written back when the next client comes."""

    def __init__(
        self, schedule: Schedule, real: NDArray[np.bool_], start: list[Tensor], aux: list[Tensor], lifted: list[bool]
    ) -> None:
        self.schedule, self._start, self._aux, self._lifted = schedule, start, aux, lifted
        device = start[0].device
        when = np.argsort(~real, axis=1, kind="stable")  # a client's own steps first
        self._client = torch.from_numpy(schedule.client.T.copy()).to(device)  # [steps, lanes]
        self._when = torch.from_numpy(when[schedule.client, schedule.place].T.copy()).to(device)
        self.live = torch.from_numpy(schedule.live.T.copy()).to(device)
        self.carry = [leaf.index_select(0, self._client[0]) for leaf in start]
        self.aux = [leaf.index_select(0, self._client[0]) if own else leaf for leaf, own in self._each_aux()]
        self._done = [leaf.clone() for leaf in start]  # who has no minibatch stays as it is

    def _each_aux(self) -> Iterable[tuple[Tensor, bool]]:
        return zip(self._aux, self._lifted, strict=True)

    def arrange(self, value: Tensor, levels: int) -> Tensor:
        """[clients, ..., steps, ...] as [steps, lanes, ...]."""
        return value.movedim(levels, 1)[self._client, self._when]

    def turn(self, number: int, carry: list[Tensor]) -> list[Tensor]:
        """Before step `number`: the next clients take over."""
        taken = {leaf.data_ptr() for leaf in (*self.aux, *self._aux)}
        for at, leaf in enumerate(carry):  # what a step gives back may show something else, or one value many times
            if leaf.data_ptr() in taken or not leaf.is_contiguous():
                carry = [*carry[:at], leaf.clone(memory_format=torch.contiguous_format), *carry[at + 1 :]]
            taken.add(carry[at].data_ptr())
        for lane, leaves, comes in self.schedule.turns[number]:
            for leaf, first, done in zip(carry, self._start, self._done, strict=True):
                done[leaves] = leaf[lane]
                leaf[lane] = first[comes]
            for leaf, (whole, own) in zip(self.aux, self._each_aux(), strict=True):
                if own:
                    leaf[lane] = whole[comes]
        return carry

    def results(self, carry: list[Tensor]) -> list[Tensor]:
        lanes, clients = (torch.tensor(each, device=carry[0].device) for each in zip(*self.schedule.last, strict=True))
        for leaf, done in zip(carry, self._done, strict=True):
            tree.write_rows(done, clients, leaf.index_select(0, lanes))
        return self._done


@dataclass(frozen=True)
class _Compiled:
    """A compiled step, finished by what `faster_products` left of it."""

    graph: Runner
    descents: tuple[Descent, ...]
    num_carry: int
    native: Native | None = None

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


def _kind(value: Tensor, shape: Sequence[int]) -> Kind:
    return tuple(shape), value.dtype, value.device


def _compile_step(
    program: _Program, example_of: Callable[[], list[Tensor]], kinds: Sequence[Kind], to_repeat: bool = False
) -> _Compiled | None:
    """The step for tensors of these `kinds`, which an example has; with `to_repeat`, only if C++ is likely to."""
    names = (*tree.pack(program.carry), "|", *tree.pack(program.aux))
    place = (identity(program.step), names, program.lifts, *kinds, torch.get_num_threads())
    if place not in _compiled and not (to_repeat and place in _unrepeatable):
        example = example_of()
        try:
            with torch.random.fork_rng(devices=[]):  # trying the step out must not use up random numbers
                graph, descents = _trace(program, example), tuple[Descent, ...]()
                if to_repeat and not repeatable(graph):
                    _unrepeatable.add(place)
                    return None
                if example[0].device.type == "cpu":
                    graph, descents = faster_products(graph, program.num_carry)
                run, code = compile_graph(graph, example)
                run(*(value.clone() for value in example))  # of which it may change some
                native = _native(graph, code, example, program.num_carry, descents)
            _compiled[place] = _Compiled(run, descents, program.num_carry, native)
        except Exception as error:  # no C++ compiler, an operation that cannot be compiled, ...
            log.info("running this step without compiling it: %s", str(error).splitlines()[:1])
            _compiled[place] = None
    return _compiled.get(place)


def _native(
    graph: torch.fx.GraphModule, code: Any, example: list[Tensor], num_carry: int, descents: tuple[Descent, ...]
) -> Native | None:
    try:
        return captured(code, example, num_carry, descents) if repeatable(graph) else None
    except Exception as why:  # it does what cannot be repeated, or TorchInductor's code is not as it is known
        log.info("this step is called from Python: %s", str(why).splitlines()[:1])
        return None


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
