"""Several targets at once, of kinds that may differ, such as death, days in hospital and a grade.

Each has its own outputs, its own columns of `y` (missing ones are NaN), its own loss and a weight:

    loss = sum_m v_m [target m is known] loss_m / sum_m v_m

An unknown target adds nothing to an example's loss, and gets no gradient; each known one counts the same, whatever else
is known of its example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.targets.target import Table, Target, refuse_missing


@dataclass(frozen=True)
class Part:
    """One of several targets."""

    name: str
    target: Target
    weight: float = 1.0
    classes: tuple[str, ...] = ()  # names of its classes

    @property
    def columns(self) -> int:
        """How many columns of `y` it has."""
        return self.target.shape[0] if self.target.shape else 1

    @property
    def outputs(self) -> int:
        """How many outputs it needs."""
        return self.target.num_outputs or 1

    def known(self, columns: Tensor) -> Tensor:
        """Return whose target is known, [examples]: of several labels, one of them."""
        missing = torch.isnan(columns)
        return ~(missing.all(1) if self.target.kind == "multilabel" else missing.any(1))

    def own(self, columns: Tensor, known: Tensor) -> Tensor:
        """Return its targets as the target itself has them; where nothing is known, something that does no harm."""
        safe = torch.where(known[:, None], columns, 0.0)
        return (safe if self.target.shape else safe[:, 0]).to(self.target.dtype)

    def names(self) -> list[str]:
        """Return the names of its classes, or their numbers."""
        return list(self.classes or map(str, range(self.target.num_values or 0)))


@dataclass(frozen=True)
class Several(Target):
    """Targets side by side."""

    kind: ClassVar[str] = "multitask"
    words: ClassVar[str] = "a task with several targets"
    outputs: ClassVar[str] = "outputs of all targets"

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise refuse_missing(self.kind, "its targets need different names, and at least one")
        if not all(part.weight > 0 for part in self.parts):
            raise refuse_missing(self.kind, "the weight of a target must be above 0")
        for part in self.parts:
            if isinstance(part.target, Several) or part.target.num_outputs is None or len(part.target.shape) > 1:
                raise refuse_missing(self.kind, f"'{part.name}' cannot be one of several targets")

    @property
    def joint(self) -> bool:  # type: ignore[override]
        return any(part.target.joint for part in self.parts)

    @property
    def num_outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.columns for part in self.parts),)

    def outputs_of(self, outputs: Tensor, axis: int = 1) -> list[Tensor]:
        """Return each target's outputs."""
        return list(torch.split(outputs, [part.outputs for part in self.parts], axis))

    def columns_of(self, y: Tensor) -> list[Tensor]:
        """Return each target's columns."""
        return list(torch.split(y, [part.columns for part in self.parts], 1))

    def losses(self, outputs: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        total: Any = 0.0
        for part, out, columns in zip(self.parts, self.outputs_of(outputs), self.columns_of(y), strict=True):
            known = part.known(columns)
            counts = known.to(out.dtype) if weight is None else weight * known
            losses = part.target.losses(out, part.own(columns, known), counts)
            total = total + part.weight * torch.where(known, losses, 0.0)
        return total / sum(part.weight for part in self.parts)  # type: ignore[no-any-return]

    def mix(self, outputs: Tensor, weight: Tensor) -> Tensor:
        each = zip(self.parts, self.outputs_of(outputs, 2), strict=True)
        return torch.cat([part.target.mix(out, weight) for part, out in each], 1)

    def predictions(self, outputs: Tensor) -> Tensor:
        each = zip(self.parts, self.outputs_of(outputs), strict=True)
        return torch.cat([part.target.predictions(out) for part, out in each], 1)

    def table(self, outputs: Tensor, classes: Sequence[str]) -> Table:
        header, rows = list[str](), [list[str]() for _ in outputs]
        for part, out in zip(self.parts, self.outputs_of(outputs), strict=True):
            names, own = part.target.table(out, part.names())
            header += [f"{part.name}.{name}" for name in names]
            rows = [before + mine for before, mine in zip(rows, own, strict=True)]
        return header, rows

    def misfits(self, y: Tensor) -> tuple[Tensor, str]:
        wrong, anything = torch.zeros(len(y), dtype=torch.bool), torch.zeros(len(y), dtype=torch.bool)
        for part, columns in zip(self.parts, self.columns_of(y), strict=True):
            known = part.known(columns)
            anything |= known
            whole = part.target.dtype.is_floating_point or bool((columns[known] == columns[known].floor()).all())
            bad, words = part.target.misfits(part.own(columns, known))
            if bool((bad & known).any()) or not whole:
                return bad & known if whole else known, f"{words} ('{part.name}')"
        return wrong | ~anything, "no target that is known"

    def strata(self, y: NDArray[Any]) -> NDArray[Any] | None:
        start = 0
        for part in self.parts:
            columns = y[:, start : start + part.columns]
            start += part.columns
            found = part.target.strata(columns if part.target.shape else columns[:, 0])
            if found is not None:
                labels: NDArray[Any] = np.nan_to_num(np.asarray(found, dtype=float), nan=-1.0)
                return labels
        return None

    def to_json(self) -> dict[str, Any]:
        parts = [
            {"name": part.name, "target": part.target.to_json(), "weight": part.weight, "classes": list(part.classes)}
            for part in self.parts
        ]
        return {"kind": self.kind, "parts": parts}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Target:
        from coterie.core.targets import from_json

        return cls(
            tuple(
                Part(str(each["name"]), from_json(each["target"]), float(each["weight"]), tuple(each["classes"]))
                for each in values["parts"]
            )
        )
