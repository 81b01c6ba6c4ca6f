"""A method's fields as hyper-parameters: their types, limits and words, for flags, files, errors and documents."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from coterie.local import OPTIMIZERS, Optimizer
from coterie.method import Method
from coterie.methods import METHODS
from coterie.models import import_path

AnyMethod = Method[Any, Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Hyper:
    name: str
    type: Any  # with its limits, as pydantic understands them
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words it may be: those of its Literal, alone or beside a number."""
        return tuple(choice for part in _parts(self.type) if get_origin(part) is Literal for choice in get_args(part))

    @property
    def numeric(self) -> bool:
        return any(part in (int, float) for part in _parts(self.type))

    @property
    def allowed(self) -> str:
        """In words: 'a number > 0', 'omega | samples | uniform', 'auto | a number > 0'."""
        words = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
        told = [*map(str, self.choices), *(words[part] for part in _parts(self.type) if part in words)]
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [f"{signs[s]} {getattr(each, s):g}" for each in _limits(self.type) for s in signs if hasattr(each, s)]
        return " ".join([" | ".join(told), *limits])


def _parts(annotation: Any) -> list[Any]:
    """The alternatives of a type, without its limits."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in _parts(each)]
    return [annotation]


def _limits(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        base, *extras = get_args(annotation)
        own = [limit for extra in extras for limit in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return own + _limits(base)
    if get_origin(annotation) in (Union, types.UnionType):
        return [limit for each in get_args(annotation) for limit in _limits(each)]
    return []


def hyper_parameters(cls: type) -> list[Hyper]:
    """The fields of a method or optimiser class, except the optimiser itself."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if hints[field.name] is Optimizer:
            continue
        extras = get_args(hints[field.name])[1:] if get_origin(hints[field.name]) is Annotated else ()
        words = next((e.description for e in extras if getattr(e, "description", None)), "")
        default = field.default if field.default is not dataclasses.MISSING else None
        found.append(Hyper(field.name, hints[field.name], default, words))
    return found


def find_method(name: str) -> tuple[type[AnyMethod] | None, list[str]]:
    """(the class, problems): a registered method, or a user's own by import path `package.module:Class`."""
    if name in METHODS:
        return METHODS[name], []
    if ":" in name:
        found: Any = import_path(name, "method")
        if dataclasses.is_dataclass(found) and isinstance(found, type) and issubclass(found, Method):
            return found, []
        return None, [f"method '{name}' is not a dataclass that extends coterie.Method"]
    return None, [f"there is no method '{name}'{suggest(name, METHODS)}; there are {', '.join(METHODS)}"]


def build(cls: Any, values: Mapping[str, Any], owner: str, **fixed: Any) -> tuple[Any, list[str]]:
    """(an instance, problems): `values` are checked against the fields of `cls`, and all problems are told."""
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


def build_optimizer(values: Mapping[str, Any]) -> tuple[Optimizer | None, list[str]]:
    name = str(values.get("name", "sgd"))
    if name not in OPTIMIZERS:
        return None, [f"there is no optimizer '{name}'{suggest(name, OPTIMIZERS)}; there are {', '.join(OPTIMIZERS)}"]
    rest = {key: value for key, value in values.items() if key != "name"}
    return build(OPTIMIZERS[name], rest, f"optimizer {name}")


def suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def values_of(instance: Any) -> dict[str, Any]:
    return {hyper.name: getattr(instance, hyper.name) for hyper in hyper_parameters(type(instance))}


def name_of(method: AnyMethod) -> str:
    for name, cls in METHODS.items():
        if type(method) is cls:
            return name
    return f"{type(method).__module__}:{type(method).__qualname__}"
