import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coterie.experiment.reproduce import page as pages
from coterie.experiment.reproduce.figures.catalogue import FIGURES
from coterie.experiment.reproduce.figures.svg import draw
from coterie.experiment.reproduce.markdown import difference_of, heading, is_far, markdown, p_of
from coterie.experiment.reproduce.measured import Measured
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.scores import Pair, Row
from coterie.experiment.reproduce.tables import Entry, Protocol

from .kit import small_table

DOCS = Path(__file__).parents[3] / "docs"
KEPT = json.loads((DOCS / "reproduce.json").read_text())


def row(label, protocol, selected=(50.0, 52.0), clients=()):
    return Row(label, list(range(len(protocol))), list(protocol), list(selected), list(clients), [1, 2], 30.0, 0.5)


@pytest.fixture
def measured():
    rows = {
        "Alone, as long": row("Alone, as long", (49.0, 50.0), clients=np.arange(10.0)),
        "FedProx": row("FedProx", (55.0, 57.0)),
    }
    pairs = [Pair("Alone, as long", "FedProx", -1.5, 0.5, 20, 0.012)]
    return Measured("small", "full", rows, pairs, ("2026-01-01", "2026-01-03"))


def test_a_table_in_markdown(measured):
    text = markdown(small_table(), measured)
    assert "| Alone, as long | 50.00 ± 0.50 | 49.50 ± 0.71 | -0.50 | 51.00 ± 1.41 |  |" in text
    assert "| FedProx |  | 56.00 ± 1.41 |  | 51.00 ± 1.41 | +1.50 ± 0.50 (p = 0.012) |" in text
    assert "| FedAvg | 60.00 | not run | not run | not run | not run |" in text
    assert "| 1 | 0.00 / 0.00 |" in text  # the first client: the paper's, and measured
    assert "| FedProx | **+1.50** |  |" in text
    words = heading(small_table(), measured)
    assert words.startswith("`coterie reproduce small`, 2 seeds, 2026-01-01 to 2026-01-03, 60 s of rounds in all.")


def test_models_sent_are_shown_where_a_table_counts_them(measured):
    assert "models sent" not in markdown(small_table(), measured)
    measured.rows["FedProx"] = replace(measured.rows["FedProx"], models=2.04)
    text = markdown(small_table(counts_models=True), measured)
    assert "over local at equal steps | models sent, a client and round |" in text
    assert "| +1.50 ± 0.50 (p = 0.012) | 2.0 |" in text


def test_tests_between_rows_of_a_table_of_variations_say_what_they_compare(measured):
    table = small_table(protocol=Protocol("variation", "accuracy", over="variation"))
    assert "<summary>Every two methods, accuracy</summary>" in markdown(table, measured)


def test_what_is_far_from_the_paper():
    """Two standard deviations: of 49 and 51, sqrt 2, and the paper's own."""
    entry = Entry("a", "fedavg", 52.7)
    assert not is_far(entry, row("a", (49.0, 51.0)))
    assert is_far(Entry("a", "fedavg", 52.9), row("a", (49.0, 51.0)))
    assert not is_far(Entry("a", "fedavg", 52.9, sd=0.5), row("a", (49.0, 51.0)))
    assert is_far(entry, row("a", (51.6,)))
    assert not is_far(entry, row("a", (52.0,)))
    assert difference_of(Entry("a", "fedavg", 40.0), row("a", (49.0, 51.0))) == "**+10.00**"
    assert [p_of(p) for p in (0.0001, 0.0123, 0.5)] == ["p < 0.001", "p = 0.012", "p = 0.50"]


def test_the_page_is_what_the_generator_makes_of_what_was_measured():
    again = pages.page(KEPT, pages.read_explained(DOCS))
    assert (DOCS / "reproduce.md").read_text() == again, "run python -m coterie.experiment.reproduce.page"
    for key, made in KEPT["figures"].items():
        assert (DOCS / "reproduce" / pages.file_of(key)).read_text() == draw(made["drawing"]), key


def test_what_was_measured_is_of_tables_that_there_are():
    for key, value in KEPT["tables"].items():
        table, measured = TABLES[value["name"]], Measured.from_json(value)
        assert key == pages.key_of(measured.name, measured.size)
        labels = {entry.label for entry in table.entries}
        assert set(measured.rows) <= labels, key
        for each in measured.rows.values():
            assert len(each.protocol) == len(each.selected) == len(each.seeds) > 0, key
            assert all(0 <= number <= 100 for number in each.selected), key
    assert {key.removesuffix(" small") for key in KEPT["figures"]} <= set(FIGURES)


def test_every_row_far_from_the_paper_is_explained_or_said_not_to_be():
    explained = pages.read_explained(DOCS)
    for key, labels in pages.far_rows(KEPT).items():
        told = {label for each in explained.get(key, {}).get("rows", []) for label in each["of"]}
        assert set(labels) <= told, f"{key}: reproduce.toml says nothing of {sorted(set(labels) - told)}"
    known = {*KEPT["tables"], *KEPT["figures"], "intro", *pages.PAPERS}
    assert set(explained) <= known


def test_findings_link_to_headings_that_there_are():
    heads = re.findall(r"^#+ (.*)$", (DOCS / "reproduce.md").read_text(), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    linked = re.findall(r"\(reproduce\.md#([^)]+)\)", (DOCS / "findings.md").read_text())
    assert len(linked) > 5
    assert set(linked) <= anchors


def test_measured_tables_stay_until_they_are_measured_with_as_many_results(tmp_path, measured, monkeypatch):
    monkeypatch.setattr(pages, "TABLES", {"small": small_table()})
    monkeypatch.setattr(pages, "FIGURES", {})
    monkeypatch.setattr(pages, "measure", lambda *_: measured)
    kept = {"tables": {"small": {**measured.to_json(), "dates": ["2025-01-01"] * 2}, "gone": {}}, "figures": {}}
    found = pages.collect(kept, None)["tables"]
    assert list(found) == ["small"]  # as many: it is taken over
    assert found["small"]["dates"][0] == "2026-01-01"
    fewer = Measured("small", "full", dict([*measured.rows.items()][:1]), [], ("2026-02-01",) * 2)
    monkeypatch.setattr(pages, "measure", lambda *_: fewer)
    assert pages.collect({"tables": found, "figures": {}}, None)["tables"] == found
