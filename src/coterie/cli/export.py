"""`coterie export`: a client's model as a file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from coterie.cli.console import say, stdout
from coterie.cli.errors import in_words
from coterie.cli.predict import Client, OwnModel, Run
from coterie.experiment.export import Format
from coterie.experiment.export import export as write
from coterie.experiment.load import find_client


def export(
    run: Run,
    client: Client,
    format: Annotated[str, typer.Option(help=" | ".join(get_args(Format)), metavar="FORMAT")] = "torch",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the file (default: the client's name, in this folder)")
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="outputs are a softmax, not logits")] = False,
    model: OwnModel = None,
) -> None:
    """Write a client's model to a file that loads without Coterie.

    torch: a .pt2 archive, for torch.export.load(FILE).module(). onnx: for onnxruntime and others; needs
    pip install 'coterie[onnx]'. safetensors: the weights, with a JSON file that says how to rebuild the model.

    Outputs are logits, as evaluation uses, unless --probabilities. The number of rows is free.
    """
    with in_words():
        known: Any = format
        name = find_client(run, client)[1]["client"]
        path = write(run, client, known, out, probabilities=probabilities, model=model)
        say(stdout(), f"The model of {name} is in {path}" + (f" and {path}.json" if format == "safetensors" else ""))
