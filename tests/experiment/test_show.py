"""Results and comparisons as HTML, figures and data frames."""

import builtins
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import coterie
from coterie import CoterieError
from coterie.report import read, scores
from tests.experiment.conftest import QUICK, two_kinds

EVIL = "<img src=x onerror=alert(1)>"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    data = two_kinds(4)
    data[EVIL] = data.pop("site-1")
    return coterie.run("fedavg", data, out=tmp_path_factory.mktemp("show") / "run", report=False, **QUICK)


@pytest.fixture(scope="module")
def comparison():
    return coterie.compare(("local", "fedavg"), 2, two_kinds(3), **QUICK)


def cells(html, tag="td"):
    return [
        [cell.text for cell in row.iter(tag)] for row in ET.fromstring(html).iter("tr") if row.find(tag) is not None
    ]


def test_a_result_is_a_table_of_clients_and_a_chart(result):
    html = result._repr_html_()
    assert EVIL not in html
    heads, rows = cells(html, "th")[0], cells(html)
    assert heads == ["client", "train", "local", "fedavg", "gain", "95 % interval", "verdict"]
    assert [row[0] for row in rows] == [*result.names, "mean of 4"]
    for row, client, gain in zip(rows, result.clients, result.gains(), strict=False):
        assert row[1] == str(client["train"])
        assert row[3] == f"{100 * client[f'test_{result.metric}']:.1f}"
        assert float(row[4].replace("−", "-")) == pytest.approx(100 * gain, abs=0.0501)
        assert row[6] == client["verdict"]
    assert rows[-1][3] == f"{100 * result.mean():.1f}"
    groups = ET.fromstring(html).iter(f"{SVG}g")
    assert len(list(groups)) == 4


def test_a_result_without_a_reference_has_no_gains():
    alone = coterie.run("fedavg", two_kinds(2), reference=False, **QUICK)
    html = alone._repr_html_()
    assert "<svg" not in html
    assert cells(html, "th")[0] == ["client", "train", "fedavg"]
    with pytest.raises(CoterieError, match=r"plot\('rounds'\)"):
        alone.plot("gain")
    assert alone.plot().layout.title.text == "Round by round"


def test_a_comparison_is_a_table_of_methods_and_a_chart(comparison):
    html = comparison._repr_html_()
    rows = cells(html)
    assert [row[0] for row in rows[:2]] == ["local", "fedavg"]
    mean = f"{100 * comparison.mean('fedavg'):.1f} ± {100 * comparison.std('fedavg'):.1f}"
    assert rows[1][1] == mean
    counts = [len(comparison.benefit("fedavg").who(verdict)) for verdict in ("gains", "loses", "undecided")]
    assert rows[1][4:] == list(map(str, counts))
    assert [row[0] for row in rows[2:]] == comparison.clients
    assert len(list(ET.fromstring(html).iter(f"{SVG}circle"))) == 3  # a dot for each client


def test_a_comparison_without_local_says_so():
    found = coterie.compare(("fedavg",), 1, two_kinds(2), **QUICK)
    assert "add local to the methods" in found._repr_html_()
    assert "<svg" not in found._repr_html_()
    with pytest.raises(CoterieError, match="compare local"):
        found.plot("gain")
    assert found.plot().layout.title.text == "Distribution over clients"


def test_in_a_console_they_are_one_line(result, comparison):
    """A notebook keeps this beside the HTML, so it must not hold all tensors."""
    assert repr(result) == f"<Result of fedavg on own-data, 4 clients, round {result.selected} of 2: test " + (
        f"{result.metric} {result.mean():.4g}>"
    )
    assert repr(comparison).startswith("<Comparison of 3 clients, 2 seeds: test")
    assert f"fedavg {comparison.mean('fedavg'):.4g}" in repr(comparison)


def test_pictures_are_those_of_the_report(result):
    """What is drawn from memory is what a report draws from the run's folder."""
    kept = read.read(result.path)
    for what, picture in (("gain", scores.gains(kept)), ("rounds", scores.curves(kept))):
        made = result.plot(what)
        assert len(made.data) == len(picture.figure.data)
        for mine, theirs in zip(made.data, picture.figure.data, strict=True):
            np.testing.assert_allclose(np.asarray(mine.x, float), np.asarray(theirs["x"], float), atol=1e-6)
            np.testing.assert_allclose(np.asarray(mine.y, float), np.asarray(theirs["y"], float), atol=1e-4)
    assert result.plot().layout.title.text == "Gain over training alone"
    assert len(result.plot("clients").data) == 2
    assert EVIL not in str(result.plot().layout.yaxis.ticktext)


def test_pictures_of_a_comparison(comparison):
    gain = comparison.plot()
    np.testing.assert_allclose(gain.data[0].x, 100 * comparison.client_gains("fedavg"))
    assert [trace.name for trace in comparison.plot("clients").data] == ["local", "fedavg"]


def test_pictures_that_do_not_exist(result, comparison):
    for each in (result, comparison):
        with pytest.raises(CoterieError, match=r"no picture 'pie'.*there are gain"):
            each.plot("pie")


def test_data_frames(result, comparison):
    pytest.importorskip("pandas")
    clients, rounds = result.to_pandas(), result.to_pandas("rounds")
    assert list(clients["client"]) == result.names
    assert clients["gain"].tolist() == pytest.approx(result.gains().tolist())
    assert len(rounds) == 2 * 4
    last = rounds[(rounds["round"] == 2) & (rounds["client"] == "site-3")].iloc[0]
    assert last["test_loss"] == result.rounds[1]["test"]["loss"][result.names.index("site-3")]
    assert len(comparison.to_pandas()) == 2 * 2 * 3
    with pytest.raises(CoterieError, match="there are clients, rounds"):
        result.to_pandas("sites")


def test_pandas_is_imported_only_there(result, monkeypatch):
    really = builtins.__import__

    def without(name, *more):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'")
        return really(name, *more)

    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CoterieError, match="pip install pandas"):
        result.to_pandas()
    assert result._repr_html_()
    assert "pandas" not in sys.modules
