"""`coterie predict`: predict the rows of a file with a client's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stderr
from coterie.cli.errors import report_errors
from coterie.experiment.take_home.predict import predict as predictions
from coterie.storage import files

Run = Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")]
Client = Annotated[str, typer.Option("--client", help="name of a client, or its number in the tables (from 1)")]
OwnModel = Annotated[
    str | None,
    typer.Option("--model", help="if the run used a model from Python: package.module:factory", metavar="TEXT"),
]


def predict(
    run: Run,
    rows: Annotated[Path, typer.Argument(help="CSV with a header, .npy, or .npz with an array x", metavar="ROWS")],
    client: Client,
    out: Annotated[str, typer.Option("-o", "--out", help="the CSV file to write (default: -, standard output)")] = "-",
    model: OwnModel = None,
) -> None:
    """Predict with a client's own model.

    Writes one line per row: the most likely class and the probability of each class, or the value for a regression. The
    rows are preprocessed like the client's own training data. If the run had no preprocessing, the columns must be the
    inputs of the model: in the same order, or named x1, x2, ...
    """
    with report_errors():
        name, text = predictions(run, client, rows, model=model)
        if out == "-":
            typer.echo(text, nl=False)
        else:
            files.write_text(Path(out), text)
            say(stderr(), f"{text.count(chr(10)) - 1} rows predicted by the model of {name}, written to {out}", "dim")
