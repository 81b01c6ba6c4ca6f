"""`coterie site`: the one command that an administrator runs at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.flower.require import require_flower


def site(
    superlink: Annotated[str, typer.Option(help="address of the SuperLink", metavar="HOST:PORT")],
    root_certificates: Annotated[Path, typer.Option(help="the federation's ca.crt", exists=True, dir_okay=False)],
    key: Annotated[Path, typer.Option(help="this site's private key", exists=True, dir_okay=False)],
    data: Annotated[str, typer.Option(help="a CSV or Parquet file, or package.module:function", metavar="FILE")] = "",
    name: Annotated[str | None, typer.Option(help="name of the site (default: that of its key file)")] = None,
    target: Annotated[str | None, typer.Option(help="the column to predict (default: the schema's)")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="the schema that the sites agreed on", exists=True, dir_okay=False)
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="column that identifies the patient; its rows stay in one part of the split")
    ] = None,
    regression: Annotated[bool, typer.Option("--regression", help="the target is a number, not a class")] = False,
    folder: Annotated[Path, typer.Option(help="folder for the site's state and results")] = Path("site"),
    keys: Annotated[Path | None, typer.Option(help="folder with the other sites' public keys", file_okay=False)] = None,
    server_key: Annotated[Path | None, typer.Option(help="the ServerApp's public key", dir_okay=False)] = None,
    secure_only: Annotated[
        bool, typer.Option("--secure-only", help="send a server nothing but what is summed securely")
    ] = False,
) -> None:
    """Take part in a federation with this site's data.

    The data stays here. The private state, the personalised model, its card and its report are written to the site's
    own folder; only what the method sends leaves the site. Runs until it is stopped.
    """
    with report_errors() as stopped:
        require_flower()
        from coterie.deploy.site_node import run

        stopped.advice = "Start it again at any time to continue where it stopped."
        called = name or key.name.removesuffix(".key")
        say(stdout(), f"Site '{called}' connects to {superlink}; its own folder is {folder.resolve()}")
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
            "secure": secure_only,
        }
        run(
            superlink,
            root_certificates.resolve(),
            key.resolve(),
            node,
            folder.resolve(),
            lambda words: say(stdout(), words),
        )
