"""`coterie export`: write a client's model to a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import report_errors
from coterie.cli.predict import Client, OwnModel, Run
from coterie.experiment.take_home.export import Format
from coterie.experiment.take_home.export import export as write
from coterie.experiment.take_home.load import find_client


def export(
    run: Run,
    client: Client,
    format: Annotated[str, typer.Option(help=" | ".join(get_args(Format)), metavar="FORMAT")] = "torch",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="the file to write (default: the client's name, in the current folder)"),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="output probabilities (a softmax) instead of logits")
    ] = False,
    model: OwnModel = None,
) -> None:
    """Write a client's model to a file that loads without Coterie.

    torch: a .pt2 archive, for torch.export.load(FILE).module(). onnx: for onnxruntime and others; needs
    pip install 'coterie[onnx]'. safetensors: the weights, with a JSON file that says how to rebuild the model.

    The model outputs logits unless --probabilities is given. It accepts any number of rows.
    """
    with report_errors():
        known: Any = format
        name = find_client(run, client)[1]["client"]
        path = write(run, client, known, out, probabilities=probabilities, model=model)
        say(stdout(), f"Wrote the model of {name} to {path}" + (f" and {path}.json" if format == "safetensors" else ""))
