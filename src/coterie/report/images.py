"""Exports figures as PNG and SVG with kaleido (the extra `figures`) and an installed Chromium or Chrome."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.report.block import Page, Picture
from coterie.report.style import INK

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
VARIABLE = "BROWSER_PATH"  # in which kaleido looks for the program
WIDTH, PNG_SCALE = 820, 2  # width of an image in points, and pixels per point in a PNG


def export(page: Page, folder: Path) -> list[Path]:
    """Write every figure of a page to `folder`; return the files."""
    browser = find_browser()
    import plotly.io  # which takes longer than writing a report

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoterieError(f"'{folder}' cannot be written: {error.strerror or error}") from error
    figures, targets, scales = [], [], []
    for picture in page.pictures:
        for form, zoom in (("svg", 1), ("png", PNG_SCALE)):
            figures.append(_for_print(picture))
            targets.append(folder / f"{picture.name}.{form}")
            scales.append(zoom)
    try:
        widths, heights = ([int(each.layout[side]) for each in figures] for side in ("width", "height"))
        with _browser_path(browser):
            plotly.io.write_images(figures, targets, scale=scales, width=widths, height=heights)
    except Exception as error:  # kaleido and the browser raise many kinds of errors
        raise CoterieError(f"the browser could not draw the figures: {error}") from error
    return targets


def find_browser() -> str:
    """Return the browser to draw with: what BROWSER_PATH names, or one that is on the PATH.

    Raises:
        CoterieError: kaleido or a browser is missing; the message says how to install it.
    """
    if importlib.util.find_spec("kaleido") is None:
        raise CoterieError("figures as PNG and SVG need kaleido: pip install 'coterie[figures]'")
    if asked := os.environ.get(VARIABLE):
        return asked
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise CoterieError(
            "figures as PNG and SVG need Chromium or Chrome, and neither was found: install one (Debian: apt install "
            f"chromium), or set the environment variable {VARIABLE} to its program"
        )
    return found


@contextlib.contextmanager
def _browser_path(browser: str) -> Iterator[None]:
    """Tell kaleido the browser, by the environment of this process, which is then as it was."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = browser
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _for_print(picture: Picture) -> Any:
    """Return plotly's own figure of it, on white, with its heading."""
    import plotly.graph_objects as go

    made = go.Figure(copy.deepcopy(vars(picture.figure)))
    heading = {"text": picture.heading, "x": 0.02, "font": {"size": 15, "color": INK}}
    width = 560 if picture.half else WIDTH
    legend = 40 if made.layout.showlegend else 0
    made.update_layout(title=heading, paper_bgcolor="white", width=width, margin={"t": 56 + legend, "r": 24})
    made.update_layout(height=made.layout.height + 44 + legend)
    return made
