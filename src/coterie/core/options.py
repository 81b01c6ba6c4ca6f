"""Options as they are typed after a name: `dirichlet:0.3:min=20`, `my_package.parts:by_scanner:3:noise=0.1`.

`read_words` reads them, in their order or by name, whatever they belong to. Those of a function or class are the
parameters that the library does not fill in itself. They are read by their annotations or else by the types of their
defaults: numbers, text, true or false, and several values between slashes. Without either, what looks like a number
is one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

import pydantic
from pydantic import Field, TypeAdapter

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest

Parameter = inspect.Parameter
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
# What an option without an annotation may be, the first that fits.
NUMBER = Annotated[int | float, Field(union_mode="left_to_right")]  # its default is a whole number
NUMBER_OR_TEXT = Annotated[int | float | str, Field(union_mode="left_to_right")]  # it has none


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
    readers = {name: functools.partial(_read, each) for name, each in options.items()}
    needed = [name for name, each in options.items() if each.default is Parameter.empty]
    values, problems = read_words(f"{kind} '{text}'", words, readers, usage(text, words, options), needed=needed)
    if problems:
        raise ConfigError(problems)
    return functools.partial(function, **values) if values else function


def read_words(
    what: str,
    words: Sequence[str],
    readers: Mapping[str, Callable[[str], Any]],
    how: str,
    *,
    places: Sequence[str] | None = None,
    needed: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Read the words after a name: `key=value`, or values in the order of the options.

    Args:
        what: whose options they are, for messages: "partition 'dirichlet:0.3'".
        words: the words.
        readers: the options that there are, and what reads the text of each; it raises `ValueError`.
        how: how they are written, for messages.
        places: options that may be given without their names; by default all.
        needed: options that must be given.

    Returns:
        The values of the options that are given, and everything that is wrong, in sentences.
    """
    order, problems, values = list(readers) if places is None else list(places), list[str](), dict[str, Any]()
    for place, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not equals:
            key, text = next(iter(order[place:]), ""), word
        if key not in readers:
            wrong = f"has no option '{key}'{suggest(key, readers)}" if equals else f"has an extra value '{word}'"
            problems.append(f"{what} {wrong}; write {how}")
        elif key in values:
            problems.append(f"{what} has {key} twice")
        else:
            try:
                values[key] = readers[key](text)
            except ValueError as error:
                problems.append(f"{what}: {key} = '{text}': {_why(error)}")
                values[key] = None
    if missing := [key for key in needed if key not in values]:
        problems.append(f"{what} needs {' and '.join(missing)}: write {how}")
    return values, problems


def _why(error: ValueError) -> str:
    """Return a reader's complaint as the end of a sentence."""
    told = str(error)
    if isinstance(error, pydantic.ValidationError):
        told = error.errors()[0]["msg"].removeprefix("Value error, ")
    return f"{told[:1].lower()}{told[1:]}"


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
        hint = NUMBER if type(parameter.default) is int else type(parameter.default) if known else NUMBER_OR_TEXT
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
