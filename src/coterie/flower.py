"""For Flower users: `from coterie.flower import server_app, client_app`. Needs `pip install 'coterie[flower]'`.

Each is imported when it is asked for: a node starts a process for every message, and a `client_app` without a
`server_app` imports no PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.deploy.client_app import client_app as client_app
    from coterie.deploy.flower import server_app as server_app

_WHERE = {"client_app": "coterie.deploy.client_app", "server_app": "coterie.deploy.flower"}

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'coterie.flower' has no attribute '{name}'")
    try:
        return getattr(import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("flwr", "cryptography"):
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed: pip install 'coterie[flower]'", name=error.name
        ) from None
