"""`coterie flower up`: run a whole federation on this machine, as it would run on several."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.flower.require import require_flower
from coterie.cli.flower.table import watch_sites
from coterie.cli.request import Request
from coterie.cli.run import Quiet, describe
from coterie.cli.tables import print_result
from coterie.core.errors import ConfigError
from coterie.experiment.config import Config
from coterie.experiment.resolve import default_out
from coterie.experiment.setup import prepare

Limit = Annotated[float, typer.Option(help="give up after this many seconds", metavar="SECONDS")]


@with_settings("debug")
def up(
    ctx: typer.Context,
    *,
    sites: Annotated[int, typer.Option(help="number of the data set's clients that take part", min=1)] = 4,
    deadline: Annotated[float, typer.Option(help="seconds after which a round closes", metavar="SECONDS")] = 300.0,
    quorum: Annotated[
        float, typer.Option(help="share of the sites that must answer in a round", min=0.01, max=1.0)
    ] = 0.5,
    secure: Annotated[
        bool, typer.Option("--secure", help="the server learns sums of the sites' messages only, and no single one")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="folder for the run (default: a new one in runs/)")] = None,
    limit: Limit = 3600.0,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, with TLS and keys, and run a federation.

    All processes listen on 127.0.0.1 only and are stopped at the end. The result is a run folder like that of
    'coterie run'; each site's own folder is in flower/sites inside it.
    """
    with report_errors() as stopped:
        require_flower()
        from coterie.deploy.secure import agreement
        from coterie.deploy.up import part_of
        from coterie.deploy.up import up as start

        request = Request(ctx, settings)
        request.add_method_flags([request.values.get("method", Config.model_fields["method"].default)])
        setup = part_of(with_problems(request.problems, lambda: prepare(**request.values)), sites)
        if secure and (problems := agreement.problems(setup.config, setup.method, len(setup.federation.names))):
            raise ConfigError(problems)
        path = out or default_out(setup.config)
        stopped.advice = f"To continue: coterie flower resume {shlex.quote(str(path))}"
        console = stdout()
        if not quiet:
            say(console, f"{setup.config.method} on {describe(setup)}; each client is a site on this machine")
            say(console, "Starting a SuperLink, and a SuperNode and a worker for each site", "dim")
        rules = {"deadline": deadline, "quorum": quorum, "joining": max(deadline, 120.0), "secure": secure}
        with watch_sites(console, quiet) as watch:
            result = start(setup, path, rules, watch, limit)
        print_result(console, result, quiet=quiet, bmta=False)
