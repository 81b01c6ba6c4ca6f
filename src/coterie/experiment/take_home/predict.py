"""Predict rows in a file with a client's model: probabilities by class name, or values."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch

from coterie.core.errors import CoterieError, DataError
from coterie.evaluation.adoption import at_threshold
from coterie.experiment.building import Model
from coterie.experiment.take_home.input_files import class_names, is_number, read_inputs
from coterie.experiment.take_home.load import find_client, load, target_of
from coterie.storage.run_folder import csv_text

ROWS_AT_ONCE = 1024  # that the model predicts at once


def predict(run: str | Path, client: str | int, rows: str | Path, *, model: Model | None = None) -> tuple[str, str]:
    """Predict the rows of a file.

    Args:
        run: the run folder.
        client: a client's name, or its number from 1.
        rows: a CSV, .npy or .npz file with the inputs.
        model: the model, if the run's was given in Python.

    Returns:
        The client's name, and CSV with a line per row: the most likely class (or, if the client has a threshold of
        its own, the class by that) and each class's probability; the value in a regression; for other tasks, what
        docs/tasks.md says. Class names that a spreadsheet would take for formulas begin with an apostrophe.

    Raises:
        CoterieError: there is no such client, or the outputs do not fit a table.
        DataError: the file cannot be read, or does not suit the model.
    """
    folder, about = find_client(run, client)
    x = read_inputs(Path(rows), folder, about)
    module = load(run, about["client"], model=model)
    try:
        with torch.no_grad():
            outputs = torch.cat([module(piece) for piece in torch.split(x, ROWS_AT_ONCE)])
    except IndexError as error:
        raise DataError(f"'{rows}' has numbers that the model's table of embeddings lacks ({error})") from error
    target = target_of(about)
    if outputs.ndim != 2 and target.kind != "regression":
        shape = tuple(outputs.shape[1:])
        raise CoterieError(
            f"each row has outputs of shape {shape}, which a CSV cannot hold: use coterie.load in Python"
        )
    names = class_names(about)
    header, table = target.table(outputs, names)
    found = (about.get("take_home") or {}).get("threshold")
    if found is not None:
        classes = at_threshold(outputs, found).argmax(1).tolist()
        table = [[names[k], *row[1:]] for k, row in zip(classes, table, strict=True)]
    return about["client"], _csv(header, table)


def _cell(text: str) -> str:
    """Return a cell: a number as it is, and a name so that no spreadsheet runs it."""
    return text if is_number(text) else str(csv_text(text))


def _csv(header: list[str], rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(csv_text, header), *(map(_cell, row) for row in rows)])
    return text.getvalue()
