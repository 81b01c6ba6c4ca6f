"""The notebooks of docs/notebooks were executed, hold nothing of a machine, and say the same when executed again."""

from __future__ import annotations

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")
DIFFERS = re.compile(
    r"\d+\.\d+ s\b|^(?:waiting for sites|round 1 of \d+$).*$", re.M
)  # between one execution and the next


def outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """Every code cell's outputs as text; a picture is its kind."""
    made = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            made.append([as_text(output) for output in cell["outputs"]])
    return made


def as_text(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data or "application/vnd.plotly.v1+json" in data:
        return "a picture"
    if "text/html" in data:
        words: list[str] = []
        parser = HTMLParser()
        parser.handle_data = words.append  # type: ignore[method-assign]
        parser.feed("".join(data["text/html"]))
        return "\n".join(word.strip() for word in words if word.strip())
    return "".join(output.get("text", data.get("text/plain", "")))


def same(was: str, now: str) -> bool:
    """Whether two outputs have the same words, and numbers that differ by rounding at most."""
    was, now = (
        re.sub(r"[ \t]+|[━─]+", " ", re.sub(r"\n+", "\n", DIFFERS.sub("", text))).strip() for text in (was, now)
    )
    if NUMBER.sub("#", was) != NUMBER.sub("#", now):
        return False
    pairs = zip(NUMBER.findall(was), NUMBER.findall(now), strict=True)
    return all(float(now) == pytest.approx(float(was), rel=0.01, abs=0.11) for was, now in pairs)


def test_there_are_three_and_they_are_small() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["add-a-method", "first-federation", "simulation-to-flower"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 400_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_executed_from_top_to_bottom_and_holds_nothing_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell["outputs"]) for cell in cells) >= len(cells) - 3
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert not [output for cell in cells for output in cell["outputs"] if output.get("name") == "stderr"]
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert not re.findall(r"(?<![\w.:/<])/(?:home|root|tmp|work|Users|usr|opt|var)/", text)
    assert not re.findall(r"https?://(?!flower\.ai|www\.w3\.org)", text)


@pytest.mark.parametrize(
    ("was", "now", "equal"),
    [
        ("gain 1.2, 3.4 s", "gain 1.3, 9.9 s", True),
        ("gain 1.2", "gain 2.2", False),
        ("gain 1.2", "loss 1.2", False),
        ("waiting for sites: 1 of 4\nround 2", "round 2", True),
    ],
)
def test_what_counts_as_the_same(was: str, now: str, equal: bool) -> None:
    assert same(was, now) == equal


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_says_the_same_when_executed_again(path: Path) -> None:
    pytest.importorskip("nbclient", reason="pip install 'coterie[docs]' executes notebooks")
    pytest.importorskip("ipykernel")
    if path.stem == "simulation-to-flower":
        pytest.importorskip("flwr")
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / ".ci" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    again = program.executed(path, pictures="plotly_mimetype")
    was, now = outputs(json.loads(path.read_text(encoding="utf-8"))), outputs(again)
    for k, (before, after) in enumerate(zip(was, now, strict=True)):
        for old, new in zip(before, after, strict=True):
            assert same(old, new), f"cell {k + 1}:\n{old}\n--- now ---\n{new}"
