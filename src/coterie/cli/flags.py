"""Generates the flags for the settings of a run and of the optimisers, from the classes that define them.

A method's own flags cannot be declared before the method is known; `request.py` parses them from the remaining words.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from coterie.cli.panels import InPanels
from coterie.core.optimizers import OPTIMIZERS
from coterie.experiment.config import TABLES, Config
from coterie.methods.fields import Hyper
from coterie.methods.named import optimizer_fields

F = TypeVar("F", bound=Callable[..., Any])

ALLOW_UNKNOWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
USAGE = "[FILE.toml] [OPTIONS]"
# Of a command `with_settings`, for the decorator that Typer makes commands with.
WITH_SETTINGS: dict[str, Any] = {"cls": InPanels, "context_settings": ALLOW_UNKNOWN_FLAGS, "options_metavar": USAGE}
ONCE_FOR_EACH = {"callbacks": "--callback", "sections": "--section"}  # lists, of which a flag gives one
_literal: Any = Literal
OPTIMIZER = Hyper(
    "optimizer", _literal[tuple(OPTIMIZERS)], None, "optimiser of the clients, or your own as package.module:Name"
)


def settings() -> list[Hyper]:
    """Return the fields of `Config` that are flags."""
    return [
        Hyper(name, Annotated[_without_none(field.annotation), field], field.default, field.description or "")
        for name, field in Config.model_fields.items()
        if name not in TABLES
    ]


def optimizer_settings() -> list[Hyper]:
    """Return the choice of an optimiser and, once each, the settings of all optimisers."""
    return [OPTIMIZER, *(Hyper(each.name, each.type, None, each.help) for each in optimizer_fields())]


def with_settings(*without: str) -> Callable[[F], F]:
    """Give a command one option for every setting except those in `without`; it receives them as `**settings`."""

    def decorate(command: F) -> F:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        made = [_option(each) for each in [*settings(), *optimizer_settings()] if each.name not in without]
        parameters = [own[0], *made, *own[1:]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def format_default(value: Any) -> str:
    """Format a default value as a user would type it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def is_switch(hyper: Hyper) -> bool:
    """Return whether the flag takes no value (--flag and --no-flag)."""
    return _base(hyper) is bool


def _option(hyper: Hyper) -> inspect.Parameter:
    limits = hyper.allowed.partition("number ")[2]
    notes = [
        *([limits] if limits else []),
        *([] if hyper.default is None else [f"default: {format_default(hyper.default)}"]),
    ]
    words = hyper.help + (f" ({', '.join(notes)})" if notes else "")
    flag = ONCE_FOR_EACH.get(hyper.name, hyper.flag)
    names = f"{flag}/--no-{flag[2:]}" if is_switch(hyper) else flag
    option = typer.Option(names, help=words, metavar=None if is_switch(hyper) else _metavar(hyper))
    kind: Any = bool | None if is_switch(hyper) else list[str] | None if _base(hyper) == list[str] else str | None
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(hyper.name, place, default=None, annotation=Annotated[kind, option])


def _metavar(hyper: Hyper) -> str:
    words = {
        int: "INTEGER",
        float: "NUMBER",
        str: "TEXT",
        list[str]: "LIST",
        list[float]: "LIST",
        Any: "NAME[:OPTIONS]",
    }
    return words.get(_base(hyper)) or hyper.allowed.replace(" ", "")


def _base(hyper: Hyper) -> Any:
    return get_args(hyper.type)[0] if get_origin(hyper.type) is Annotated else hyper.type


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    return next(part for part in get_args(annotation) if part is not types.NoneType)
