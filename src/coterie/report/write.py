"""`write` makes a report of run folders; `write_figures` its figures as images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import CoterieError
from coterie.experiment import files

if TYPE_CHECKING:  # plotly is imported when a page is made, not with the command line
    from coterie.report.block import Page


def make(paths: Sequence[str | Path]) -> Page:
    """The page of one run, or the comparison of several."""
    from coterie.report import several, single
    from coterie.report.read import find, read

    if not paths:
        raise CoterieError("name at least one run folder")
    runs = [read(path) for path in find([Path(path) for path in paths])]
    return single.page(runs[0]) if len(runs) == 1 else several.page(runs)


def write(paths: Sequence[str | Path] | str | Path, out: str | Path | None = None) -> Path:
    """One HTML file that needs nothing else, of one run or of several compared; by default report.html in the first.

    Raises `CoterieError` in words if the folders cannot be read, or cannot be compared with each other.
    """
    from coterie.report.page import render

    several = [paths] if isinstance(paths, str | Path) else list(paths)
    page = make(several)
    target = Path(out) if out is not None else Path(several[0]) / "report.html"
    files.write_text(target, render(page))
    return target


def write_figures(paths: Sequence[str | Path] | str | Path, folder: str | Path) -> list[Path]:
    """Every figure of the report as PNG and SVG; needs the extra `figures`."""
    from coterie.report.images import export

    return export(make([paths] if isinstance(paths, str | Path) else list(paths)), Path(folder))
