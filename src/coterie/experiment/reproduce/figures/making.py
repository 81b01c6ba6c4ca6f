"""Makes figures, keeps what they show, and draws them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures.catalogue import FIGURES, Figure
from coterie.experiment.reproduce.figures.svg import draw
from coterie.experiment.reproduce.names import find_table
from coterie.experiment.reproduce.tables import Size
from coterie.storage import files


def sizes_of(figure: Figure) -> tuple[Size, ...]:
    """Return the sizes that a figure has: those of its experiment, or of its tables."""
    return tuple(figure.minutes) or max((find_table(table).sizes() for table in figure.tables), key=len)


def made_file(cache: Cache, name: str, size: Size) -> Path:
    """Return where it is kept what a figure shows."""
    return cache.folder / "figures" / f"{name}{'-small' * (size == 'small')}.json"


def make(name: str, size: Size, cache: Cache) -> dict[str, Any] | None:
    """Return what a figure shows, with its size and date; None if the results that it is made of are not there.

    An experiment's outcome is kept. What results show is looked up again, as there may be more of them.
    """
    figure, path = FIGURES[name], made_file(cache, name, size)
    if figure.experiment is not None and path.exists():
        kept: dict[str, Any] = files.read_json(path)
        return kept
    if figure.experiment is not None:
        shown = figure.experiment(size)
    else:
        assert figure.drawn is not None
        found = figure.drawn(cache, size)
        if found is None:
            return None
        shown = found
    made = {"size": size, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "drawing": shown}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, made)
    files.write_text(path.with_suffix(".svg"), draw(shown))
    return made
