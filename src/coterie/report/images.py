"""Figures as PNG and SVG, drawn by a Chromium that is installed, through kaleido (the extra `figures`)."""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
from pathlib import Path

import plotly.graph_objects as go

from coterie.errors import CoterieError
from coterie.report.block import Page, Picture
from coterie.report.style import INK

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTH, PIXELS = 820, 2  # of an image, and pixels a point in a PNG


def export(page: Page, folder: Path) -> list[Path]:
    check()
    import plotly.io

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoterieError(f"'{folder}' cannot be written: {error.strerror or error}") from error
    figures, targets, scales = [], [], []
    for picture in page.pictures:
        for form, zoom in (("svg", 1), ("png", PIXELS)):
            figures.append(_printed(picture))
            targets.append(folder / f"{picture.name}.{form}")
            scales.append(zoom)
    try:
        widths, heights = ([int(each.layout[side]) for each in figures] for side in ("width", "height"))
        plotly.io.write_images(figures, targets, scale=scales, width=widths, height=heights)
    except Exception as error:  # of many kinds, from the browser up
        raise CoterieError(f"the browser could not draw the figures: {error}") from error
    return targets


def check() -> None:
    """Raises `CoterieError` if images cannot be made here."""
    if importlib.util.find_spec("kaleido") is None:
        raise CoterieError("figures as PNG and SVG need kaleido: pip install 'coterie[figures]'")
    if "BROWSER_PATH" in os.environ:
        return
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise CoterieError(
            "figures as PNG and SVG are drawn by Chromium or Chrome, and none was found: install one "
            "(Debian: apt install chromium), or name its program in the environment variable BROWSER_PATH"
        )
    os.environ["BROWSER_PATH"] = found


def _printed(picture: Picture) -> go.Figure:
    """On white, with its heading."""
    made = copy.deepcopy(picture.figure)
    heading = {"text": picture.heading, "x": 0.02, "font": {"size": 15, "color": INK}}
    width = 560 if picture.half else WIDTH
    legend = 40 if made.layout.showlegend else 0
    made.update_layout(title=heading, paper_bgcolor="white", width=width, margin={"t": 56 + legend, "r": 24})
    made.update_layout(height=made.layout.height + 44 + legend)
    return made
