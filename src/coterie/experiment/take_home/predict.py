"""What a client's model says of rows in a file: probabilities by class name, or values."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch
from torch import Tensor

from coterie.errors import CoterieError
from coterie.experiment.load import find_client, load
from coterie.experiment.rows import class_names, read_inputs
from coterie.experiment.setup import Model

PIECE = 1024  # rows at once


def predict(run: str | Path, client: str | int, rows: str | Path, *, model: Model | None = None) -> tuple[str, str]:
    """(the client's name, CSV): one line a row, the most likely class and the probability of each, or the value."""
    folder, about = find_client(run, client)
    x = read_inputs(Path(rows), folder, about)
    module = load(run, about["client"], model=model)
    with torch.no_grad():
        outputs = torch.cat([module(piece) for piece in torch.split(x, PIECE)])
    if about["kind"] == "regression":
        return about["client"], _values(outputs)
    if outputs.ndim != 2:
        shape = tuple(outputs.shape[1:])
        raise CoterieError(
            f"each row has outputs of shape {shape}, which a CSV cannot hold: use coterie.load in Python"
        )
    names = class_names(about)
    table = [[names[int(row.argmax())], *(f"{p:.6g}" for p in row.tolist())] for row in outputs.double().softmax(1)]
    return about["client"], _csv(["predicted", *names], table)


def _values(outputs: Tensor) -> str:
    flat = outputs.reshape(len(outputs), -1)
    header = ["predicted"] if flat.shape[1] == 1 else [f"predicted{i + 1}" for i in range(flat.shape[1])]
    return _csv(header, [[f"{value:.6g}" for value in row] for row in flat.tolist()])


def _csv(header: list[str], rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
