"""`write` makes the HTML report of run folders; `write_figures` writes its figures as images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core.errors import CoterieError
from coterie.storage import files

if TYPE_CHECKING:  # plotly is imported when a page is made, not with the command line
    from coterie.report.block import Page


def make(paths: Sequence[str | Path], sections: Sequence[str] = ()) -> Page:
    """Make the page of one run, of a search, of a recommendation, or the comparison of several.

    Args:
        paths: As for `write`.
        sections: As for `write`.
    """
    from coterie.report import recommendation, search, several, single
    from coterie.report.read import find, read
    from coterie.report.user_sections import users_sections

    if not paths:
        raise CoterieError("give at least one run folder")
    if len(paths) == 1 and search.is_search(Path(paths[0])):
        return search.page(Path(paths[0]))
    if len(paths) == 1 and recommendation.is_recommendation(Path(paths[0])):
        return recommendation.page(Path(paths[0]))
    runs = [read(path) for path in find([Path(path) for path in paths])]
    page = single.page(runs[0]) if len(runs) == 1 else several.page(runs)
    named = dict.fromkeys([*(name for run in runs for name in run.config.get("sections") or ()), *sections])
    before = [section for section in page.sections if section.heading != single.CONFIGURATION]
    after = [section for section in page.sections if section.heading == single.CONFIGURATION]
    return dataclasses.replace(page, sections=[*before, *users_sections(list(named), runs), *after])


def write(
    paths: Sequence[str | Path] | str | Path, out: str | Path | None = None, *, sections: Sequence[str] = ()
) -> Path:
    """Write one self-contained HTML file about one run, or comparing several.

    Args:
        paths: Run folders, or folders of `coterie compare`; or one folder of `coterie tune` or of
            `coterie recommend`.
        out: The file; by default report.html in the first folder.
        sections: More sections beside those that the runs' configurations name (`coterie.report.user_sections`).

    Returns:
        The file.

    Raises:
        CoterieError: The folders cannot be read, or cannot be compared with each other.
    """
    from coterie.report.page import render

    several = [paths] if isinstance(paths, str | Path) else list(paths)
    page = make(several, sections)
    target = Path(out) if out is not None else Path(several[0]) / "report.html"
    files.write_text(target, render(page))
    return target


def write_figures(paths: Sequence[str | Path] | str | Path, folder: str | Path) -> list[Path]:
    """Write every figure of the report as PNG and SVG; this needs the extra `figures`."""
    from coterie.report.images import export

    return export(make([paths] if isinstance(paths, str | Path) else list(paths)), Path(folder))
