"""The hot loop: everything a client does with data is a scan of a small pure step over its minibatches.

    carry = scan(step, carry, aux, batches)          step(carry, aux, batch) -> carry, for ONE client

Outside `torch.func.vmap` this is a Python loop. Under `vmap` it is not traced op by op: the rule below receives the
stacked clients, lifts the *step* over them once, and runs the same loop over lifted steps (nested `vmap`s nest). How
the loop is run is up to the back-end (`coterie.core.backend`): the plain one calls the step, others may compile it.

All that a step reads goes through `carry` and `aux`, never through a closure over tensors; what it does close over
(task, hyper-parameters, functions) identifies the step, so that equal steps of other rounds, methods and seeds can
share what a back-end made of one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from coterie.core import tree
from coterie.core.backend import current
from coterie.core.batches import Batch, Batches
from coterie.core.device import on
from coterie.core.pace import at_pace
from coterie.core.tree import Tree

Step = Callable[[Any, Any, Batch], Any]
Runner = Callable[..., list[Tensor]]


def scan(step: Step, carry: Tree, aux: Tree, batches: Batches, *, compiles: bool = True) -> Tree:
    """Fold `step` over all minibatches of all epochs in `batches`.

    Args:
        step: `step(carry, aux, batch)` returns the new carry; names and shapes stay those of the old one.
        carry: what changes from step to step.
        aux: what a step reads and does not change.
        batches: one client's minibatches. A step whose minibatch is masked as a whole leaves the carry as it is.
        compiles: whether a back-end may compile the step. Decline it for a step that is mostly work of large matrix
            routines, which compiling does not make faster, and that would take minutes to compile.

    Returns:
        The carry after the last step.

    Raises:
        TypeError: the step closes over a tensor, or over something that cannot be hashed.
    """
    identity(step)  # complains of closures over tensors in every engine, not only where it would go wrong
    program = Program(step, carry, aux, compiles=compiles, paced=not isinstance(batches.pace, tuple))
    each = (batches.index, batches.mask, batches.key, *tree.leaves(batches.pace))
    time = tuple(part.flatten(0, 1) for part in each)
    flat = _Scan.apply(  # type: ignore[no-untyped-call]
        program, *tree.leaves(carry), *tree.leaves(aux), batches.x, batches.y, *time
    )
    values = iter(flat)
    return tree.map(lambda _: next(values), carry)


@dataclass(frozen=True)
class Program:
    """A step, the structure of what it carries, and the `vmap`s it has been lifted through, innermost first."""

    step: Step
    carry: Tree  # structure only
    aux: Tree  # structure only
    lifts: tuple[tuple[int | None, ...], ...] = ()  # per vmap: 0 or None for each leaf of (aux, x, y)
    compiles: bool = True  # whether a back-end may compile the step
    paced: bool = False  # whether every minibatch comes with a pace, after its key

    @property
    def num_time(self) -> int:
        """How many tensors have a part for every minibatch: positions, mask and key, and paces if there are any."""
        return 3 + self.paced

    @property
    def num_carry(self) -> int:
        return len(tree.leaves(self.carry))

    @property
    def num_aux(self) -> int:
        return len(tree.leaves(self.aux))

    @property
    def one_pool(self) -> bool:
        """Tell whether all clients read the same pool of examples."""
        return all(dims[-2] is None and dims[-1] is None for dims in self.lifts)

    def function(self, select: bool) -> Runner:
        """Return the lifted step on flat tensors: carry, aux, x and y of the minibatch, mask, key -> carry.

        With `select`, a client whose minibatch is masked as a whole keeps its carry.
        """

        def one_client(*flat: Tensor) -> list[Tensor]:
            values = iter(flat)
            carry = tree.map(lambda _: next(values), self.carry)
            aux = tree.map(lambda _: next(values), self.aux)
            batch = Batch(*values)
            with at_pace(batch.pace):
                new = self.step(carry, aux, batch)
            # Leaves by name, in the order and type they came in: every step then sees the same program.
            new = tree.map(lambda old, value: value.to(old.dtype), carry, new)
            if select:
                new = tree.where(batch.mask.any(), new, carry)
            return tree.leaves(new)

        function: Runner = one_client
        for dims in self.lifts:
            in_dims = (*[0] * self.num_carry, *dims[:-2], 0, 0, *[0] * (self.num_time - 1))
            function = vmap(function, in_dims=in_dims, randomness="error")
        return function

    def gather(self, pool: Tensor, index: Tensor, which: int) -> Tensor:
        """Read the examples at `index`, [steps, clients ..., batch], of `pool`: x (which = -2) or y (which = -1)."""
        if self.one_pool:  # rows are copied, twice as fast
            return pool.index_select(0, index.flatten()).view(*index.shape, *pool.shape[1:])

        def take(pool: Tensor, index: Tensor) -> Tensor:
            return pool[index]

        for dims in self.lifts:
            take = vmap(take, in_dims=(dims[which], 0))
        return vmap(take, in_dims=(None, 0))(pool, index)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(program: Program, *flat: Tensor) -> tuple[Tensor, ...]:
        values = [value.detach() for value in flat]
        time, mask = tuple(values[-program.num_time :]), values[1 - program.num_time]
        carry, fixed = values[: program.num_carry], values[program.num_carry : -program.num_time]
        if not mask.is_meta and not bool(mask.any()):
            return tuple(value.clone(memory_format=torch.contiguous_format) for value in carry)
        # Under `vmap`, neither the device nor the mode of gradients that is around all this reaches here.
        with on(mask.device), torch.no_grad():
            return tuple(current().scan(program, carry, fixed, time))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, program: Program, *flat: Tensor) -> Any:
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


def identity(step: Any) -> Hashable:
    """Return what makes two steps the same program: their code and all that they close over."""
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
