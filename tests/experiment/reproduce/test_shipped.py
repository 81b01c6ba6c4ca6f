import dataclasses
import json
from pathlib import Path

import pytest

from coterie.core.errors import CheckpointError
from coterie.experiment.progress import Silent
from coterie.experiment.reproduce import measured, running, shipped
from coterie.experiment.reproduce.cache import Cache
from coterie.experiment.reproduce.identity import identify, settled
from coterie.experiment.reproduce.markdown import heading, markdown
from coterie.experiment.reproduce.measured import measure, to_ship
from coterie.experiment.reproduce.papers import TABLES
from coterie.experiment.reproduce.running import Budget, Request, run_missing
from coterie.experiment.reproduce.scores import row_of
from coterie.experiment.reproduce.tables import Protocol

from .kit import PLAIN, small_table

TABLE = small_table(entries=small_table().entries[1:4], settings={"data": "digits", "rounds": 4, **PLAIN})


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The results of a table that was run here, and the file that they are shipped in."""
    cache = Cache(tmp_path_factory.mktemp("results"))
    run_missing(Request(TABLE), cache, Silent(), Budget(None))
    path = cache.folder / "docs" / "results.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "TABLES", {"small": TABLE, "again": TABLE})
        shipped.write(path, to_ship(cache))
    return cache, path


@pytest.mark.parametrize("at", ["best", "last"])
@pytest.mark.parametrize("over", ["clients", "examples", "variation"])
@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy"])
def test_a_table_of_shipped_results_is_that_of_whole_ones_by_every_protocol(here, tmp_path, metric, over, at):
    cache, path = here
    request = Request(dataclasses.replace(TABLE, protocol=Protocol("", metric, at, over)))
    there = Cache(tmp_path, path)
    assert measure("small", request, there) == measure("small", request, cache)


def test_on_another_machine_shipped_results_count_as_done(here, tmp_path, monkeypatch):
    _, path = here
    there = Cache(tmp_path, path)
    assert len(path.read_text().splitlines()) == 6  # three rows of two seeds, once though two tables have them
    assert Request(TABLE).done(there) == (6, 6)
    assert Request(TABLE, seeds=3).done(there) == (6, 9)
    monkeypatch.setattr(running, "prepare", lambda *_, **__: pytest.fail("ran it again"))
    run_missing(Request(TABLE), there, Silent(), Budget(None))
    assert Request(TABLE).records(TABLE.entries[0], there, whole=True) == {}  # figures need all rounds
    monkeypatch.setattr(measured, "TABLES", {"small": TABLE})
    assert to_ship(there) == list(there.shipped.results.values())  # and they are shipped on


def test_results_of_older_code_are_shown_as_such_and_run_again(here, tmp_path):
    lines = [json.loads(line) for line in here[1].read_text().splitlines()]
    older = {identify(settled("fedavg", {**TABLE.settings, "seed": seed})[0]).config for seed in (0, 1)}
    path = tmp_path / "results.jsonl"
    shipped.write(path, [{**line, "code": "before"} if line["of"] in older else line for line in lines])
    there, request = Cache(tmp_path, path), Request(TABLE)
    assert request.done(there) == (4, 6)
    assert list(request.missing(TABLE.entries[2], there)) == [0, 1]
    shown = measure("small", request, there)
    assert [row.older for row in shown.rows.values()] == [0, 0, 2]
    assert "| FedAvg † |" in markdown(TABLE, shown)
    assert "† The method's code has changed" in heading(TABLE, shown)


def test_results_of_other_data_files_are_not_those_of_the_files_here(here, tmp_path):
    path = tmp_path / "results.jsonl"
    wanted = identify(settled("fedavg", {**TABLE.settings, "seed": 0})[0])
    line = next(each for each in map(json.loads, here[1].read_text().splitlines()) if each["of"] == wanted.config)
    shipped.write(path, [{**line, "data_files": [["a.npz", 4]]}])
    there = Cache(tmp_path, path)
    assert there.has(wanted)  # the data are not here, so nothing says that they are others
    assert there.has(wanted._replace(files=[("a.npz", 4)]))
    assert not there.has(wanted._replace(files=[("a.npz", 5)]))


def test_a_damaged_line_is_refused_in_words(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("{}\n")
    with pytest.raises(CheckpointError, match="line 1, is not a result"):
        Request(TABLE).done(Cache(tmp_path, path))


def test_the_results_that_are_shipped_are_those_of_the_page(tmp_path):
    """A row of reproduce.json has the numbers of its first seed's shipped result, wherever there is one."""
    docs, compared = Path(__file__).parents[3] / "docs", 0
    there = Cache(tmp_path, docs / "reproduce" / "results.jsonl").shipped.results
    for value in json.loads((docs / "reproduce.json").read_text())["tables"].values():
        table = TABLES[value["name"]]
        request = Request(table, value["size"], rounds=value["rounds"])
        for entry in (each for each in table.entries if each.label in value["rows"]):
            row = value["rows"][entry.label]
            first = there.get(identify(request.config(entry, row["seeds"][0])).config)
            if first is not None and row.get("models") is not None:
                found = row_of(entry, table.protocol, {row["seeds"][0]: first})
                assert (found.protocol[0], found.selected[0]) == (row["protocol"][0], row["selected"][0]), entry.label
                compared += 1
    assert compared or not there
