"""How tests type commands."""

import csv

from typer.testing import CliRunner

from coterie.cli import app

HOW = ("--engine", "loop", "--workers", "1", "--no-compile")
TINY = ("--data", "digits", "--rounds", "1", "--local-steps", "1", "--no-report", *HOW)


def cli(*words):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def table(path, x, *more, names=("x1", "x2", "x3", "x4")):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, *(["label"] if more else [])])
        writer.writerows([[*row, *extra] for row, *extra in zip(x.tolist(), *more, strict=True)])
