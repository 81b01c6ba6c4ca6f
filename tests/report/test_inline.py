"""Tables and charts that a notebook shows: escaped, to scale, and in need of nothing else."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from coterie.report.inline import COLOURS, LABEL, MAX_ROWS, NAMED_BARS, PLOT, Bar, _ticks, gain_chart, table

EVIL = '<script>alert("&")</script>'
SVG = "{http://www.w3.org/2000/svg}"


def chart(bars, metric="accuracy"):
    return ET.fromstring(gain_chart("Gain", metric, bars))


def rects(svg):
    return [node for group in svg.iter(f"{SVG}g") for node in group.iter(f"{SVG}rect")]


def test_a_table_escapes_all_that_it_is_given():
    text = table(EVIL, ["client", EVIL], [[EVIL, "1"]], ["mean", EVIL])
    assert "<script" not in text
    parsed = ET.fromstring(text)  # and it is well-formed
    assert [cell.text for cell in parsed.iter("td")] == [EVIL, "1", "mean", EVIL]
    assert parsed.find(".//caption").text == EVIL


def test_a_table_of_very_many_rows_says_what_it_leaves_out():
    text = table("t", ["client", "x"], [[f"c{i}", "1"] for i in range(MAX_ROWS + 7)])
    assert "and 7 more: to_pandas() has all" in text
    assert f"c{MAX_ROWS - 1}<" in text
    assert f"c{MAX_ROWS}<" not in text


def test_a_bar_is_as_long_as_its_gain():
    bars = [Bar("a", 0.1, 0.05, 0.15, "gains"), Bar("b", -0.05, -0.1, 0.01, "undecided"), Bar("c", 0.2, 0, 1, "gains")]
    svg = chart(bars)
    c, a, b = rects(svg)  # the largest on top
    point = float(a.get("width")) / 10
    assert point == pytest.approx(float(c.get("width")) / 20, abs=0.1)
    assert point == pytest.approx(float(b.get("width")) / 5, abs=0.1)
    zero = float(a.get("x"))
    assert float(c.get("x")) == zero
    assert float(b.get("x")) + float(b.get("width")) == pytest.approx(zero, abs=0.11)
    assert [node.get("fill") for node in (c, a, b)] == [COLOURS["gains"], COLOURS["gains"], COLOURS["undecided"]]
    interval = next(node for group in svg.iter(f"{SVG}g") for node in group.iter(f"{SVG}line"))  # of c: 0 to 100 points
    assert float(interval.get("x1")) == pytest.approx(zero)
    assert float(interval.get("x2")) == pytest.approx(zero + 100 * point, abs=1)
    assert svg.get("aria-label") == "Gain: 2 gains, 1 undecided"


def test_everything_is_within_the_picture():
    bars = [Bar(f"c{i}", math.sin(i) / 10, -0.3, 0.31, "gains", [0.4, -0.5, math.nan]) for i in range(9)]
    for node in chart(bars).iter():
        for name in ("x1", "x2", "cx"):
            if node.get(name):
                assert LABEL - 0.1 <= float(node.get(name)) <= LABEL + PLOT + 0.1


def test_names_are_escaped_and_nothing_is_fetched():
    text = gain_chart(EVIL, "accuracy", [Bar(EVIL, 0.1, 0.0, 0.2, "gains")])
    assert "<script" not in text
    said = ET.fromstring(text)
    assert EVIL in said.find(f".//{SVG}title").text
    assert re.findall(r"https?://\S+?\"", text) == ['http://www.w3.org/2000/svg"']  # the name of a language
    assert "url(" not in text


def test_many_bars_are_thin_and_without_names():
    few, many = ([Bar(f"client {i}", i / 1000, 0, 1, "gains") for i in range(n)] for n in (NAMED_BARS, NAMED_BARS + 1))
    assert "client 3<" in gain_chart("Gain", "accuracy", few)
    assert ">client 3<" not in gain_chart("Gain", "accuracy", many)
    height = float(chart([Bar(f"c{i}", 0.1, 0, 1, "gains") for i in range(500)]).get("viewBox").split()[3])
    assert height < 1700


def test_unknown_gains_are_left_out():
    assert gain_chart("Gain", "accuracy", [Bar("a", math.nan, math.nan, math.nan, "undecided")]) == ""
    assert len(rects(chart([Bar("a", math.nan, 0, 0, "gains"), Bar("b", 0.0, math.nan, math.nan, "undecided")]))) == 1


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 1), (-3, 7), (-100, 0), (-1e-7, 2e-7), (0, 5.99), (-12345, 0.1)])
def test_ticks_are_round_and_enclose(low, high):
    ticks = _ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 9
    assert any(abs(tick) < 1e-12 for tick in ticks) or low > 0
