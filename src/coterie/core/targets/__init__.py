"""What a model is to predict, by kind: see `target.py` for what all have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.targets.classes import Classes
from coterie.core.targets.labels import Labels
from coterie.core.targets.numbers import Numbers
from coterie.core.targets.ordered import Ordered
from coterie.core.targets.several import Part, Several
from coterie.core.targets.survival import Cox, Survival
from coterie.core.targets.target import Target

KINDS: dict[str, type[Target]] = {
    each.kind: each for each in (Classes, Numbers, Labels, Ordered, Survival, Cox, Several)
}


def from_json(values: Mapping[str, Any]) -> Target:
    """Make a target of what `Target.to_json` returned.

    Raises:
        ConfigError: it is not one.
    """
    fields = dict(values)
    kind = KINDS.get(str(fields.pop("kind", None)))
    try:
        if kind is None:
            raise ValueError(f"there are {', '.join(KINDS)}")
        return kind.of_json(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError([f"{dict(values)!r} describes no target: {error}"]) from error


def known(num_classes: int | None, shape: tuple[int, ...] = ()) -> Target:
    """Return the target of data that say no more than their number of classes, or that they have none."""
    return Numbers(shape) if num_classes is None else Classes(num_classes, shape)


__all__ = [
    "KINDS",
    "Classes",
    "Cox",
    "Labels",
    "Numbers",
    "Ordered",
    "Part",
    "Several",
    "Survival",
    "Target",
    "from_json",
    "known",
]
