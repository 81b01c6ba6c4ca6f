import io

import pytest
from rich.console import Console

from coterie.cli.progress import Bars, Lines, watch


def record(number, validation=True):
    scores = {"validation": {"accuracy": [0.5, 0.7]}} if validation else {}
    return {"round": number, "info": {"loss": [0.5, 0.75]}, "seconds": 1.23, **scores}


def test_plain_lines():
    text = io.StringIO()
    with Lines(Console(file=text), measures=True) as lines:
        lines.start("fedmap", 2, 4)
        lines.round(record(3), "accuracy")
        lines.round(record(4, validation=False), "accuracy")
        lines.stop()
    told = text.getvalue().splitlines()
    assert "compiling" in told[0]  # so that half a minute of silence is explained
    assert told[1:] == [
        "fedmap: continuing after round 2 of 4",
        "fedmap round 3/4 loss 0.625 validation accuracy 0.600 1.2 s",
        "fedmap round 4/4 loss 0.625 1.2 s",
    ]


def test_a_bar_on_a_terminal():
    text = io.StringIO()
    with Bars(Console(file=text, force_terminal=True, width=100, color_system=None), measures=True) as bars:
        bars.say("fedmap: stacked")
        bars.start("fedmap", 0, 4)
        bars.round(record(1), "accuracy")
        bars.stop()
        with pytest.raises(KeyboardInterrupt):
            _interrupted(bars)
    told = text.getvalue()
    assert "choosing the fastest engine" in told
    assert "fedmap: stacked\n" in told
    assert "fedmap round 1/4" in told
    assert "loss 0.625 validation 0.600" in told
    assert "left" in told
    assert "fedmap round 1: loss 0.625 validation accuracy 0.600, 1.2 s" in told
    assert told.count("\x1b[?25l") == told.count("\x1b[?25h")  # the cursor is back


def _interrupted(bars):
    bars.start("local", 0, 4)
    raise KeyboardInterrupt


def test_a_debugger_has_the_terminal_to_itself(monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with watch(False, measures=False) as usual:
        assert isinstance(usual, Bars)
    with watch(False, measures=False, debug=True) as told:
        assert isinstance(told, Lines)
