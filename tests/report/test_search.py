"""The page about a search shows what is in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coterie.core.errors import CheckpointError
from coterie.experiment.tuning.tune import tune
from coterie.report import write
from coterie.report.block import Picture, Table
from coterie.report.search import page
from tests.experiment.tuning.kit import SMALL, federation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("search") / "search"
    tune(["ditto"], federation("same"), out=out, **{**SMALL, "rounds": 6, "trials": 5})
    return out


def test_the_page_has_every_candidate_and_what_was_chosen(folder: Path) -> None:
    made = page(folder)
    told = json.loads((folder / "tuning.json").read_text())
    assert [section.heading for section in made.sections] == ["Chosen", "What mattered", "The search", "Test"]
    assert told["best"] in made.tiles[0]
    assert made.tiles[1][1] == f"{told['rounds_of_each']} rounds"
    chosen = made.sections[0].blocks[0]
    assert isinstance(chosen, Table)
    assert [row[0] for row in chosen.rows] == ["local", "ditto"]
    score = told["methods"]["ditto"]["chosen"]["validation_balanced_accuracy"]
    assert chosen.rows[1][2] == (f"{100 * score:.1f}", score)
    curves = next(picture for picture in made.pictures if picture.name == "search")
    assert [state.label for state in curves.states] == ["local", "ditto"]
    assert [len(state.traces) for state in curves.states] == [5, 5]
    longest = max(np.nanmax(trace["y"]) for trace in curves.states[1].traces)
    assert longest >= 100 * score - 1e-9


def test_importances_are_those_of_the_summary(folder: Path) -> None:
    told = json.loads((folder / "tuning.json").read_text())["methods"]["ditto"]["importance"]
    bars = next(picture for picture in page(folder).pictures if picture.name == "importance")
    assert isinstance(bars, Picture)
    assert sorted(np.round(bars.figure.data[0]["x"][1:], 6)) == sorted(np.round([100 * v for v in told.values()], 6))


def test_it_is_one_file(folder: Path) -> None:
    path = write(folder)
    assert path == folder / "report.html"
    assert "Candidates round by round" in path.read_text()


def test_a_search_that_is_not_finished_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text((folder / "search.json").read_text())
    with pytest.raises(CheckpointError, match="is not finished"):
        page(tmp_path)
