"""Progress in a notebook."""

import builtins
import sys
import types

import pytest

import coterie
from coterie.experiment import notebook
from coterie.experiment.notebook import NotebookProgress, in_notebook, listener
from coterie.experiment.progress import Silent
from tests.cli.test_progress import record
from tests.experiment.conftest import QUICK, two_kinds


@pytest.fixture
def shown(monkeypatch):
    """What a notebook's one output showed, in order; this process is its kernel."""
    texts = []

    class Output:
        def update(self, html):
            texts.append(html)

    def display(html, *, display_id):
        assert display_id is True
        return Output()

    display_module = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display_module)
    monkeypatch.setattr(builtins, "get_ipython", lambda: types.SimpleNamespace(kernel=1), raising=False)
    return texts


def test_a_bar_becomes_a_line(shown, monkeypatch):
    monkeypatch.setattr(notebook, "SECONDS_BETWEEN", -1)
    tell = NotebookProgress()
    tell.say("<b>engine</b>")
    tell.start("fedmap", 0, 4)
    tell.round(record(1), "accuracy")
    assert '<progress value="1" max="4">' in shown[-1]
    assert "fedmap round 1/4 loss 0.625 validation accuracy 0.600" in shown[-1]
    tell.stop()
    assert "<progress" not in shown[-1]
    assert "fedmap round 1/4: loss 0.625 validation accuracy 0.600, 1.2 s" in shown[-1]
    assert "&lt;b&gt;engine" in shown[-1]
    tell.start("local", 2, 4)  # resumed
    assert '<progress value="2" max="4">' in shown[-1]
    tell.stop()  # before any round
    assert "local round" not in shown[-1]
    assert not any(ord(sign) < 32 for text in shown for sign in text), "no control characters"


def test_it_is_not_drawn_for_every_short_round(shown):
    tell = NotebookProgress()
    tell.start("fedmap", 0, 1000)
    for number in range(1, 1001):
        tell.round(record(number), "accuracy")
    tell.stop()
    assert len(shown) < 100
    assert "fedmap round 1000/1000" in shown[-1]


def test_a_run_in_a_notebook_shows_itself(shown):
    coterie.run("fedavg", two_kinds(2), **QUICK)
    assert "fedavg round 2/2" in shown[-1]
    assert "local round 2/2" in shown[-1]
    shown.clear()
    coterie.run("fedavg", two_kinds(2), progress=False, **QUICK)
    assert not shown


def test_elsewhere_nobody_hears(monkeypatch):
    assert not in_notebook()
    assert isinstance(listener(None), Silent)
    monkeypatch.setattr(builtins, "get_ipython", lambda: types.SimpleNamespace(), raising=False)
    assert not in_notebook()  # IPython on a terminal
    mine = Silent()
    assert listener(mine) is mine
