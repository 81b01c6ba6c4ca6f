"""The parts of a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from coterie.report.figure import Figure, Trace


@dataclass(frozen=True)
class ControlState:
    """One position of a figure's control; its traces replace those of the figure."""

    label: str
    traces: list[Trace]
    axis: str | None = None  # new title of the y axis


@dataclass(frozen=True)
class Picture:
    """A figure with a heading and a caption that says how to read it."""

    name: str  # of its image files
    heading: str
    caption: str
    figure: Figure
    states: list[ControlState] = field(default_factory=list)  # empty: no control
    control: Literal["slider", "choose"] = "choose"
    about: str = ""  # the control's label
    group: str = ""  # controls of the same group move together
    start: int = 0
    half: bool = False  # half as wide as the page, if the page is wide enough


@dataclass(frozen=True)
class Table:
    """A table. A cell is text, or (text, the key to sort it by)."""

    name: str
    heading: str
    columns: list[str]
    rows: list[list[Any]]
    caption: str = ""
    foot: list[list[str]] = field(default_factory=list)  # rows that stay at the end when the table is sorted


@dataclass(frozen=True)
class Note:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Section:
    """Blocks under one heading."""

    heading: str
    blocks: list[Picture | Table | Note]


@dataclass(frozen=True)
class Page:
    """All content of an HTML report."""

    title: str
    subtitle: str
    verdict: str
    tiles: list[tuple[str, str, str]]  # label, value, remark
    sections: list[Section]

    @property
    def pictures(self) -> list[Picture]:
        """All figures of the page, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
