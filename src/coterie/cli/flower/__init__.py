"""`coterie flower`: the same methods on real machines, over Flower. One file a command."""

from __future__ import annotations

import typer

from coterie.cli.flags import ALLOW_UNKNOWN_FLAGS, USAGE
from coterie.cli.flower import certs, init, recommend, resume, up

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a federation on real machines, over Flower.")
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(up.up)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=USAGE)(recommend.recommend)
app.command(context_settings=ALLOW_UNKNOWN_FLAGS, options_metavar=f"FOLDER {USAGE}")(init.init)
app.command()(resume.resume)
app.command()(certs.certs)
