"""Networks by name, each built from the shape of the data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from coterie.errors import ConfigError
from coterie.models.networks import cnn, dnn, linear, mlp
from coterie.models.tabular import tabular

Factory = Callable[[tuple[int, ...], int], nn.Module]  # (shape of one input, number of outputs) -> model

MODELS: dict[str, Factory] = {"mlp": mlp, "linear": linear, "dnn": dnn, "cnn": cnn, "tabular": tabular}


def find_model(name: str) -> Factory:
    """A model of this library by name, or a user's own by import path `package.module:factory`."""
    if name in MODELS:
        return MODELS[name]
    if ":" in name:
        factory: Any = import_path(name, "model")
        return factory  # type: ignore[no-any-return]
    raise ConfigError(
        [f"there is no model '{name}'; there are {', '.join(MODELS)}, or your own as package.module:factory"]
    )


def import_path(name: str, what: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError([f"{what} '{name}' cannot be imported: {error}"]) from error


__all__ = ["MODELS", "Factory", "cnn", "dnn", "find_model", "import_path", "linear", "mlp", "tabular"]
