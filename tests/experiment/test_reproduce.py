import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.core.errors import ConfigError
from coterie.data import SOURCES
from coterie.experiment import reproduce as module
from coterie.experiment.reproduce import TABLES, Entry, best_round, last_round, markdown, reproduce
from coterie.experiment.setup import prepare
from coterie.models import MODELS


@pytest.fixture
def small(monkeypatch):
    """A table of the same form on the digits, so that it runs in a second."""
    table = dataclasses.replace(
        TABLES["fedmap-1"],
        data="digits",
        entries=(Entry("Alone, as long", "local", 50.0), Entry("FedProx", "fedprox", None, {"mu": 0.1})),
        settings={"rounds": 2, "engine": "loop", "compile": False, "workers": 1},
        seeds=2,
    )
    monkeypatch.setitem(TABLES, "small", table)
    return table


def test_a_table_is_run_once_and_read_back(small, tmp_path, monkeypatch):
    rows = reproduce("small", tmp_path)
    assert [row.label for row in rows] == ["Alone, as long", "FedProx"]
    assert all(len(row.protocol) == 2 for row in rows)
    text = (tmp_path / "small" / "table.md").read_text()
    assert "| Alone, as long | 50.00 |" in text
    assert "2 seeds" in text
    monkeypatch.setattr(module, "prepare", lambda *_, **__: pytest.fail("ran it again"))
    assert reproduce("small", tmp_path) == rows


def test_a_stopped_table_goes_on(small, tmp_path, monkeypatch):
    whole = reproduce("small", tmp_path / "whole")
    calls = []

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return prepare(*args, **options)

    monkeypatch.setattr(module, "prepare", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce("small", tmp_path / "cut")
    assert reproduce("small", tmp_path / "cut") == whole


def test_scores_follow_the_protocols(small, tmp_path):
    setup = prepare("local", "digits", rounds=3, engine="loop", compile=False, workers=1, reference=False)
    result = module.run_setup(setup, None)
    last, chosen = last_round(result, "")
    assert last == pytest.approx(100 * np.mean(result.rounds[-1]["test"]["balanced_accuracy"]))
    assert chosen == pytest.approx(100 * result.mean("balanced_accuracy"))
    sizes = np.array([row["test"] for row in result.clients])
    right = [np.sum(sizes * row["test"]["accuracy"]) / sizes.sum() for row in result.rounds]
    assert best_round(result, "")[0] == pytest.approx(100 * max(right))


def test_every_table_names_data_models_and_settings_that_exist():
    for name, table in TABLES.items():
        assert table.data in SOURCES, name
        assert table.settings.get("model", "mlp") in MODELS, name
        assert table.minutes > 0, name


def test_the_command_lists_and_refuses_in_words(small, tmp_path):
    listing = CliRunner().invoke(app, ["reproduce"])
    assert listing.exit_code == 0
    assert "fedmap-1" in listing.stdout
    wrong = CliRunner().invoke(app, ["reproduce", "fedmap-2"])
    assert wrong.exit_code == 2
    assert "did you mean 'fedmap-" in wrong.stderr
    with pytest.raises(ConfigError):
        markdown("nothing", [])
    ran = CliRunner().invoke(app, ["reproduce", "small", "--seeds", "1", "--quiet", "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.stderr
    assert "FedProx" in ran.stdout
