"""A method with other options: where its options come into play, and every option changed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
from pydantic import TypeAdapter

from coterie.core.optimizers import SGD
from coterie.methods.fields import AnyMethod, Hyper, hyper_parameters
from coterie.testing.kit import LawBroken


def changed(method: AnyMethod, **options: Any) -> AnyMethod:
    """Return the method with some of its fields changed."""
    return dataclasses.replace(method, **options)  # type: ignore[type-var]


def plain(method: AnyMethod) -> AnyMethod:
    """Return the method with SGD of step size 0.05, if it has an optimiser: so rounding stays as small as it is.

    Adam divides tiny gradients by their own size, and rounding with them.
    """
    return changed(method, optimizer=SGD(0.05)) if hasattr(method, "optimizer") else method


def contexts(method: AnyMethod) -> list[AnyMethod]:
    """Return the method as it is, and with each set of options in its `law_contexts`."""
    return [method, *(changed(method, **options) for options in method.law_contexts)]


def variants(method: AnyMethod) -> Iterator[tuple[str, AnyMethod]]:
    """Yield the method with one hyper-parameter changed, for every one of them and every choice it offers.

    Yields:
        (what was changed, as "name = value", and the method); the optimiser's hyper-parameters come last.
    """
    for hyper in hyper_parameters(type(method)):
        for value in _others(hyper, getattr(method, hyper.name)):
            yield f"{hyper.name} = {value}", changed(method, **{hyper.name: value})
    optimizer: Any = getattr(method, "optimizer", None)
    if optimizer is not None:
        for hyper in hyper_parameters(type(optimizer)):
            for value in _others(hyper, getattr(optimizer, hyper.name)):
                other = dataclasses.replace(optimizer, **{hyper.name: value})
                yield f"{hyper.name} = {value}", changed(method, optimizer=other)


def settings(method: AnyMethod, numbers: bool) -> Iterator[tuple[str, AnyMethod]]:
    """Settings that a user may well choose: the contexts, every other choice of every option, and other numbers.

    Unlike `variants`, this goes to no extremes. A number is halved, or doubled where its half is not allowed; a whole
    number becomes one more. An option that is a word by default (`auto`) becomes no number, since nothing says which
    one would do. The optimiser is left as it is.

    Args:
        method: the method.
        numbers: whether options that are numbers are changed too, beside the defaults and in each context.

    Yields:
        (what was changed, as "name = value, name = value", and the method), each once.
    """
    seen: set[str] = set()
    for options in ({}, *method.law_contexts):
        context, own = changed(method, **options), _told(options)
        if own and own not in seen:
            seen.add(own)
            yield own, context
        for hyper in hyper_parameters(type(method)):
            value = getattr(context, hyper.name)
            others = [choice for choice in hyper.choices if choice != value] if not options else []
            others += [not value] if isinstance(value, bool) and not options else []
            if numbers and hyper.numeric and not isinstance(value, bool):
                others += _nearby(hyper, value)
            for other in others:
                name = _told({**options, hyper.name: other})
                if name not in seen:
                    seen.add(name)
                    yield name, changed(context, **{hyper.name: other})


def _told(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


def _nearby(hyper: Hyper, value: Any) -> list[Any]:
    """Another number that is allowed and not far away; [] if there is none."""
    if isinstance(value, int):
        return _first_allowed(hyper, [value + 1, value - 1])
    if not isinstance(value, float):
        return []
    return _first_allowed(hyper, [value / 2, 2 * value] if value else [0.1])


def _first_allowed(hyper: Hyper, tries: list[Any]) -> list[Any]:
    for other in tries:
        try:
            return [TypeAdapter(hyper.type).validate_python(other)]
        except pydantic.ValidationError:
            continue
    return []


def _others(hyper: Hyper, value: Any) -> list[Any]:
    """Values that a hyper-parameter may have instead: every other choice, and one other number."""
    if isinstance(value, bool):
        return [not value]
    others: list[Any] = [choice for choice in hyper.choices if choice != value]
    if hyper.numeric:
        number = value if isinstance(value, int | float) else 1.0
        tries = [number + 1] if isinstance(value, int) else [2 * number + 0.1, number / 2, number]
        others += _first_allowed(hyper, tries)
    if not others:
        raise LawBroken(f"no other value found for {hyper.name} = {value}")
    return others
