"""The page about a recommendation shows what is in recommendation.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.core.errors import CheckpointError
from coterie.report import write
from coterie.report.block import Note, Table
from coterie.report.recommendation import page

LEAD = {"mean": 0.031, "low": 0.012, "high": 0.05, "error": 0.01}
FOUND: dict[str, Any] = {
    "format": 1,
    "method": "ditto",
    "settings": {"method": "ditto", "model": "linear", "rounds": 3, "hyper": {"lam": 0.1}},
    "look": {"sites": 3, "least": 20, "median": 30, "most": 40, "labels": [0.21, 0.04], "inputs": None},
    "choice": {
        "scores": {"local": 0.7, "ditto": 0.731, "fedavg": None},
        "best": "ditto",
        "chosen": "ditto",
        "candidate": "ditto",
        "second": "local",
        "over_local": {"ditto": LEAD, "fedavg": {"mean": -0.02, "low": -0.04, "high": -0.01, "error": 0.01}},
        "over_second": LEAD,
        "benefit": {
            "clients": [
                {"client": "a<b", "gain": -0.02, "low": -0.04, "high": -0.01, "verdict": "loses"},
                {"client": "c", "gain": 0.09, "low": 0.02, "high": 0.16, "verdict": "gains"},
                {"client": "d", "gain": None, "low": None, "high": None, "verdict": "undecided"},
            ]
        },
    },
    "costs": {name: {"bytes_a_site": 1020.0, "minutes": 0.5} for name in ("local", "ditto", "fedavg")},
    "left_out": {"fedper": "a linear model has no body"},
    "budget": 6,
    "folds": 2,
    "metric": "auroc",
}


def written(folder: Path, found: dict[str, Any]) -> Path:
    (folder / "recommendation.json").write_text(json.dumps(found))
    return folder


def test_the_page_has_the_methods_the_sites_and_the_settings(tmp_path: Path) -> None:
    made = page(written(tmp_path, FOUND))
    assert made.title == "Recommended: ditto"
    assert "ditto is 3.1 points better than training alone" in made.verdict
    assert "[+1.2, +5.0]" in made.verdict
    methods, over_local = made.sections[0].blocks
    assert isinstance(methods, Table)
    assert [row[0] for row in methods.rows] == ["local", "ditto", "fedavg", "fedper"]
    assert methods.rows[1][1:4] == [("73.1", 0.731), "+3.1 points", "[+1.2, +5.0]"]
    assert "no body" in methods.rows[3][1][0]
    lines, dots = over_local.figure.data[:2]  # type: ignore[union-attr]
    np.testing.assert_allclose([*lines["x"], *dots["x"]], [1.2, 5.0, 3.1])
    by_site, looked = made.sections[1].blocks
    places = [float(trace["x"][0]) for trace in by_site.figure.data[1::2]]  # type: ignore[union-attr]
    assert places[:2] == pytest.approx([9.0, -2.0])  # the largest gain first
    assert isinstance(looked, Note)
    assert "21 %" in looked.text
    assert "standard deviations" not in looked.text
    assert ["hyper.lam", "0.1"] in made.sections[2].blocks[0].rows  # type: ignore[union-attr]


def test_where_nobody_looked_and_nothing_beats_local(tmp_path: Path) -> None:
    found = copy.deepcopy(FOUND)
    found["look"]["labels"], found["method"] = None, "local"
    found["choice"] |= {"chosen": "local", "candidate": "local", "best": "local", "benefit": None}
    made = page(written(tmp_path, found))
    assert made.verdict == "Let every site train alone: none of ditto, fedavg does better on held-out examples."
    assert [section.heading for section in made.sections] == ["Methods", "Settings"]
    found["choice"]["best"] = "ditto"
    assert "no method is known to beat it. ditto scores best" in page(written(tmp_path, found)).verdict


def test_it_is_written_as_one_file(tmp_path: Path) -> None:
    text = write(written(tmp_path, FOUND)).read_text()
    assert "Recommended: ditto" in text
    assert "a<b" not in text, "names are escaped"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="recommendation"):
        page(written(tmp_path, {"method": "ditto"}))
