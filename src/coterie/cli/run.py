"""`coterie run`: one method, and every client alone, on one federation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.asked import Asked
from coterie.cli.console import say, stdout
from coterie.cli.errors import checked, in_words
from coterie.cli.flags import with_settings
from coterie.cli.profile import print_profile
from coterie.cli.progress import watch
from coterie.cli.tables import print_result
from coterie.data import Federation
from coterie.data.schema import schema_from_dict
from coterie.errors import ConfigError
from coterie.experiment.config import Config, default_out
from coterie.experiment.run import run_setup, with_profile
from coterie.experiment.setup import Setup, prepare
from coterie.spans import recording

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
        typer.Option(help="the run folder (default: a new one in runs/)", metavar="FOLDER"),
    ] = None,
    quiet: Quiet = False,
    bmta: Bmta = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="tell where the time went, and write trace.json for chrome://tracing")
    ] = False,
    **settings: Any,
) -> None:
    """Train a federation, and every client alone, and compare.

    The clients alone take as many gradient steps. Who gains, and who does not, is said at the end.

    A method has flags of its own, such as --sigma2: 'coterie methods fedmap' lists those of fedmap.

    FILE.toml holds the same settings as the flags (rounds = 50), with those of the method in a table [hyper] and those
    of the optimiser in a table [optimizer]. Flags come first, then the file, then the --setting, if one is named, then
    the defaults of the data set ('coterie data'), then those below.
    """
    with in_words() as ending:
        asked = Asked(ctx, settings)
        asked.add_own([asked.method()])
        with recording(profile) as recorded:
            setup = checked(asked.problems, lambda: prepare(**asked.values))
            if bmta and setup.federation.kind != "classification":
                raise ConfigError([f"--bmta is an accuracy, but {setup.config.data} is a {setup.federation.kind}"])
            path = out or default_out(setup.config)
            ending.advice = f"Go on with: coterie resume {shlex.quote(str(path))}"
            console = stdout()
            if not quiet:
                say(console, f"{setup.config.method} on {describe(setup)}, seed {setup.config.seed}")
                for line in agreed(setup.federation):
                    say(console, line)
            with watch(quiet, measures=measures(setup.config)) as progress:
                result = run_setup(setup, path, progress=progress)
        with_profile(result, recorded)
        print_result(console, result, quiet=quiet, bmta=bmta)
        if recorded:
            print_profile(console, recorded)
            say(console, f"Every span of it: {path / 'trace.json'}, for chrome://tracing or ui.perfetto.dev")


def describe(setup: Setup) -> str:
    config = setup.config
    number, unit = (config.local_steps, "step") if config.local_steps else (config.local_epochs, "epoch")
    optimizer = [f"{config.optimizer.get('name')} with lr {config.optimizer.get('lr')}"] if config.optimizer else []
    parts = [
        f"{_count(len(setup.federation.names), 'client')}, model {config.model}",
        f"{_count(config.rounds, 'round')} of {_count(number, unit)}",
        *optimizer,
    ]
    return f"{config.data}: {', '.join(parts)}"


def agreed(federation: Federation) -> list[str]:
    """Of sites' own files: what they were read as."""
    records = list(federation.preprocessing.values())
    return schema_from_dict(records[0]["schema"], "schema").words() if records else []


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def measures(config: Config) -> bool:
    """Whether the run begins by measuring engines, or compiling."""
    return config.engine == "auto" or config.compile is not False or config.workers is None
