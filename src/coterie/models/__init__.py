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
from coterie.core.options import read_words, shown
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
    options = options_from_words("model", name, _defaults(factory), words)
    return functools.partial(factory, **options) if options else factory


def options_of(model: str) -> dict[str, Any]:
    """Return the options of one of `MODELS` with their defaults."""
    return _defaults(MODELS[model])


def _defaults(factory: Callable[..., nn.Module]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def options_from_words(kind: str, text: str, known: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Read words such as `hidden=5` as options.

    Args:
        kind: of what, for messages: "model".
        text: all that was typed.
        known: the options that there are, with their defaults, of which they have the types.
        words: the words.

    Raises:
        ConfigError: there is no such option, or its value is none; it lists every problem.
    """
    readers = {key: functools.partial(_read, value) for key, value in known.items()}
    how = ":".join(text.split(":")[: -len(words) or None]) + "".join(f"[:{k}={shown(v)}]" for k, v in known.items())
    values, problems = read_words(f"{kind} '{text}'", words, readers, how, places=())
    if problems:
        raise ConfigError(problems)
    return values


def _read(like: Any, text: str) -> Any:
    """Parse `text` as a value of the type of `like`; numbers are at least 0, and slashes separate several."""
    try:
        if isinstance(like, tuple):
            return tuple(_read(like[0], part) for part in text.split("/"))
        if isinstance(like, bool):
            return {"true": True, "false": False}[text]
        value = type(like)(text)
        if isinstance(value, str) or 0 <= value < float("inf"):
            return value
    except (KeyError, ValueError):
        pass
    raise ValueError(f"give it as in {shown(like)}")


__all__ = ["MODELS", "Factory", "cnn", "dnn", "find_model", "linear", "mlp", "options_of", "tabular"]
