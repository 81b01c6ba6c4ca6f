"""`coterie site`: all that an administrator starts at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.cli.flower.needed import needs_flower


def site(
    superlink: Annotated[str, typer.Option(help="the SuperLink", metavar="HOST:PORT")],
    root_certificates: Annotated[Path, typer.Option(help="the federation's ca.crt", exists=True, dir_okay=False)],
    key: Annotated[Path, typer.Option(help="this site's private key", exists=True, dir_okay=False)],
    data: Annotated[str, typer.Option(help="a CSV or Parquet file, or package.module:function", metavar="FILE")] = "",
    name: Annotated[str | None, typer.Option(help="the site's name (default: that of its key)")] = None,
    target: Annotated[str | None, typer.Option(help="the column to predict (default: the schema's)")] = None,
    schema: Annotated[Path | None, typer.Option(help="what the sites agreed on", exists=True, dir_okay=False)] = None,
    group: Annotated[str | None, typer.Option(help="rows that agree here stay on one side of a split")] = None,
    regression: Annotated[bool, typer.Option("--regression", help="the column is a number, not a class")] = False,
    folder: Annotated[Path, typer.Option(help="the site's own folder")] = Path("site"),
    keys: Annotated[Path | None, typer.Option(help="the other sites' public keys (peers)", file_okay=False)] = None,
    server_key: Annotated[Path | None, typer.Option(help="the ServerApp's public key", dir_okay=False)] = None,
) -> None:
    """Take part in a federation with this site's data.

    The data stays here. Private state, the personalised model, its description and its report are written to the
    site's own folder, and leave it only as far as the method sends them. Runs until it is stopped.
    """
    with in_words() as ending:
        needs_flower()
        from coterie.deploy.sitenode import run

        ending.advice = "Start it again at any time: it goes on where it was."
        called = name or key.name.removesuffix(".key")
        say(stdout(), f"site '{called}' connects to {superlink}; its own folder is {folder.resolve()}")
        node = {
            "client": called,
            "data": str(Path(data).resolve()) if data and Path(data).exists() else data,
            "target": target or "",
            "schema": str(schema.resolve()) if schema else "",
            "group": group or "",
            "kind": "regression" if regression else "",
            "folder": str(folder.resolve()),
            "key": str(key.resolve()),
            "keys": str(keys.resolve()) if keys else "",
            "server-key": str(server_key.resolve()) if server_key else "",
        }
        run(
            superlink,
            root_certificates.resolve(),
            key.resolve(),
            node,
            folder.resolve(),
            lambda words: say(stdout(), words),
        )
