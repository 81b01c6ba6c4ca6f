"""For Flower users: `from coterie.flower import server_app, client_app`. Needs `pip install 'coterie[flower]'`."""

from __future__ import annotations

try:
    from coterie.deploy.flower import server_app
    from coterie_site import client_app
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("flwr", "cryptography"):
        raise
    raise ModuleNotFoundError(
        f"{error.name} is not installed: pip install 'coterie[flower]'", name=error.name
    ) from None

__all__ = ["client_app", "server_app"]
