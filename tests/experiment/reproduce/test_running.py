import json
import shutil

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.core.errors import CheckpointError, ConfigError
from coterie.experiment.progress import Silent
from coterie.experiment.reproduce import identity, running
from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.figures.catalogue import Figure
from coterie.experiment.reproduce.identity import code_of, data_files, key_of, settled
from coterie.experiment.reproduce.measured import Measured, measure
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.running import Budget, BudgetSpent, Request, parse_duration, run_missing

from .kit import PLAIN, small_table

DIGITS = {"data": "digits", "rounds": 2, **PLAIN}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A small table that was run, and the folder of its results."""
    cache = Cache(tmp_path_factory.mktemp("results"))
    run_missing(Request(small_table()), cache, Silent(), Budget(None))
    return cache


def test_a_table_is_run_once_and_read_back(done, monkeypatch):
    request = Request(small_table())
    assert request.done(done) == (10, 10)
    assert len(list((done.folder / "results").glob("*.json"))) == 8  # FedAvg again is FedAvg
    assert not list((done.folder / "unfinished").glob("*"))
    measured = measure("small", request, done)
    assert list(measured.rows) == [entry.label for entry in small_table().entries]
    assert measured.rows["FedAvg"].protocol == measured.rows["FedAvg again"].protocol
    assert all(len(row.clients) == 10 for row in measured.rows.values())
    assert Measured.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    monkeypatch.setattr(running, "prepare", lambda *_, **__: pytest.fail("ran it again"))
    run_missing(request, done, Silent(), Budget(None))


def test_more_seeds_run_only_what_is_new(done, monkeypatch, tmp_path):
    cache = Cache(tmp_path)
    shutil.copytree(done.folder / "results", tmp_path / "results")
    ran = []
    monkeypatch.setattr(running, "_run_group", lambda entry, runs, *_: ran.extend(run.label for run in runs))
    run_missing(Request(small_table(), seeds=3), cache, Silent(), Budget(None))
    assert ran == [f"{entry.label} seed 2" for entry in small_table().entries]  # FedAvg's is not there, as nothing ran


def test_results_are_those_of_runs_one_by_one(done):
    """In lockstep or not, and read back from JSON."""
    import coterie

    request = Request(small_table())
    record = request.records(small_table().entries[3], done)[1]
    run = coterie.run("fedavg", "digits", rounds=2, seed=1, reference=False, **PLAIN)
    assert record["selected"] == run.selected
    assert record["rounds"][-1]["test"]["accuracy"] == pytest.approx(run.rounds[-1]["test"]["accuracy"], abs=1e-6)
    assert [row["test"] for row in record["clients"]] == [row["test"] for row in run.clients]


def test_a_stopped_table_continues_where_it_was(done, tmp_path):
    cache, table = Cache(tmp_path), small_table()

    class Stop(Silent):
        rounds = 0

        def round(self, record, metric):
            self.rounds += 1
            if self.rounds == 3:  # after one row, in the middle of the next
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(Request(table, seeds=1), cache, Stop(), Budget(None))
    assert len(list(tmp_path.glob("results/*.json"))) == 1
    assert len(list(tmp_path.glob("unfinished/*"))) == 1
    run_missing(Request(table, seeds=1), cache, Silent(), Budget(None))
    for entry in table.entries:
        here, there = (Request(table, seeds=1).records(entry, each)[0] for each in (cache, done))
        found, expected = (each["rounds"][-1]["test"]["accuracy"] for each in (here, there))
        assert found == pytest.approx(expected)
    assert not list(tmp_path.glob("unfinished/*"))


def test_a_budget_stops_at_the_end_of_a_round(tmp_path):
    class Spent(Budget):
        """Spent at the fifth look: before a row, before its runs, after a round, and the same of the next row."""

        left = 5

        def check(self):
            self.left -= 1
            if self.left == 0:
                raise BudgetSpent("over")

    with pytest.raises(BudgetSpent):
        run_missing(Request(small_table(), seeds=1), Cache(tmp_path), Silent(), Spent(None))
    assert len(list(tmp_path.glob("results/*.json"))) == 1
    Budget(None).check()
    Budget(60).check()
    with pytest.raises(BudgetSpent, match="the same command continues"):
        Budget(-1).check()


def test_durations():
    assert [parse_duration(text) for text in ("90s", "30m", "1.5 h")] == [90, 1800, 5400]
    for wrong in ("30", "m", "-3m", "0s"):
        with pytest.raises(ConfigError, match="give a time such as"):
            parse_duration(wrong)


def key(method="fedavg", **settings):
    return key_of(settled(method, {**DIGITS, "seed": 0, **settings})[0])


def test_the_key_depends_on_what_decides_the_result_and_on_nothing_else(monkeypatch, tmp_path):
    first = key()
    assert key(lr=0.05) == first == key(workers=2, checkpoint_every=3)  # 0.05 is the default
    assert key(bf16=False, robust=None) == first  # as without these settings
    others = [key(lr=0.1), key(seed=1), key("fedprox"), key(partition="iid", clients=4), key(test=0.2), key(rounds=3)]
    assert len({first, *others}) == 7
    monkeypatch.setattr(identity, "code_of", lambda method: "other code")
    assert key() != first


def test_the_key_depends_on_the_files_of_the_data(monkeypatch, tmp_path):
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "writers.npz").write_bytes(b"some")
    config = settled("fedavg", {"data": "femnist", "clients": 3})[0]
    assert data_files(config) == [("writers.npz", 4)]
    before = key_of(config)
    (tmp_path / "femnist" / "writers.npz").write_bytes(b"others")
    assert key_of(config) != before


def test_code_is_the_methods_and_that_of_its_parts_without_words(monkeypatch):
    code_of.cache_clear()
    first, read = code_of("fedprox"), identity._parsed
    assert code_of("fedavg") != first
    seen = []

    def changed(module, text):
        code_of.cache_clear()
        monkeypatch.setattr(
            identity, "_parsed", lambda name: seen.append(name) or (module if name == text else read(name))
        )
        return code_of("fedprox")

    import ast

    name = "coterie.parts.pulls"
    source = ast.unparse(read(name))
    assert changed(ast.parse('"""Other words."""\n' + source.split('"""', 2)[2] + "\n# a remark"), name) == first
    assert {"coterie.parts.pulls", "coterie.parts.averaging", "coterie.core.training"} <= set(seen)
    assert changed(ast.parse(source + "\nx = 1"), name) != first
    code_of.cache_clear()


def test_a_damaged_result_is_refused_in_words(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "ab.json").write_text('{"format": 1, "key": "other"}')
    with pytest.raises(CheckpointError, match="is not the result it should be"):
        Cache(tmp_path).read("ab")


def test_the_command_runs_lists_and_refuses_in_words(monkeypatch, tmp_path):
    only = {"small-1": small_table(entries=small_table().entries[1:3]), "fedmap-1": TABLES["fedmap-1"]}
    for where in ("coterie.experiment.reproduce.names", "coterie.cli.reproduce"):
        monkeypatch.setattr(f"{where}.TABLES", only)
    figures = {"small-figure-1": Figure("A figure", drawn=lambda cache, size: None, tables=("small-1",))}
    for where in ("coterie.experiment.reproduce.figures.making", "coterie.cli.reproduce"):
        monkeypatch.setattr(f"{where}.FIGURES", figures)
    listing = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)])
    assert listing.exit_code == 0, listing.stderr
    assert "fedmap-1" in listing.stdout
    assert "0 of 4" in listing.stdout
    assert "its tables" in listing.stdout
    ran = CliRunner().invoke(app, ["reproduce", "small", "--seeds", "1", "--quiet", "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.stderr
    assert "FedProx" in ran.stdout
    wrong = CliRunner().invoke(app, ["reproduce", "fedmap-3"])
    assert wrong.exit_code == 2
    assert "did you mean 'fedmap-1'" in wrong.stderr
    spent = CliRunner().invoke(app, ["reproduce", "small-1", "--budget", "0.0001s", "--quiet", "--out", str(tmp_path)])
    assert spent.exit_code == 0
    assert "the same command continues" in spent.stdout
    undrawn = CliRunner().invoke(app, ["reproduce", "small-figure-1", "--out", str(tmp_path)])
    assert undrawn.exit_code == 2
    assert "first coterie reproduce small-1" in undrawn.stderr
    large = CliRunner().invoke(app, ["reproduce", "small-figure-1", "--size", "small", "--out", str(tmp_path)])
    assert large.exit_code == 2
    assert "leave out --size" in large.stderr
