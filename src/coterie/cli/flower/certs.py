"""`coterie flower certs`: a CA, a server certificate, and a key for every site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.cli.flower.needed import needs_flower


def certs(
    sites: Annotated[list[str], typer.Argument(help="the sites' names", metavar="SITE...")],
    host: Annotated[
        list[str], typer.Option(help="a name or address of the SuperLink's machine (again for more)", metavar="HOST")
    ] = ["127.0.0.1"],  # noqa: B006
    out: Annotated[Path, typer.Option(help="where to write them", metavar="FOLDER")] = Path("certs"),
    days: Annotated[int, typer.Option(help="how long the certificates are valid", min=1)] = 825,
) -> None:
    """Make a CA, the server's certificate and a key for every site.

    What is there already is kept: run it again with more names to add sites. Private keys are readable by their owner
    only; give each site its own key and nothing else of it.
    """
    with in_words():
        needs_flower()
        from coterie.deploy.certs import make

        written = make(out, host, sites, days)
        console = stdout()
        for whom, paths in written.items():
            if paths:
                say(console, f"for {whom}: {', '.join(map(str, paths))}")
        if not any(written.values()):
            say(console, f"All of it is in {out} already")
        else:
            say(
                console, f"All sites' public keys are in {out / 'keys'}: for the ServerApp (deploy.keys), and for peers"
            )
