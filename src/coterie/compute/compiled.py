"""The compiled back-end: a step is traced once and compiled to machine code, and where possible its scan runs in C++.

- `Compiled.scan` first tries to have C++ repeat the compiled step of ONE client (`coterie.compute.replay`): each client
  takes its own minibatches, threads take the clients, and nothing is stacked or padded.
- A step that C++ cannot repeat (one with a convolution, say) is compiled for stacked clients and called from Python.
- A step that cannot be compiled runs as it is, and so does one whose method asks for that (`scan(compiles=False)`).

Clients of every size, rounds, and methods with the same step share one compiled step: it is found by the step's
`identity` and by the shapes of what it is given. A step that C++ repeats is kept on disk (`program_store`); another
process that finds it there neither traces nor compiles. What is found is taken for the step only after one step of it
was compared with the plain one, on the first minibatch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from coterie import profiling
from coterie.compute import program_store, replay, winograd
from coterie.compute.availability import asked_for_plain, first_line, no_compiler, unavailable
from coterie.compute.convolution import FewChannelConvolution
from coterie.compute.inductor import compile_graph
from coterie.compute.packing import Packed, scan_packed
from coterie.compute.recording import may_be_replayable, record, repeats
from coterie.compute.replay import ClientSteps, ReplayedStep
from coterie.compute.rewriting import rewrite
from coterie.compute.step_key import step_key
from coterie.compute.torch_private import private, without_dynamo
from coterie.core import tree
from coterie.core.backend import Backend, using
from coterie.core.plain import Plain
from coterie.core.scan import Program, Runner, identity

log = logging.getLogger("coterie")
AS_IT_IS = "the method asks for its step to run as it is"
Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class Outcome(NamedTuple):
    """How the steps of a scan were taken, and in words why not faster."""

    path: Literal["replayed", "compiled", "plain"]  # repeated by C++, compiled and called by Python, ordinary PyTorch
    why: str = ""


class CompiledStep(NamedTuple):
    run: Runner | None  # None: it could not be compiled, and runs as it is; or it was found on disk
    replayed: ReplayedStep | None = None  # None: C++ cannot repeat it
    why: str = ""  # not compiled, or not repeated

    @property
    def from_disk(self) -> bool:
        """Tell whether only C++ can take it: Python has nothing to call."""
        return self.run is None and self.replayed is not None

    @property
    def outcome(self) -> Outcome:
        if self.replayed is not None:
            return Outcome("replayed")
        return Outcome("plain" if self.run is None else "compiled", self.why)


class NotStored(Exception):
    """A step would have to be compiled, inside `stored_only`."""


_compiled: dict[Hashable, CompiledStep] = {}
_unrepeatable: set[Hashable] = set()
_lock = threading.RLock()  # one step is compiled at a time, since TorchInductor has global state
_seen: ContextVar[list[Outcome] | None] = ContextVar("seen", default=None)
_disk: ContextVar[Literal["may", "only", "never"]] = ContextVar("disk", default="may")  # where steps come from


def compilations() -> int:
    """Return how many steps this process has compiled, or found compiled on disk."""
    return sum(step.outcome.path != "plain" for step in _compiled.values())


@contextlib.contextmanager
def stored_only() -> Iterator[None]:
    """Compile nothing inside: a scan whose step is neither known yet nor found on disk raises `NotStored`."""
    with _disk_is("only"):
        yield


@contextlib.contextmanager
def nothing_stored() -> Iterator[None]:
    """Compile every step that is not known yet, and look for none on disk."""
    with _disk_is("never"):
        yield


@contextlib.contextmanager
def _disk_is(value: Literal["only", "never"]) -> Iterator[None]:
    token = _disk.set(value)
    try:
        yield
    finally:
        _disk.reset(token)


@contextlib.contextmanager
def observing() -> Iterator[list[Outcome]]:
    """Note the outcome of every scan that a compiled back-end runs inside, in this process."""
    seen: list[Outcome] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def slowest(seen: Sequence[Outcome]) -> Outcome | None:
    """Return the slowest of the paths that were taken; None where no scan was run."""
    order = ("replayed", "compiled", "plain")
    return max(seen, key=lambda outcome: order.index(outcome.path), default=None)


def backend(compiled: bool, width: int | None = None, threads: int = 1) -> Backend:
    """Return a back-end for the scans of a round.

    Args:
        compiled: compile the steps, where that is possible on this machine.
        width: how many clients a stacked step has at most; None: as many as there are. A step that is repeated by C++
            has one.
        threads: how many clients take their steps at the same time, where C++ repeats them.
    """
    if not compiled:
        return Plain() if asked_for_plain() else Packed(width)
    if not has_steps():
        return backend(False, width)
    return Compiled(width, threads)  # which looks for TorchInductor when it needs it


def has_steps() -> bool:
    """Tell whether there may be compiled steps here: there is a compiler, or an earlier one left some on disk.

    So a machine without a compiler can have the cache folder of one that is the same but for that.
    """
    return not asked_for_plain() and (no_compiler() is None or replay.is_kept())


@contextlib.contextmanager
def compiling(enabled: bool = True, width: int | None = None, threads: int = 1) -> Iterator[None]:
    """Run the scans inside on `backend(enabled, width, threads)`."""
    with using(backend(enabled, width, threads)):
        yield


@dataclass(frozen=True)
class Compiled:
    width: int | None = None
    threads: int = 1

    def scan(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor]:
        if not program.compiles:
            _note(Outcome("plain", AS_IT_IS))
            return Packed(self.width).scan(program, carry, fixed, time)
        if program.one_pool and time[1].is_cpu:
            done = self._replayed(program, carry, fixed, time)
            if done is not None:
                _note(Outcome("replayed"))
                return done
        if _disk.get() != "only" and (why := unavailable()):
            _note(Outcome("plain", why))
            return Packed(self.width).scan(program, carry, fixed, time)
        return scan_packed(program, carry, fixed, time, self.width, _prepare)

    def _replayed(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor] | None:
        """Have C++ take the steps of one client after another; None where it cannot repeat them."""
        levels = len(program.lifts)
        if not carry:
            return None
        if not levels:
            flat = [value[None] for value in (*carry, *fixed[:-2])]
            alone = replace(program, lifts=((0,) * program.num_aux + (None, None),))
            clients = tuple(value[None] for value in time)
            done = self._replayed(alone, flat[: len(carry)], [*flat[len(carry) :], *fixed[-2:]], clients)
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
        batches = [
            value[real].contiguous() for value in times
        ]  # [all steps of the first client, then of the next; ...]
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
        if compiled is None or compiled.replayed is None:
            return None
        sizes = real.sum(1).numpy()
        ends = sizes.cumsum()
        parts = np.stack([np.arange(len(sizes)), ends - sizes, ends], 1)[np.argsort(-sizes, kind="stable")]
        done, spent = compiled.replayed.scan(carry, aux, pool, ClientSteps(parts, batches), self.threads)
        profiling.beside(spent)
        return done


def _prepare(program: Program, example: list[Tensor]) -> Runner | None:
    step = _compile_step(program, lambda: example, [_kind(value, value.shape) for value in example])
    assert step is not None  # which only `to_repeat` allows
    _note(step.outcome)
    return step.run


def _note(outcome: Outcome) -> None:
    seen = _seen.get()
    if seen is not None:
        seen.append(outcome)


def _whole_rows(leaf: Tensor) -> Tensor:
    """Make each row contiguous; all of them may be the same memory."""
    return leaf if leaf[:1].is_contiguous() else leaf.contiguous()


def _kind(value: Tensor, shape: Sequence[int]) -> Kind:
    return tuple(shape), value.dtype, value.device


def _compile_step(
    program: Program, example_of: Callable[[], list[Tensor]], kinds: Sequence[Kind], to_repeat: bool = False
) -> CompiledStep | None:
    """Return the compiled step for tensors of these `kinds`; None only with `to_repeat`, where C++ cannot.

    Args:
        program: the lifted step.
        example_of: makes tensors of these kinds, to trace and try the step with.
        kinds: shape, type and device of all inputs.
        to_repeat: compile only if C++ is likely to be able to repeat the step.
    """
    names = (*tree.pack(program.carry), "|", *tree.pack(program.aux))
    place = (identity(program.step), names, program.lifts, *kinds, torch.get_num_threads())
    with _lock:
        known = place in _compiled and (to_repeat or not _compiled[place].from_disk)
        if not known and not (to_repeat and place in _unrepeatable):
            # Clones: a step that begins at its anchor has the same memory twice, which cannot be compiled.
            example = [value.clone() for value in example_of()]
            key = step_key(program, kinds) if to_repeat else None
            step = _stored(program, key, example) if key and _disk.get() != "never" else None
            if step is None and _disk.get() == "only":
                raise NotStored
            if step is None and to_repeat and unavailable() is not None:
                return None
            if step is None:
                step = _compile(program, example, to_repeat)
                if key and step is not None and step.replayed is not None:
                    program_store.save(key, step.replayed)
            if step is None:
                _unrepeatable.add(place)
            else:
                _compiled[place] = step
        return _compiled.get(place)


def _stored(program: Program, key: str, example: list[Tensor]) -> CompiledStep | None:
    """Return the step that is kept on disk under `key`, if it does what the plain step does."""
    found = program_store.load(key)
    if found is None:
        return None
    try:
        with torch.random.fork_rng(devices=[]), without_dynamo():
            expected = program.function(select=bool(program.lifts))(*example)
            right = repeats(found, example, expected, program.num_time)
    except Exception as error:
        log.info("a step that was kept on disk cannot be tried: %s", first_line(error))
        return None
    if not right:
        log.info("a step that was kept on disk gives other results: it is compiled anew")
        return None
    return CompiledStep(None, found)


def _compile(program: Program, example: list[Tensor], to_repeat: bool) -> CompiledStep | None:
    try:
        with torch.random.fork_rng(devices=[]):  # trying the step out must not use up random numbers
            graph = _trace(program, example)
            replayable = may_be_replayable(graph)
            if to_repeat and not replayable:
                return None
            run, code = compile_graph(rewrite(graph) if replayable else graph, example)
            run(*(value.clone() for value in example))  # of which it may change some
    except Exception as error:  # a compiler that fails, an operation that cannot be compiled, ...
        log.info("running this step without compiling it: %s", first_line(error))
        return CompiledStep(None, why=first_line(error))
    if not replayable:
        return CompiledStep(run, why="it has a convolution, or is not on the CPU")
    try:
        return CompiledStep(run, record(code, example, program.num_carry, program.num_time))
    except Exception as error:  # it does what cannot be repeated, or TorchInductor's code is not as it is known
        log.info("this step is called from Python: %s", first_line(error))
        return CompiledStep(run, why=first_line(error))


def _trace(program: Program, example: list[Tensor]) -> torch.fx.GraphModule:
    function = program.function(select=bool(program.lifts))  # one client alone never takes a masked step
    with FewChannelConvolution(alone=not program.lifts):
        graph: torch.fx.GraphModule = private("make_fx")(
            lambda *flat: [value.contiguous() for value in function(*flat)],
            decomposition_table=winograd.DECOMPOSITIONS if example[0].device.type == "cpu" else None,
        )(*example)
    for node in graph.graph.nodes:
        # Compiled code has a random generator of its own: such a step would change with the engine.
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(f"the model draws random numbers of its own ({node.target})")
    return graph
