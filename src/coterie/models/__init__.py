"""The models by name. Each is built from the shape of the data."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from coterie.core.errors import ConfigError
from coterie.core.extensions import find, with_options
from coterie.models.alexnet import alexnet_bn
from coterie.models.convolutions import cnn, cnn2, cnn_bn, lenet
from coterie.models.lstm import lstm
from coterie.models.perceptrons import dnn, linear, mlp
from coterie.models.resnet import resnet18
from coterie.models.tabular import tabular
from coterie.models.transformer import transformer

Factory = Callable[[tuple[int, ...], int], nn.Module]  # (shape of one input, number of outputs) -> model

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "linear": linear,
    "dnn": dnn,
    "tabular": tabular,
    "cnn": cnn,
    "cnn-bn": cnn_bn,
    "cnn2": cnn2,
    "lenet": lenet,
    "alexnet-bn": alexnet_bn,
    "resnet18": resnet18,
    "lstm": lstm,
    "transformer": transformer,
}


def find_model(name: str) -> Factory:
    """Find a model by name or import path `package.module:factory`, with options after colons (`cnn:features=128`).

    Raises:
        ConfigError: There is no such model, or it does not have these options.
    """
    first, colon, rest = name.partition(":")
    if first in MODELS and colon and "=" not in rest and importlib.util.find_spec(first):  # the user's own cnn.py
        return find("model", name, {})
    factory, words = with_options("model", name, MODELS)
    return functools.partial(factory, **_options(name, factory, words)) if words else factory


def options_of(model: str) -> dict[str, Any]:
    """Return the options of one of `MODELS` with their defaults."""
    return _defaults(MODELS[model])


def _defaults(factory: Callable[..., nn.Module]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def _options(name: str, factory: Callable[..., nn.Module], words: list[str]) -> dict[str, Any]:
    return options_from_words(f"model '{name}'", _defaults(factory), words)


def options_from_words(what: str, known: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Read words such as `hidden=5` as options.

    Args:
        what: what they are the options of, for messages: "model 'mlp:hidden=5'".
        known: the options that there are, with their defaults, of which they have the types.
        words: the words.

    Raises:
        ConfigError: there is no such option, or its value is none; it lists every problem.
    """
    problems, values = [], dict[str, Any]()
    for word in words:
        key, equals, text = word.partition("=")
        if key not in known:
            has = f"its options are {', '.join(f'{k}={_typed(v)}' for k, v in known.items())}"
            problems.append(f"{what} has no option '{key}'; {has if known else 'it has none'}")
            continue
        try:
            values[key] = _read(text if equals else "", known[key])
        except (KeyError, ValueError):
            problems.append(f"{what}: {key} = '{text}': give it as in {key}={_typed(known[key])}")
    if problems:
        raise ConfigError(problems)
    return values


def _read(text: str, like: Any) -> Any:
    """Parse `text` as a value of the type of `like`; numbers are at least 0, and slashes separate several."""
    if isinstance(like, tuple):
        return tuple(_read(part, like[0]) for part in text.split("/"))
    if isinstance(like, bool):
        return {"true": True, "false": False}[text]
    value = type(like)(text)
    if not isinstance(value, str) and not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _typed(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


__all__ = ["MODELS", "Factory", "cnn", "dnn", "find_model", "linear", "mlp", "options_of", "tabular"]
