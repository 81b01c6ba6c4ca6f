"""TOML files: settings and schemas that people edit."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from coterie.core.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings.

    Raises:
        ConfigError: the file does not exist, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"there is no file '{path}'"]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"'{path}' cannot be read as TOML: {error}"]) from error


def to_toml(values: Mapping[str, Any]) -> str:
    """Write `values` as TOML: plain keys first, then a table for each dict. None and empty tables are left out."""
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, dict)}
    tables = {key: value for key, value in values.items() if isinstance(value, dict) and value}
    return tomli_w.dumps(plain | tables)


def toml_value(value: Any) -> str:
    """Write one value that is no table, for files whose lines have comments between them."""
    return tomli_w.dumps({"x": value}, multiline_strings=False).removeprefix("x = ").strip()
