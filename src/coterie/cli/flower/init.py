"""`coterie flower init`: write a Flower app."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors, with_problems
from coterie.cli.flags import with_settings
from coterie.cli.flower.require import require_flower
from coterie.cli.request import Request
from coterie.core.errors import ConfigError
from coterie.data.loading import is_known
from coterie.experiment.config import Config
from coterie.experiment.given import sort_settings
from coterie.experiment.resolve import resolve
from coterie.methods.fields import values_of
from coterie.methods.named import optimizer_of


@with_settings("debug")
def init(
    ctx: typer.Context,
    *,
    sites: Annotated[int, typer.Option(help="number of sites in the federation", min=1)] = 2,
    **settings: Any,
) -> None:
    """Write a complete Flower app to FOLDER, ready for 'flwr run'.

    Its pyproject.toml has all settings of the run under [tool.flwr.app.config], and those of the deployment (deadline,
    quorum, keys) under [tool.flwr.app.config.deploy]. --data may be a data set ('coterie data'), or any name if the
    sites provide their own data with 'coterie site --data'.
    """
    with report_errors():
        require_flower()
        from coterie.deploy import app
        from coterie.deploy.settings import refuse_of_simulation

        folders = [word for word in ctx.args if not word.startswith("-") and not word.endswith(".toml")]
        folder = _folder(ctx, folders)
        request = Request(ctx, settings)
        request.add_method_flags([request.values.get("method", Config.model_fields["method"].default)])
        method = str(request.values.get("method", Config.model_fields["method"].default))
        values = sort_settings(method, request.values)
        config, built = with_problems(request.problems, lambda: resolve(values, own_data=_own(values.get("data"))))
        if problems := refuse_of_simulation(config):
            raise ConfigError(problems)
        resolved = {"hyper": values_of(built), "optimizer": optimizer_of(built) or config.optimizer}
        out = app.write(folder, config.model_copy(update=resolved), {"sites": sites})
        console, quoted = stdout(), shlex.quote(str(out))
        say(console, f"Written to {out}: {config.method} on {config.data}, {config.rounds} rounds, {sites} sites")
        if _own(config.data):
            say(
                console,
                "Each site:    coterie site --data FILE --superlink HOST:PORT --root-certificates ... --key ...",
            )
        else:
            say(console, f"Simulate it:  flwr run {quoted} local --stream --federation-config num-supernodes={sites}")
        say(console, f"Deploy it:    flwr run {quoted} SUPERLINK --stream   (docs/deploy.md)")


def _folder(ctx: typer.Context, folders: list[str]) -> Path:
    """Return the first word as the folder and remove it; the rest is parsed as for 'coterie run'."""
    if not ctx.args or ctx.args[0].startswith("-") or not folders or ctx.args[0] != folders[0]:
        raise typer.BadParameter("give the folder of the app first: coterie flower init FOLDER --method fedamp ...")
    ctx.args.pop(0)
    return Path(folders[0])


def _own(data: Any) -> bool:
    return data is not None and not is_known(str(data))
