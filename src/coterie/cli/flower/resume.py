"""`coterie flower resume`: continue a deployed run whose server stopped."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.flower.recommend import print_recommended
from coterie.cli.flower.require import require_flower
from coterie.cli.flower.table import watch_sites
from coterie.cli.flower.up import Limit
from coterie.cli.run import Quiet
from coterie.cli.tables import print_result
from coterie.core.errors import ConfigError
from coterie.experiment.setup import prepare


def resume(
    run: Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")],
    app: Annotated[Path | None, typer.Option(help="the Flower app of the run, if 'up' did not start it")] = None,
    superlink: Annotated[str | None, typer.Option(help="name of the SuperLink, as in 'flwr run'")] = None,
    limit: Limit = 3600.0,
    quiet: Quiet = False,
) -> None:
    """Continue from the last round that the server completed; at most one round is repeated.

    A run of 'coterie flower up' is started again on this machine. For a run on other machines, give its --app and
    --superlink: it is submitted again, and the sites, which keep running, continue from their own disks.
    """
    with report_errors() as stopped:
        require_flower()
        from coterie.deploy import settings
        from coterie.deploy.ledger import Ledger
        from coterie.deploy.processes import call, environment, program
        from coterie.deploy.up import app_config, part_of, recommend_up
        from coterie.deploy.up import up as start

        ledger = Ledger.load(run)
        if ledger.finished:
            raise ConfigError([f"'{run}' is already complete"])
        stopped.advice = f"To continue: coterie flower resume {shlex.quote(str(run))}"
        console = stdout()
        own = run / "flower" / "app"
        if app is None and not own.exists():
            raise ConfigError([f"'{run}' was not started by 'coterie flower up': give its --app and --superlink"])
        if not quiet:
            say(console, f"Continuing after round {ledger.round} with {', '.join(ledger.declared)}")
        if app is not None:
            words = f'deploy.resume=true deploy.out="{run.resolve()}"'
            command = [program("flwr"), "run", str(app), *([superlink] if superlink else []), "--run-config", words]
            say(console, call(command, environment()).strip())
            return
        flat = app_config(own)
        config, _, deploy = settings.read(flat, own_data=False, own_model=False)
        setup = part_of(prepare(**config.to_file()), list(ledger.declared))
        if deploy.panel():
            with watch_sites(console, quiet) as watch:
                recommend_up(setup, run, {}, watch, limit)
            print_recommended(console, run, quiet=quiet)
            return
        rules = {key: getattr(deploy, key) for key in ("deadline", "quorum", "joining", "secure")}
        with watch_sites(console, quiet) as watch:
            result = start(setup, run, rules, watch, limit)
        print_result(console, result, quiet=quiet, bmta=False)
