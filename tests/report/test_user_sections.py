"""Sections of one's own in report.html."""

import json
import re
import warnings

import plotly.graph_objects as go
import pytest

from coterie.core.errors import ConfigError, CoterieWarning
from coterie.experiment.resolve import resolve
from coterie.report import write
from coterie.report.block import ControlState, Note, Picture, Section, Table
from coterie.report.figure import Figure
from coterie.report.user_sections import users_sections
from coterie.report.write import make
from tests.cli.commands import cli
from tests.report.runs import run

HERE = __name__


def worst(run, *, clients: int = 2):
    """The clients <that> are worst off."""
    rows = [[name, "<b>bold</b>"] for name in run.names[:clients]]
    figure = go.Figure(go.Bar(x=run.names, y=run.scores()), layout={"title": {"text": "bars"}, "height": 200})
    return ["plain & <i>text</i>", Table("worst", "Worst", ["client", "what"], rows), figure]


def own_heading(run):
    figure = Figure([{"type": "bar", "y": [1]}])
    states = [ControlState("<u>", [{}])]
    return Section("A <heading>", [Note("a note"), Picture("data", "drawn", "caption", figure, states)])


def methods(runs):
    return Table("runs", "Runs", ["method"], [[each.method] for each in runs])


def nothing(run): ...


def fails(run):
    return run.names["first"]


def empty(run):
    return []


def odd(run):
    return [3.0]


def ragged(run):
    return Table("ragged", "Ragged", ["a", "b"], [["1"]])


def no_section(folder): ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    run(out, "fedavg", report=True, sections=[f"{HERE}:worst:clients=1", f"{HERE}:own_heading"])
    return out


def figures(page):
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)[1])


def test_sections_are_in_the_report_before_the_configuration(folder):
    headings = [section.heading for section in make([folder]).sections]
    assert headings[-3:] == ["The clients <that> are worst off", "A <heading>", "Configuration"]
    page = (folder / "report.html").read_text()
    assert "<h2>The clients &lt;that&gt; are worst off</h2>" in page
    assert "<h2>A &lt;heading&gt;</h2>" in page
    for text in ("<b>bold</b>", "<i>text</i>", "<heading>", "<u>"):
        assert text not in page
    assert page.count("&lt;b&gt;bold&lt;/b&gt;") == 1, "its option says one client"
    drawn = figures(page)
    assert drawn["own-1-3"]["layout"]["height"] == 200
    assert "template" not in drawn["own-1-3"]["layout"]
    assert drawn["own-1-3"]["layout"]["font"] == drawn["own-2-2"]["layout"]["font"] == drawn["data"]["layout"]["font"]
    assert "<h3>bars</h3>" in page


def test_the_report_finds_them_again_and_takes_more(folder, tmp_path):
    again = figures(write(folder, tmp_path / "again.html").read_text())
    first = figures((folder / "report.html").read_text())
    own = [name for name in first if name.startswith("own-")]
    assert len(own) == 2
    assert [again[name] for name in own] == [first[name] for name in own]
    page = write(folder, tmp_path / "more.html", sections=[f"{HERE}:methods"]).read_text()
    assert "<h2>Methods</h2>" in page
    assert "<h2>A &lt;heading&gt;</h2>" in page
    done = cli("report", folder, "--out", tmp_path / "cli.html", "--section", f"{HERE}:methods")
    assert done.exit_code == 0
    assert (tmp_path / "cli.html").read_text() == page
    wrong = cli("report", folder, "--section", f"{HERE}:worst:top=1", "--section", f"{HERE}:gone")
    assert wrong.exit_code == 2
    assert "no option 'top'" in wrong.output
    assert "cannot be imported" in wrong.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", r"TypeError: list indices.*\(.*in fails: `return run.names\["),
        ("empty", "it returned no blocks"),
        ("odd", "it returned a float; a block is a Note, Table, Picture, text or a plotly figure"),
        ("ragged", "table 'ragged' has 2 columns, but 1 in a row"),
        ("gone", "cannot be imported"),
    ],
)
def test_one_that_fails_costs_a_warning_and_not_the_report(folder, tmp_path, name, words):
    with pytest.warns(CoterieWarning, match=f"report section '{HERE}:{name}' is missing from the report: .*{words}"):
        page = write(folder, tmp_path / "report.html", sections=[f"{HERE}:{name}", f"{HERE}:methods"]).read_text()
    assert "<h2>Methods</h2>" in page


def test_none_leaves_it_out(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert users_sections([f"{HERE}:nothing"], [None]) == []


def test_a_comparison_has_those_for_several_runs(folder, tmp_path):
    other = tmp_path / "other"
    run(other, "fedamp", rounds=2, sections=[f"{HERE}:methods"])
    with pytest.warns(CoterieWarning, match="it shows one run, and this report compares several") as found:
        page = make([folder, other])
    assert len(found) == 2
    (table,) = [section.blocks[0] for section in page.sections if section.heading == "Methods"][-1:]
    assert {"fedavg", "fedamp"} <= {row[0] for row in table.rows}


def test_all_mistakes_are_reported_before_the_run():
    with pytest.raises(ConfigError) as found:
        resolve({"sections": [f"{HERE}:worst:clients=x", f"{HERE}:no_section", f"{HERE}:HERE"], "rounds": 0})
    text = str(found.value)
    assert all(word in text for word in ("clients = 'x'", "first parameter is `run` or `runs`", "rounds = 0"))


def test_a_stop_is_shown(tmp_path):
    out = tmp_path / "run"
    result = run(out, "fedavg", rounds=40, lr=1.0, early_stop=1, report=True)
    text = (out / "report.html").read_text()
    assert result.stopped is not None
    assert "stopped early, of 40 planned rounds" in text
    assert f"{result.selected} of {len(result.rounds)}" in text
    assert f"This run stopped after round {result.stopped.round} of 40 by early_stop" in text


def test_a_package_adds_sections(folder, tmp_path, package_of):
    package_of("report section", **{"all-runs": f"{HERE}:methods"})
    assert "<h2>Methods</h2>" in write(folder, tmp_path / "report.html", sections=["all-runs"]).read_text()
