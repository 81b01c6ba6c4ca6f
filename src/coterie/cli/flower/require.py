"""Checks that Flower, an optional dependency, is installed."""

from __future__ import annotations

from importlib.util import find_spec

from coterie.core.errors import ConfigError


def require_flower() -> None:
    """Raise `ConfigError` with the command to install what is missing."""
    missing = [name for name in ("flwr", "cryptography") if find_spec(name) is None]
    if missing:
        raise ConfigError([f"this needs {' and '.join(missing)}: pip install 'coterie[flower]'"])
