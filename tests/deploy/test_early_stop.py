"""The server stops early as a simulation does, and the sites know."""

import json

import pytest

from coterie.core.errors import ConfigError
from coterie.deploy.ledger import Ledger
from coterie.deploy.settings import flatten, read
from coterie.deploy.up import part_of
from coterie.experiment import stopping
from coterie.experiment.resolve import resolve
from coterie.experiment.run import run_setup

from .inprocess import NAMES, ServerKilled, ledger, make

LONG = {"rounds": 20, "early_stop": 2, "lr": 0.5}
OWN = "tests.evaluation.test_scoring"  # a module with metrics of its own
METRICS = ("validation", "test", "participants", "bytes_up", "bytes_down")


@pytest.mark.parametrize("how", [{"method": "fedavg"}, {"method": "fedamp", "topology": "ring"},
                                 {"method": "fedmap", "evaluate_every": 2, "clients_per_round": 3}],
                         ids=["server", "peers", "every second round"])  # fmt: skip
def test_it_stops_after_the_round_of_a_simulation(how, tmp_path):
    how = dict(how)
    setup, server, queue = make(how.pop("method"), tmp_path, **LONG, **how)
    book = ledger()
    result, whole = server.run(book), run_setup(setup, tmp_path / "simulated", report=False)
    assert result.stopped == whole.stopped
    assert result.stopped.round < 20
    for ours, theirs in ((result, whole), (result.reference, whole.reference)):
        assert ours.selected == theirs.selected
        assert [row["round"] for row in ours.rounds] == [row["round"] for row in theirs.rounds]
    for one, other in zip(result.rounds, whole.rounds, strict=True):
        assert {key: one.get(key) for key in METRICS[:3]} == {key: other.get(key) for key in METRICS[:3]}
    for name in ("config.toml", "stopped.json", "reference/stopped.json", "reference/clients.csv"):
        assert (server.out / name).read_text() == (tmp_path / "simulated" / name).read_text(), name
    assert json.loads((server.out / "summary.json").read_text())["stopped"]["round"] == result.stopped.round
    for name in NAMES:
        out = queue.sites[name].root / book.run / name / "result"
        stop = stopping.read(out)
        assert (stop.round, stop.planned, stop.by) == (result.stopped.round, 20, "early_stop")
        assert json.loads((out / "summary.json").read_text())["last_round"]["round"] == result.stopped.round
    assert Ledger.load(server.out).stage() == "sites are writing their models"


def test_a_server_that_was_killed_does_not_go_on(tmp_path, monkeypatch):
    setup, server, _queue = make("fedavg", tmp_path, **LONG, reference=False)
    whole = run_setup(setup, None)
    monkeypatch.setattr("coterie.deploy.rounds.Rounds.finish", lambda self: (_ for _ in ()).throw(ServerKilled))
    with pytest.raises(ServerKilled):
        server.run(ledger())
    monkeypatch.undo()
    result = server.run(Ledger.load(server.out))
    assert [row["round"] for row in result.rounds] == [row["round"] for row in whole.rounds]
    assert result.stopped == whole.stopped
    assert result.selected == whole.selected


def test_what_only_a_simulation_can_call_is_refused(tmp_path):
    setup, _, _ = make("fedavg", tmp_path, callbacks=[print])
    with pytest.raises(ConfigError, match="callbacks: over Flower the server decides when to stop, by early_stop"):
        part_of(setup, 2)
    flat = flatten(setup.config) | {"data": "hospitals", "model": "mlp"}
    assert "callbacks" not in flat
    assert flat["early_stop"] == ""
    for own, words in ({"pretrained": "w.safetensors"}, "other files"), ({"models": "mlp;cnn"}, "use one model"):
        with pytest.raises(ConfigError, match=words):
            read({**flat, **own}, own_data=False, own_model=False)
    section = "tests.report.test_user_sections:methods"
    with pytest.raises(ConfigError, match="sections: leave them out, and add them at the end: coterie report RUN"):
        read({**flat, "sections": section}, own_data=False, own_model=False)


def test_lists_go_through_the_flat_table_and_back():
    given = {"data": "survival-times", "task": "survival", "horizons": [0.5, 1.0], "method": "fedavg"}
    flat = flatten(resolve(given)[0])
    assert flat["horizons"] == "0.5;1.0"
    assert read(flat, own_data=False, own_model=False)[0].horizons == [0.5, 1.0]
    own = f"{OWN}:brier;{OWN}:brier"
    assert read({**flat, "metric": own}, own_data=False, own_model=False)[0].metric == own.split(";")
    levels = {"levels": "low;high", "task": "ordinal", "horizons": ""}
    with pytest.raises(ConfigError, match="levels"):  # they are for files of sites
        read({**flat, **levels}, own_data=False, own_model=False)
