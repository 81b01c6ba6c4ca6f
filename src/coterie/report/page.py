"""Renders a page as one HTML file with all figures and the drawing library inside, so that nothing is downloaded."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from functools import cache
from importlib import metadata, resources
from typing import Any

import numpy as np

from coterie.report.block import Note, Page, Picture, Section, Table
from coterie.report.style import DARK

_NUMBER = ' class="number"'
LEVEL = 4  # of packing; 6, gzip's own, takes twice as long for a file that is 4 % smaller


def render(page: Page) -> str:
    """Return the text of the HTML file."""
    from coterie import __version__

    drawn_by = f"figures by plotly {metadata.version('plotly')}"
    escaped = {name: html.escape(getattr(page, name)) for name in ("title", "subtitle", "verdict")}
    figures = {picture.name: _figure(picture) for picture in page.pictures}
    tiles = "".join(
        f'<div class="tile"><dt>{html.escape(what)}</dt><dd>{html.escape(value)}</dd>'
        f'<dd class="beside">{html.escape(beside)}</dd></div>'
        for what, value, beside in page.tiles
    )
    links = "".join(f'<a href="#s{k}">{html.escape(section.heading)}</a>' for k, section in enumerate(page.sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="Coterie {__version__}">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline' blob:; img-src data: blob:">
<title>{escaped["title"]} · Coterie</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<div class="bar"><span class="mark">Coterie</span><button id="theme" type="button">Dark</button></div>
<h1>{escaped["title"]}</h1>
<p class="subtitle">{escaped["subtitle"]}</p>
<p class="verdict" id="verdict">{escaped["verdict"]}</p>
<dl class="tiles">{tiles}</dl>
<nav>{links}</nav>
</header>
<main>
<p id="trouble" class="note" hidden></p>
{"".join(_section(k, section) for k, section in enumerate(page.sections))}
</main>
<footer>Written by Coterie {__version__}; {drawn_by}, included in this file.</footer>
<script type="application/json" id="figures">{_json(figures)}</script>
<script type="application/json" id="dark">{_json(DARK)}</script>
<script type="text/plain" id="library">{_library()}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _section(k: int, section: Section) -> str:
    blocks = "".join(_block(block) for block in section.blocks)
    return f'<section id="s{k}"><h2>{html.escape(section.heading)}</h2><div class="grid">{blocks}</div></section>\n'


def _block(block: Picture | Table | Note) -> str:
    if isinstance(block, Note):
        return f'<p class="note">{html.escape(block.text)}</p>'
    return _picture(block) if isinstance(block, Picture) else _table(block)


def _picture(picture: Picture) -> str:
    height, heading = int(picture.figure.layout["height"]), html.escape(picture.heading)
    return (
        f'<figure class="card{" half" if picture.half else ""}" data-figure="{html.escape(picture.name)}">'
        f"<h3>{heading}</h3><figcaption>{html.escape(picture.caption)}</figcaption>{_control(picture)}"
        f'<div class="plot" role="img" aria-label="{heading}" style="height:{height}px"></div></figure>'
    )


def _control(picture: Picture) -> str:
    if not picture.states:
        return ""
    name, about = html.escape(picture.name), html.escape(picture.about)
    if picture.control == "slider":
        last, label = len(picture.states) - 1, html.escape(picture.states[picture.start].label)
        return (
            f'<label class="control">{about} <output>{label}</output>'
            f'<input type="range" min="0" max="{last}" value="{picture.start}" aria-label="{about}" '
            f'data-control="{name}" data-group="{html.escape(picture.group)}"></label>'
        )
    options = "".join(f'<option value="{k}">{state.label}</option>' for k, state in enumerate(picture.states))
    return f'<label class="control">{about} <select data-control="{name}">{options}</select></label>'


def _table(table: Table) -> str:
    right = [any(isinstance(row[k], tuple) for row in table.rows) for k in range(len(table.columns))]
    head = "".join(
        f'<th scope="col" aria-sort="none"{_NUMBER * is_number}><button type="button">{html.escape(name)}</button></th>'
        for name, is_number in zip(table.columns, right, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    foot = "".join(f"<tr>{''.join(map(_foot, row, right))}</tr>" for row in table.foot)
    caption = f"<figcaption>{html.escape(table.caption)}</figcaption>" if table.caption else ""
    heading = html.escape(table.heading)
    # A region that scrolls can be reached, and so scrolled, with the keyboard.
    return (
        f'<figure class="card table" data-table="{html.escape(table.name)}"><h3>{heading}</h3>{caption}'
        f'<div class="scroll" role="region" aria-label="{heading}" tabindex="0">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"
        '</div><p class="copy"><button type="button" data-copy="markdown">Copy as Markdown</button>'
        '<button type="button" data-copy="latex">Copy as LaTeX</button><span role="status"></span></p></figure>'
    )


def _cell(cell: Any) -> str:
    text, key = cell if isinstance(cell, tuple) else (cell, None)
    if not isinstance(cell, tuple):
        return f"<td>{html.escape(str(text))}</td>"
    known = key is not None and key == key
    return f'<td class="number" data-key="{float(key) if known else ""}">{html.escape(str(text))}</td>'


def _foot(text: str, is_number: bool) -> str:
    return f"<td{_NUMBER * is_number}>{html.escape(text)}</td>"


def _figure(picture: Picture) -> dict[str, Any]:
    states = [{"label": s.label, "axis": s.axis, "traces": _json_values(s.traces)} for s in picture.states]
    data, layout = _json_values(picture.figure.data), _json_values(picture.figure.layout)
    return {"data": data, "layout": layout, "states": states, "at": picture.start}


def _json_values(value: Any) -> Any:
    """Convert to JSON values: float arrays in base64, which plotly.js reads, and null for NaN and infinity."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        packed = base64.b64encode(np.ascontiguousarray(value, dtype="<f4").tobytes()).decode()
        return {"dtype": "f4", "bdata": packed, "shape": ", ".join(map(str, value.shape))}
    if isinstance(value, np.ndarray | np.generic):
        return _json_values(value.tolist())
    if isinstance(value, dict):
        return {key: _json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


@cache
def _library() -> str:
    """Return plotly.js, packed; it is read as a file, since importing plotly takes longer."""
    whole = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(whole, LEVEL, mtime=0)).decode()


def _asset(name: str) -> str:
    return resources.files("coterie.report").joinpath("assets", name).read_text(encoding="utf-8")
