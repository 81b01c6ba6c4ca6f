"""`coterie flower certs`: make a CA, a server certificate, and a key for every site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.flower.require import require_flower


def certs(
    sites: Annotated[list[str], typer.Argument(help="names of the sites", metavar="SITE...")],
    host: Annotated[
        list[str], typer.Option(help="host name or address of the SuperLink (repeat for more)", metavar="HOST")
    ] = ["127.0.0.1"],  # noqa: B006
    out: Annotated[Path, typer.Option(help="folder to write to", metavar="FOLDER")] = Path("certs"),
    days: Annotated[int, typer.Option(help="days for which the certificates are valid", min=1)] = 825,
) -> None:
    """Make a CA, the server's certificate and a key for every site.

    Existing files are kept: run it again with more names to add sites. Private keys are readable only by their owner.
    Give each site its own key, and no other private key.
    """
    with report_errors():
        require_flower()
        from coterie.deploy.certs import make

        written = make(out, host, sites, days)
        console = stdout()
        for whom, paths in written.items():
            if paths:
                say(console, f"for {whom}: {', '.join(map(str, paths))}")
        if not any(written.values()):
            say(console, f"Everything is already in {out}")
        else:
            keys = out / "keys"
            say(console, f"The public keys of all sites are in {keys}, for the ServerApp (deploy.keys) and for peers")
