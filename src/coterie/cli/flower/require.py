"""Flower is an extra: said in words where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from coterie.errors import ConfigError


def needs_flower() -> None:
    missing = [name for name in ("flwr", "cryptography") if find_spec(name) is None]
    if missing:
        raise ConfigError([f"this needs {' and '.join(missing)}: pip install 'coterie[flower]'"])
