"""`coterie flower init`: a Flower app in a folder."""

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
from coterie.data.loading import is_known
from coterie.experiment.config import Config, resolve
from coterie.experiment.setup import optimizer_values, sort_settings
from coterie.hyper import values_of


@with_settings()
def init(
    ctx: typer.Context,
    *,
    sites: Annotated[int, typer.Option(help="how many sites the federation has", min=1)] = 2,
    **settings: Any,
) -> None:
    """Write a complete Flower app into FOLDER, which 'flwr run' takes as it is.

    All settings of the run are in its pyproject.toml, under [tool.flwr.app.config], those of the deployment (deadline,
    quorum, keys) under [tool.flwr.app.config.deploy]. --data may be a data set ('coterie data') or a name of your own
    for what the sites bring with 'coterie site --data'.
    """
    with in_words():
        needs_flower()
        from coterie.deploy import app

        folders = [word for word in ctx.args if not word.startswith("-") and not word.endswith(".toml")]
        folder = _folder(ctx, folders)
        asked = Asked(ctx, settings)
        asked.add_own([asked.values.get("method", Config.model_fields["method"].default)])
        method = str(asked.values.get("method", Config.model_fields["method"].default))
        values = sort_settings(method, asked.values)
        config, built = checked(asked.problems, lambda: resolve(values, own_data=_own(values.get("data"))))
        resolved = {"hyper": values_of(built), "optimizer": optimizer_values(built) or config.optimizer}
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
    """The first word that is not a flag is the folder; what follows is read as for 'coterie run'."""
    if not ctx.args or ctx.args[0].startswith("-") or not folders or ctx.args[0] != folders[0]:
        raise typer.BadParameter("name the folder of the app first: coterie flower init FOLDER --method fedamp ...")
    ctx.args.pop(0)
    return Path(folders[0])


def _own(data: Any) -> bool:
    return data is not None and not is_known(str(data))
