"""Objects by their import path, `package.module:name`: a user's own methods, models and data functions."""

from __future__ import annotations

import importlib
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.user_code import in_user_code


def import_path(path: str, what: str) -> Any:
    """Import the object at `path`.

    Args:
        path: `package.module:name`.
        what: what the object is for, in words, for the error message.

    Raises:
        ConfigError: the module or the name in it does not exist.
    """
    module, _, attribute = path.partition(":")
    if module.startswith("."):
        raise ConfigError([f"{what} '{path}' cannot be imported: give the whole path, package.module:name"])
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError([f"{what} '{path}' cannot be imported: {error}{in_user_code(error)}"]) from error
