"""The plain back-end: a Python loop over steps that `vmap` has lifted over the clients. Ordinary PyTorch, no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from coterie.core.scan import Program, Runner

GATHERED_BYTES = 2**20  # of examples that are read from the pool at once


class Plain:
    """Every client takes part in every step; one whose minibatches are used up keeps its carry by a select."""

    def scan(
        self, program: Program, carry: list[Tensor], fixed: list[Tensor], time: tuple[Tensor, ...]
    ) -> list[Tensor]:
        levels = len(program.lifts)
        *aux, x, y = (value.contiguous() for value in fixed)
        carry = [value.contiguous() for value in carry]
        time = steps_first(time, levels)
        mask = time[1]
        select = levels > 0 and (mask.is_meta or not bool(mask.any(-1).all()))
        return walk(program, self.steps(program, select), carry, aux, (x, y), time)

    def steps(self, program: Program, select: bool) -> Runner:
        """Return what is called for each step."""
        return program.function(select)


def steps_first(time: tuple[Tensor, ...], levels: int) -> tuple[Tensor, ...]:
    """Put the axis of steps first, so that each step reads contiguous tensors; leave out steps that nobody takes."""
    moved = tuple(value.movedim(levels, 0).contiguous() for value in time)
    mask = moved[1]
    if mask.is_meta:  # which has shapes only
        return moved
    alive = mask.flatten(1).any(1)
    return tuple(value[alive] for value in moved)


def walk(
    program: Program,
    step: Runner,
    carry: list[Tensor],
    aux: list[Tensor],
    pool: tuple[Tensor, Tensor],
    time: tuple[Tensor, ...],
) -> list[Tensor]:
    """Take all steps, one call of `step` for each; `time` has the steps first."""
    (x, y), (index, *others) = pool, time
    if not len(index):
        return carry
    together = max(1, GATHERED_BYTES // max(index[0].numel() * x[0].nbytes, 1))
    for start in range(0, len(index), together):
        some = slice(start, start + together)
        read = program.gather(x, index[some], -2), program.gather(y, index[some], -1)
        for batch in zip(*read, *(value[some] for value in others), strict=True):
            carry = step(*carry, *aux, *batch)
    return carry
