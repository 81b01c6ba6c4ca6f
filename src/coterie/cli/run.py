"""`coterie run`: train one method, and every client alone, on one federation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.outlook import show_first_look
from coterie.cli.profile import print_profile
from coterie.cli.progress import watch
from coterie.cli.request import Request
from coterie.cli.tables import print_result
from coterie.core.errors import ConfigError
from coterie.data import Federation
from coterie.data.tables.schema import schema_from_dict
from coterie.experiment import training_settings
from coterie.experiment.config import Config
from coterie.experiment.plan import first_look
from coterie.experiment.resolve import default_out
from coterie.experiment.run import run_setup, with_profile
from coterie.experiment.setup import Setup, prepare
from coterie.profiling import recording

Quiet = Annotated[bool, typer.Option("--quiet", help="print the final table only")]
Bmta = Annotated[
    bool,
    typer.Option("--bmta", help="also print the best mean test accuracy of any round"),
]


@with_settings()
def run(
    ctx: typer.Context,
    *,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for the run (default: a new one in runs/)", metavar="FOLDER"),
    ] = None,
    quiet: Quiet = False,
    bmta: Bmta = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="show where the time was spent, and write trace.json for chrome://tracing")
    ] = False,
    **settings: Any,
) -> None:
    """Train a federation, and every client alone, and compare.

    Clients that train alone take the same number of gradient steps. The result says who gains by taking part, and who
    does not.

    Methods have their own flags, such as --sigma2: 'coterie methods fedmap' lists those of fedmap.

    FILE.toml can hold the same settings as the flags (rounds = 50), with those of the method in a table [hyper] and
    those of the optimiser in a table [optimizer]. Flags override the file, which overrides --setting, which overrides
    the defaults of the data set ('coterie data'), which override the defaults below.
    """
    with report_errors() as stopped:
        request = Request(ctx, settings)
        request.add_method_flags([request.method()])
        with recording(profile) as recorded:
            setup = with_problems(request.problems, lambda: prepare(**request.values))
            if bmta and setup.federation.kind != "classification":
                raise ConfigError([f"--bmta needs classes, but {setup.config.data} is a {setup.federation.kind}"])
            stopped.debug = setup.config.debug
            path = out or default_out(setup.config)
            stopped.advice = f"To continue: coterie resume {shlex.quote(str(path))}"
            console = stdout()
            if not quiet:
                say(console, f"{setup.config.method} on {describe(setup)}, seed {setup.config.seed}")
                for line in schema_lines(setup.federation):
                    say(console, line)
                if setup.budget:
                    say(console, setup.budget.sentence())
                if not setup.config.debug:  # breakpoints would stop in a rehearsal
                    show_first_look(first_look(setup))
            with watch(quiet, measures=measures(setup.config), debug=setup.config.debug) as progress:
                result = run_setup(setup, path, progress=progress)
        with_profile(result, recorded)
        print_result(console, result, quiet=quiet, bmta=bmta)
        if recorded:
            print_profile(console, recorded)
            say(
                console, f"The full trace is in {path / 'trace.json'}: open it with chrome://tracing or ui.perfetto.dev"
            )


def describe(setup: Setup) -> str:
    """Say in one line what will be run."""
    config = setup.config
    most = "at most " if config.early_stop is not None or config.callbacks else ""
    number, unit = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    optimizer = [f"{config.optimizer.get('name')} with lr {config.optimizer.get('lr')}"] if config.optimizer else []
    model = f"model {config.model}" if setup.mixed is None else f"models {setup.mixed.describe()}"
    parts = [
        f"{_count(len(setup.federation.names), 'client')}, {model}",
        f"{most}{_count(config.rounds, 'round')} of {_count(number, unit)}",
        *optimizer,
        *training_settings.in_words(config),
    ]
    return f"{config.data}: {', '.join(parts)}"


def schema_lines(federation: Federation) -> list[str]:
    """Describe how the sites' own files were read; empty for other data."""
    records = list(federation.preprocessing.values())
    return schema_from_dict(records[0]["schema"], "schema").describe() if records else []


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def measures(config: Config) -> bool:
    """Return whether the run begins by measuring engines or compiling."""
    return config.engine == "auto" or config.compile is not False or config.workers is None
