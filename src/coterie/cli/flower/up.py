"""`coterie flower up`: a whole federation on this machine, as it would run on several."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.asked import Asked
from coterie.cli.console import say, stdout
from coterie.cli.errors import checked, in_words
from coterie.cli.flags import with_settings
from coterie.cli.flower.needed import needs_flower
from coterie.cli.flower.table import watching
from coterie.cli.run import Quiet, describe
from coterie.cli.tables import print_result
from coterie.experiment.config import Config, default_out
from coterie.experiment.setup import prepare

Limit = Annotated[float, typer.Option(help="seconds after which it gives up", metavar="SECONDS")]


@with_settings()
def up(
    ctx: typer.Context,
    *,
    sites: Annotated[int, typer.Option(help="how many of the data set's clients take part", min=1)] = 4,
    deadline: Annotated[float, typer.Option(help="seconds for a round", metavar="SECONDS")] = 300.0,
    quorum: Annotated[float, typer.Option(help="share of the sites that a round needs", min=0.01, max=1.0)] = 0.5,
    out: Annotated[Path | None, typer.Option(help="the run folder (default: a new one in runs/)")] = None,
    limit: Limit = 3600.0,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Start a SuperLink and SuperNodes here, with TLS and keys, and run a federation.

    Everything binds to 127.0.0.1 and is stopped at the end. What is left is a run folder, as of 'coterie run'; what
    each site has of its own is in flower/sites in it.
    """
    with in_words() as ending:
        needs_flower()
        from coterie.deploy.up import part_of
        from coterie.deploy.up import up as start

        asked = Asked(ctx, settings)
        asked.add_own([asked.values.get("method", Config.model_fields["method"].default)])
        setup = part_of(checked(asked.problems, lambda: prepare(**asked.values)), sites)
        path = out or default_out(setup.config)
        ending.advice = f"Go on with: coterie flower resume {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(console, f"{setup.config.method} on {describe(setup)}; the clients are sites on this machine")
            say(console, "starting a SuperLink, and a SuperNode and a worker for each site", "dim")
        rules = {"deadline": deadline, "quorum": quorum, "joining": max(deadline, 120.0)}
        with watching(console, quiet) as watch:
            result = start(setup, path, rules, watch, limit)
        print_result(console, result, quiet=quiet, bmta=False)
