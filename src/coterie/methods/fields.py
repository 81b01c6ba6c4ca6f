"""Hyper-parameters: a method's fields with their types, limits and descriptions, for flags, files and documents."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from coterie.core.errors import ConfigError
from coterie.core.extensions import find, suggest
from coterie.core.method import Method
from coterie.core.optimizers import Optimizer
from coterie.core.search import Search, Unsearched
from coterie.methods import METHODS

AnyMethod = Method[Any, Any, Any, Any]
# Settings of a run that some methods have an option of the same name beside. Theirs is then `method_epsilon`, as a
# keyword and a flag; in the table [hyper] of a file, an option has its own name.
TAKEN = frozenset({"privacy", "epsilon", "delta", "noise", "clip", "models", "levels"})


@dataclasses.dataclass(frozen=True)
class Hyper:
    """One hyper-parameter of a method or an optimiser."""

    name: str
    type: Any  # with its limits, as pydantic understands them
    default: Any
    help: str
    search: Search | Unsearched | None = None  # where `coterie tune` looks; None: by its type
    taken: bool = False  # a setting of the run has this name

    @property
    def key(self) -> str:
        """Its name among the settings of a run."""
        return f"method_{self.name}" if self.taken else self.name

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words that it may be, from the Literal in its type; empty if it has none."""
        literals = [part for part in _alternatives(self.type) if get_origin(part) is Literal]
        return tuple(choice for literal in literals for choice in get_args(literal))

    @property
    def numeric(self) -> bool:
        """Whether it may be a number."""
        return any(part in (int, float) for part in _alternatives(self.type))

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Its limits, whether they are included or not; None where there is none."""
        limits = _limits(self.type)
        low = [getattr(limit, name) for limit in limits for name in ("gt", "ge") if hasattr(limit, name)]
        high = [getattr(limit, name) for limit in limits for name in ("lt", "le") if hasattr(limit, name)]
        return (max(low) if low else None), (min(high) if high else None)

    @property
    def allowed(self) -> str:
        """What it may be, in words: 'a number > 0', 'omega | samples | uniform', 'auto | a number > 0'."""
        words = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
        choices = [*map(str, self.choices), *(words[part] for part in _alternatives(self.type) if part in words)]
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = []
        for limit in _limits(self.type):
            limits += [f"{sign} {getattr(limit, name):g}" for name, sign in signs.items() if hasattr(limit, name)]
        return " ".join([" | ".join(choices), *limits])


def _alternatives(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, without its limits."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in _alternatives(each)]
    return [annotation]


def _limits(annotation: Any) -> list[Any]:
    """Return the limits of a type and of its alternatives, as pydantic keeps them."""
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        limits = []
        for extra in extras:
            limits += extra.metadata if isinstance(extra, FieldInfo) else [extra]
        return limits + _limits(base)
    if get_origin(annotation) in (Union, types.UnionType):
        return [limit for each in get_args(annotation) for limit in _limits(each)]
    return []


def hyper_parameters(cls: type) -> list[Hyper]:
    """Return the fields of a method or optimiser class, except the optimiser itself."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if hints[field.name] is Optimizer:
            continue
        extras = get_args(hints[field.name])[1:] if get_origin(hints[field.name]) is Annotated else ()
        words = next((e.description for e in extras if getattr(e, "description", None)), "")
        default = field.default if field.default is not dataclasses.MISSING else None
        marker = next((each for each in extras if isinstance(each, Search | Unsearched)), None)
        found.append(Hyper(field.name, hints[field.name], default, words, marker, field.name in TAKEN))
    return found


def find_method(name: str) -> tuple[type[AnyMethod] | None, list[str]]:
    """Find a method by its name, which an installed package may have added, or by its import path.

    Returns:
        The class, or None, and problems: sentences that say why there is none, and what to do.
    """
    if name in METHODS:
        return METHODS[name], []
    try:
        found: Any = find("method", name, METHODS)
    except ConfigError as error:
        return None, error.problems
    if dataclasses.is_dataclass(found) and isinstance(found, type) and issubclass(found, Method):
        return found, []
    return None, [f"method '{name}' is not a dataclass that extends coterie.Method"]


def build(cls: Any, values: Mapping[str, Any], owner: str, **fixed: Any) -> tuple[Any, list[str]]:
    """Build a method or an optimiser from values that may be wrong.

    Args:
        cls: its class.
        values: hyper-parameters by name, which are checked against the fields of `cls`.
        owner: what messages call it.
        **fixed: further arguments, which are not checked.

    Returns:
        An instance, or None if there are problems; and all problems, in sentences.
    """
    known = {hyper.name: hyper for hyper in hyper_parameters(cls)}
    problems, clean = [], {}
    for name, value in values.items():
        if name not in known:
            problems.append(f"{owner} has no '{name}'{suggest(name, known)}; it has {', '.join(known) or 'none'}")
            continue
        try:
            clean[name] = TypeAdapter(known[name].type).validate_python(value)
        except pydantic.ValidationError:
            problems.append(f"{name} = {value!r}: {owner} needs {known[name].allowed}")
    return (None if problems else cls(**clean, **fixed)), problems


def values_of(instance: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a method or an optimiser by name."""
    return {hyper.name: getattr(instance, hyper.name) for hyper in hyper_parameters(type(instance))}


def with_optimizer(method: AnyMethod, optimizer: Optimizer) -> AnyMethod:
    """Return the method with another optimiser, and with whatever is wrapped around its functions."""
    made = copy.copy(method)
    object.__setattr__(made, "optimizer", optimizer)
    return made


def name_of(method: AnyMethod) -> str:
    """Return the name by which `find_method` finds the method's class."""
    for name, cls in METHODS.items():
        if type(method) is cls:
            return name
    return f"{type(method).__module__}:{type(method).__qualname__}"
