"""`coterie predict`: what a client's model says of the rows of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import say, stderr
from coterie.cli.errors import in_words
from coterie.experiment import files
from coterie.experiment.predict import predict as predictions

Run = Annotated[Path, typer.Argument(help="the run folder", metavar="RUN")]
Client = Annotated[str, typer.Option("--client", help="a client's name, or its number in the tables, from 1")]
OwnModel = Annotated[
    str | None,
    typer.Option("--model", help="of a run whose model came from Python: package.module:factory", metavar="TEXT"),
]


def predict(
    run: Run,
    rows: Annotated[Path, typer.Argument(help="CSV with a header, .npy, or .npz with an array x", metavar="ROWS")],
    client: Client,
    out: Annotated[str, typer.Option("-o", "--out", help="a CSV file (default: -, the terminal)")] = "-",
    model: OwnModel = None,
) -> None:
    """Predict with a client's own model.

    Writes one line a row: the most likely class and the probability of each (of a regression, the value). Rows are
    prepared as the client's own were in training. Without such a preparation, columns are the inputs of training: in
    their order, or called x1, x2, ...
    """
    with in_words():
        name, text = predictions(run, client, rows, model=model)
        if out == "-":
            typer.echo(text, nl=False)
        else:
            files.write_text(Path(out), text)
            say(stderr(), f"{text.count(chr(10)) - 1} rows, by the model of {name}, written to {out}", "dim")
