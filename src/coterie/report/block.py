"""What a page is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import plotly.graph_objects as go

Trace = dict[str, Any]  # as plotly.js has it; a dict, since checking thousands of them costs seconds


@dataclass(frozen=True)
class State:
    """One position of a figure's control: these traces take the place of the figure's."""

    label: str
    traces: list[Trace]
    axis: str | None = None  # a new title of the y axis


@dataclass(frozen=True)
class Picture:
    """A figure with a heading and one sentence that says how to read it."""

    name: str  # of its files
    heading: str
    says: str
    figure: go.Figure
    states: list[State] = field(default_factory=list)  # empty: it has no control
    control: Literal["slider", "choose"] = "choose"
    about: str = ""  # the control's label
    group: str = ""  # controls of one group move together
    start: int = 0
    half: bool = False  # half as wide as the page, where the page is wide enough


@dataclass(frozen=True)
class Table:
    """Cells are text, or (text, what it is sorted by)."""

    name: str
    heading: str
    columns: list[str]
    rows: list[list[Any]]
    says: str = ""
    foot: list[list[str]] = field(default_factory=list)  # stay at the end


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Section:
    heading: str
    blocks: list[Picture | Table | Note]


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    verdict: str
    tiles: list[tuple[str, str, str]]  # what, value, beside it
    sections: list[Section]

    @property
    def pictures(self) -> list[Picture]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
