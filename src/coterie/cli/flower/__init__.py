"""`coterie flower`: the same methods on real machines, over Flower. One file a command."""

from __future__ import annotations

import typer

from coterie.cli.flags import USAGE, WITH_SETTINGS
from coterie.cli.flower import certs, init, recommend, resume, up
from coterie.cli.panels import Listed

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a federation on real machines, over Flower.")
app.command(**WITH_SETTINGS)(up.up)
app.command(**WITH_SETTINGS)(recommend.recommend)
app.command(**{**WITH_SETTINGS, "options_metavar": f"FOLDER {USAGE}"})(init.init)
app.command(cls=Listed)(resume.resume)
app.command(cls=Listed)(certs.certs)
