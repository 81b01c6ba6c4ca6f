"""`coterie plan`: what a run would do, and what in it can do nothing, before anything trains."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.outlook import show_plan
from coterie.cli.request import Request
from coterie.cli.run import describe
from coterie.experiment.plan import plan_setup
from coterie.experiment.setup import prepare


@with_settings()
def plan(
    ctx: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON")] = False,
    **settings: Any,
) -> None:
    """Say what 'coterie run' with the same words would do, and what in it can do nothing.

    A few clients work through two rounds, with a limited number of steps. Nothing is written.

    It says who has how much data, who hears whom, how strongly the method pulls, what clients weigh for each other,
    bytes, minutes and memory. Each warning names what to change.
    """
    with report_errors():
        request = Request(ctx, settings)
        request.add_method_flags([request.method()])
        setup = with_problems(request.problems, lambda: prepare(**request.values))
        found = plan_setup(setup)
        console = stdout()
        if as_json:
            say(console, json.dumps(found.to_dict(), indent=2, ensure_ascii=False))
            return
        say(console, f"{setup.config.method} on {describe(setup)}, seed {setup.config.seed}")
        show_plan(console, found)
