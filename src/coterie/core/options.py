"""Options of a user's function or class, as they are typed after its name: `my_package.parts:by_scanner:3:noise=0.1`.

They are the parameters that the library does not fill in itself, in their order or by name, and are read by their
annotations or else by the types of their defaults: numbers, text, true or false, and several values between slashes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args, get_origin

import pydantic
from pydantic import TypeAdapter

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest

Parameter = inspect.Parameter
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters that can be given by name; none for what does not tell."""
    try:
        try:
            found = inspect.signature(function, eval_str=True)
        except NameError:  # an annotation that is known to a type checker only
            found = inspect.signature(function)
    except (TypeError, ValueError):
        return {}
    return {name: each for name, each in found.parameters.items() if each.kind in NAMED}


def with_given_options(
    kind: str, text: str, function: Callable[..., Any], words: Sequence[str], given: Collection[str] = ()
) -> Callable[..., Any]:
    """Return `function` with the options that were typed after its name.

    Args:
        kind: what messages call it: "partition", "callback".
        text: all that was typed.
        function: a function or a class.
        words: the options: `key=value`, or values in the order of the parameters.
        given: parameters that the library fills in.

    Raises:
        ConfigError: an option is unknown, missing or of the wrong kind; it lists every problem.
    """
    if not callable(function):
        raise ConfigError([f"{kind} '{text}' is a {type(function).__name__}, not a function or a class"])
    options = {name: each for name, each in parameters(function).items() if name not in given}
    places, problems, values = list(options), list[str](), dict[str, Any]()
    how = usage(text, words, options)
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if not equals:
            key, value = next(iter(places[place:]), ""), word
        if key not in options:
            wrong = f"has no option '{key}'{suggest(key, options)}" if equals else f"has an extra value '{word}'"
            problems.append(f"{kind} '{text}' {wrong}; write {how}")
        elif key in values:
            problems.append(f"{kind} '{text}' has {key} twice")
        else:
            try:
                values[key] = _read(options[key], value)
            except pydantic.ValidationError as error:
                words_ = error.errors()[0]["msg"].removeprefix("Value error, ")
                problems.append(f"{kind} '{text}': {key} = '{value}': {words_[0].lower()}{words_[1:]}")
                values[key] = None
    missing = [name for name, each in options.items() if each.default is Parameter.empty and name not in values]
    if missing:
        problems.append(f"{kind} '{text}' needs {' and '.join(missing)}: write {how}")
    if problems:
        raise ConfigError(problems)
    return functools.partial(function, **values) if values else function


def usage(text: str, words: Sequence[str], options: dict[str, Parameter]) -> str:
    """Return how the options are written: `my_package.parts:by_scanner:SCANNERS[:noise=0.1]`."""
    name = ":".join(text.split(":")[: len(text.split(":")) - len(words)])
    needed = [key.upper() for key, each in options.items() if each.default is Parameter.empty]
    others = [f"[:{key}={shown(each.default)}]" for key, each in options.items() if each.default is not Parameter.empty]
    return ":".join([name, *needed]) + "".join(others)


def shown(value: Any) -> str:
    """Return a value as it is typed."""
    if isinstance(value, tuple | list):
        return "/".join(map(shown, value))
    return "..." if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read(parameter: Parameter, text: str) -> Any:
    hint = parameter.annotation
    if hint is Parameter.empty or isinstance(hint, str):
        known = parameter.default is not Parameter.empty and parameter.default is not None
        hint = type(parameter.default) if known else str
        if hint in (tuple, list) and parameter.default:
            hint = list[type(parameter.default[0])]  # type: ignore[misc]
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
    except pydantic.errors.PydanticUserError:  # a type that text cannot be read as
        return text
    return adapter.validate_python(text.split("/") if _several(hint) else text)


def _several(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return origin in (tuple, list, set, frozenset) or any(_several(each) for each in get_args(hint) if each is not ...)
