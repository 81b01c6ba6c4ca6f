"""`coterie attack`: what hostile clients of a simulated federation do to the honest ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli.console import say, show, stderr, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.request import Request
from coterie.cli.run import describe
from coterie.cli.tables import format_value, heading
from coterie.core.errors import ConfigError, CoterieError
from coterie.experiment.attack import ABSENT, ATTACKS, attack_setup, check_attacks, hostile_clients
from coterie.experiment.setup import Setup, prepare
from coterie.parts.robust import averaged_fields

UNDEFENDED = "none"
DEFENCES = "median,clip:auto"
NO_ATTACK, WITHOUT_THEM = "no attack", "without them"


@with_settings("robust")
def attack(
    ctx: typer.Context,
    *,
    hostile: Annotated[int, typer.Option(min=1, help="how many of the clients are hostile")] = 1,
    attacks: Annotated[str, typer.Option(help=f"which attacks: {','.join(ATTACKS)}")] = ",".join(ATTACKS),
    robust: Annotated[
        str | None,
        typer.Option(help=f"defences beside none, such as multi-krum:1,median; by default {DEFENCES}"),
    ] = None,
    **settings: Any,
) -> None:
    """Train with hostile clients, and print how the honest ones fare under every attack and defence.

    Nothing is written. Numbers are means over the honest clients' test examples after the last round; where
    an attack makes training diverge, the table says so. "no attack" scores the same clients when nobody is hostile, and
    "without them" when the hostile clients take no part: no defence can be asked for more than that.
    """
    with report_errors():
        request = Request(ctx, settings)
        request.add_method_flags([request.method()])
        asked = check_attacks([word for word in attacks.split(",") if word])
        plain = with_problems(request.problems, lambda: prepare(**request.values))
        rules = robust if robust is not None else DEFENCES if averaged_fields(plain.method) else ""
        defended = {rule: prepare(**request.values, robust=rule) for rule in rules.split(",") if rule}
        setups = {UNDEFENDED: plain, **defended}
        who = hostile_clients(plain, hostile)
        names = ", ".join(plain.federation.names[i] for i in who)
        console, progress = stdout(), stderr()
        say(console, f"{plain.config.method} on {describe(plain)}, seed {plain.config.seed}; hostile: {names}")
        table = Table(title=f"Test {heading(plain.metric)}, honest clients", title_justify="left")
        for column in ("attack", *setups):
            table.add_column(column, justify="left" if column == "attack" else "right")
        for label, name in ((NO_ATTACK, None), (WITHOUT_THEM, ABSENT), *((each, each) for each in asked)):
            cells = []
            for rule, setup in setups.items():
                if progress.is_terminal:
                    say(progress, f"{label}, {rule}")
                cells.append(_score(setup, name, who))
            table.add_row(label, *cells)
        show(console, table)


def _score(setup: Setup, attack: str | None, hostile: list[int]) -> str:
    try:
        return format_value(setup.metric, attack_setup(setup, attack, hostile).mean)
    except ConfigError:
        raise
    except CoterieError:  # values that are not finite, which is what the attack wants
        return "diverged"
