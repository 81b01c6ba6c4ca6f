"""Sort what a caller gives: what is an object, what can be written to a file, and which table a setting belongs to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.targets import Survival, Target
from coterie.evaluation.metrics import Metric, add
from coterie.experiment.config import TABLES
from coterie.experiment.resolve import flags

OWN_LOSS = "own-loss"  # in place of the path of a loss that has none


class Objects(NamedTuple):
    """Hold what was given in Python, and not by name."""

    target: Target | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    metrics: tuple[str, ...]  # names, of those that were given by name, too

    def recorded(self) -> dict[str, Any]:
        """Return the settings that say in a run's folder what they were, so that it is resumed with the same."""
        found: dict[str, Any] = {} if self.loss is None else {"loss": path_of(self.loss) or OWN_LOSS}
        if self.target is not None:
            found |= {"task": self.target.kind}
            found |= {"horizons": list(self.target.times)} if isinstance(self.target, Survival) else {}
        return found


def path_of(thing: Any) -> str | None:
    """Return the import path of a function, or None if it has none: a script's own cannot be imported later."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    found = module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is thing
    return f"{module}:{name}" if found else None


def take_objects(settings: Mapping[str, Any]) -> tuple[Objects, dict[str, Any]]:
    """Divide settings into what is an object, and what can be written to a file."""
    rest = dict(settings)
    target, loss, metric = (rest.pop(key, None) for key in ("target", "loss", "metric"))
    named = [metric] if isinstance(metric, str | Metric) else list(metric or ())
    rest |= {"target": target} if isinstance(target, str) else {}
    rest |= {"loss": loss} if isinstance(loss, str) else {}
    rest["metric"] = [each if isinstance(each, str) else each.path for each in named] or None
    mine = None if isinstance(target, str) else target, None if isinstance(loss, str) else loss
    problems = [] if isinstance(mine[0], Target | None) else ["target: give a target of coterie.targets, or its column"]
    problems += (
        [] if mine[1] is None or callable(mine[1]) else ["loss: give a function of outputs and targets, or a name"]
    )
    if problems:
        raise ConfigError(problems)
    try:
        metrics = add(named)
    except ConfigError:
        if not all(isinstance(each, str) for each in named):
            raise
        metrics = ()  # `resolve` finds this again, and says it with all that is wrong
    return Objects(*mine, metrics), rest


def sort_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Move hyper-parameters of the method and of the optimisers to their tables; keys of `Config` stay."""
    of_tables = flags(method, settings.get("optimizer"))
    tables = {flag[2:].replace("-", "_"): place for flag, place in of_tables.items()}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None:
            continue
        if key in TABLES and isinstance(value, Mapping):
            values[key] = {**values.get(key, {}), **value}
        elif key in tables:
            table, name = tables[key]
            values[table] = {**values.get(table, {}), name: value}
        else:
            values[key] = value
    return values
