"""What is searched: the hyper-parameters of a method, each with its range.

A range comes from the marker beside a method's field (`coterie.core.search`), else from its type: a choice of words is
searched among all of them, and a number between its limits if it has two. Of an optimiser, the step size is searched.
The user may name others, or other ranges: "lam=0.1..10", "lr=1e-3..1e-1:linear", "model=mlp|linear", or just "prior".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest
from coterie.core.search import Search, Unsearched
from coterie.core.wrapped import plain, with_plain
from coterie.experiment.setup import Setup
from coterie.methods.fields import AnyMethod, Hyper, build, hyper_parameters
from coterie.models import find_model

MODEL = "model"  # the one setting beside the hyper-parameters that can be searched
OPEN_END = 0.01  # how far from an end that is not allowed a search stays, as a share of the range


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}" + (" (log)" if self.log else "")

    def holds(self, value: Any) -> bool:
        """Tell whether a value is in the range."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Options:
    """One of several words or numbers."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.values))

    def holds(self, value: Any) -> bool:
        """Tell whether a value is among them."""
        return value in self.values


Range = Numbers | Options
Space = dict[str, Range]  # by the name of the hyper-parameter
Values = dict[str, Any]


def space_of(method: AnyMethod, fixed: Sequence[str] = (), wanted: Mapping[str, Range | None] | None = None) -> Space:
    """Return the ranges in which a method is searched.

    Args:
        method: the method, whose hyper-parameters are the values that are tried first.
        fixed: names that the user has given a value, and that are therefore not searched.
        wanted: ranges that the user asks for, by name; None: the range that the field declares. Names that the method
            does not have are passed over.

    Raises:
        ConfigError: a range that is asked for does not suit the field, or there is none.
    """
    wanted = wanted or {}
    own, of_optimizer = _fields(method)
    space: Space = {}
    problems: list[str] = []
    for name, hyper in {**of_optimizer, **own}.items():
        declared = range_of(hyper, by_type=name in own)
        if name in wanted:
            found = wanted[name] or declared or _anyhow(hyper)
            if found is None:
                problems.append(f"{name} has no range of its own: give one, such as --search {name}=0.1..10")
                continue
            found = _as_whole(found, hyper)
            problems += _misfits(name, found, type(method) if name in own else type(_optimizer(method)))
            space[name] = found
        elif declared is not None and name not in fixed:
            space[name] = declared
    if (models := wanted.get(MODEL)) is not None:
        space[MODEL] = models
    if problems:
        raise ConfigError(problems)
    return space


def check_names(wanted: Mapping[str, Range | None], methods: Mapping[str, AnyMethod]) -> None:
    """Refuse names that no method has.

    Raises:
        ConfigError: it names them all.
    """
    known = [name for method in methods.values() for fields in _fields(method) for name in fields]
    problems = [
        f"--search {name}: none of {', '.join(methods)} has a '{name}'{suggest(name, known)}; "
        f"there are {', '.join(dict.fromkeys([*known, MODEL]))}"
        for name in wanted
        if name not in known and name != MODEL
    ]
    if MODEL in wanted and not isinstance(wanted[MODEL], Options):
        problems.append(f"--search {MODEL}: name the models, such as --search {MODEL}=mlp|linear")
    for name in getattr(wanted.get(MODEL), "values", ()):
        try:
            find_model(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def parse_wanted(texts: Sequence[str]) -> dict[str, Range | None]:
    """Parse what the user asks to search: "lam=0.1..10", "lr=1e-3..1:linear", "start=w|theta", "prior".

    Raises:
        ConfigError: a text cannot be understood, or a range is empty; it lists every problem.
    """
    found: dict[str, Range | None] = {}
    problems: list[str] = []
    for text in texts:
        name, equals, words = (part.strip() for part in text.partition("="))
        key = name.lstrip("-").replace("-", "_")
        try:
            found[key] = _parse_range(words) if equals else None
        except ValueError as error:
            problems.append(f"--search {text}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def defaults_of(setup: Setup, space: Space) -> Values:
    """Return the values that a setup has for what is searched."""
    own, _ = _fields(setup.method)
    optimizer = _optimizer(setup.method)
    return {
        name: setup.config.model if name == MODEL else getattr(setup.method if name in own else optimizer, name)
        for name in space
    }


def with_values(method: AnyMethod, values: Values) -> AnyMethod:
    """Return the method with other hyper-parameters, of its own and of its optimiser."""
    own, _ = _fields(method)
    mine = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own and name != MODEL}
    if rest:
        around: Any = method.optimizer  # type: ignore[attr-defined]
        mine["optimizer"] = with_plain(around, dataclasses.replace(plain(around), **rest))  # type: ignore[type-var]
    return dataclasses.replace(method, **mine)  # type: ignore[type-var]


def in_words(values: Values) -> str:
    """Format values as 'lr 0.05, lam 1'."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in values.items()) or "as it is"


def format_value(value: Any) -> str:
    """Format one value with as many digits as matter."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _fields(method: AnyMethod) -> tuple[dict[str, Hyper], dict[str, Hyper]]:
    """Return the method's own hyper-parameters, and those of its optimiser that have other names."""
    own = {hyper.name: hyper for hyper in hyper_parameters(type(method))}
    optimizer = _optimizer(method)
    others = hyper_parameters(type(optimizer)) if optimizer is not None else []
    return own, {hyper.name: hyper for hyper in others if hyper.name not in own}


def _optimizer(method: AnyMethod) -> Any:
    """Return the method's optimiser, without what is wrapped around it; None if it has none."""
    optimizer = getattr(method, "optimizer", None)
    return None if optimizer is None else plain(optimizer)


def range_of(hyper: Hyper, *, by_type: bool) -> Range | None:
    """Return the range that a field declares or, if `by_type`, that its type implies; None if it is not searched."""
    if isinstance(hyper.search, Search):
        marker = hyper.search
        return Numbers(marker.low, marker.high, marker.log, whole=_is_whole(hyper))
    if isinstance(hyper.search, Unsearched) or not by_type:
        return None
    return _anyhow(hyper)


def _anyhow(hyper: Hyper) -> Range | None:
    """Return the range that a type implies: all its words, or the numbers between two limits."""
    if hyper.choices and not hyper.numeric and len(hyper.choices) > 1:
        return Options(hyper.choices)
    low, high = hyper.bounds
    if hyper.choices or not hyper.numeric or low is None or high is None:
        return None
    if _is_whole(hyper):
        return Numbers(low, high, log=False, whole=True)
    room = OPEN_END * (high - low)
    ends = [end if _allows(hyper, end) else end + step for end, step in ((low, room), (high, -room))]
    return Numbers(ends[0], ends[1], log=False)


def _allows(hyper: Hyper, value: Any) -> bool:
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(hyper.type).validate_python(value)
    except ValidationError:
        return False
    return True


def _is_whole(hyper: Hyper) -> bool:
    return not _allows(hyper, 1.5) and not _allows(hyper, 0.5) and hyper.numeric


def _as_whole(found: Range, hyper: Hyper) -> Range:
    return dataclasses.replace(found, whole=_is_whole(hyper)) if isinstance(found, Numbers) else found


def _misfits(name: str, found: Range, cls: type) -> list[str]:
    """Return what is wrong with the ends, or the words, of a range that the user gave."""
    tried = found.values if isinstance(found, Options) else (found.low, found.high)
    if isinstance(found, Numbers) and found.whole and any(value % 1 for value in tried):
        return [f"--search {name}={found}: give whole numbers"]
    whole = isinstance(found, Numbers) and found.whole
    problems: list[str] = []
    for value in tried:
        problems += build(cls, {name: int(value) if whole else value}, cls.__name__)[1]
    return [f"--search {problem}" for problem in problems]


def _parse_range(words: str) -> Range:
    if "|" in words:
        values = tuple(_number(each) for each in words.split("|") if each.strip())
        if len(set(values)) < 2:
            raise ValueError("give at least two different values, separated by |")
        return Options(values)
    span, _, scale = words.partition(":")
    low, dots, high = span.partition("..")
    ends = [_number(low), _number(high)]
    if not dots or not all(isinstance(end, int | float) and math.isfinite(end) for end in ends):
        raise ValueError("give a range of numbers, such as 0.1..10, or values, such as a|b")
    if not ends[0] < ends[1]:
        raise ValueError("the range is empty: give the smaller number first")
    if scale not in ("", "log", "linear"):
        raise ValueError(f"'{scale}' is no scale: write :log or :linear, or nothing")
    if scale == "log" and ends[0] <= 0:
        raise ValueError("a log range begins above 0")
    wide = ends[0] > 0 and ends[1] / ends[0] >= 10
    return Numbers(float(ends[0]), float(ends[1]), log=scale == "log" or (not scale and wide))


def _number(text: str) -> Any:
    """Return a number where the text is one, and else the text."""
    text = text.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
