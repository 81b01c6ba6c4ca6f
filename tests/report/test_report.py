import json
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.core.errors import CheckpointError, CoterieError
from coterie.experiment.report_data import MAX_EXAMPLES, _shares, describe_federation, own_model
from coterie.report import collaboration, embedding, images, write
from coterie.report.block import Page, Section
from coterie.report.distribution import bubbles, sizes
from coterie.report.group import grouped
from coterie.report.page import render
from coterie.report.read import RunData, read
from coterie.report.verdict import verdict
from coterie.report.write import make
from tests.report.runs import QUICK, add_benefit, clients, run


@pytest.fixture(scope="module")
def fedamp(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "fedamp"
    run(out, report=True)
    return out


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "compared"
    settings = {key: value for key, value in QUICK.items() if key != "rounds"}
    coterie.compare(("local", "fedavg", "fedamp"), 2, clients(), out=out, rounds=2, **settings)
    return out


@pytest.fixture
def copied(fedamp, tmp_path):
    return shutil.copytree(fedamp, tmp_path / "copy")


# One run


def test_a_run_writes_its_report_which_needs_nothing_else(fedamp):
    text = (fedamp / "report.html").read_text()
    assert len(text.encode()) < 6_000_000
    page = re.sub(r'<script type="text/plain" id="library">.*?</script>', "", text, flags=re.S)
    assert not re.findall(r"(?:src|href)=[\"'](?!#)[^\"']*", page)  # nothing is fetched
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_has_a_figure_for_all_that_the_run_tells(fedamp):
    page = make([fedamp])
    assert [picture.name for picture in page.pictures] == [
        *("gain", "curves", "spread", "collaboration", "graph", "client-weights"),
        *("features-by-class", "features-by-client", "data", "bytes", "seconds"),
    ]
    assert page.verdict.count(". ") == 1
    assert page.verdict.endswith(".")
    assert all(picture.caption.endswith(".") for picture in page.pictures)
    for picture in page.pictures:
        go.Figure(vars(picture.figure))  # plotly refuses properties that do not exist


def test_names_are_not_mark_up(fedamp):
    text = (fedamp / "report.html").read_text()
    assert "<0>" not in text
    assert "site &lt;0&gt; &amp; co" in text


class _Elements(HTMLParser):
    """All elements of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


EVIL = "<img src=x onerror=alert(1)><script>alert(2)<\u2044script>\"'><a href=javascript:alert(3)>"


def test_what_sites_call_clients_columns_and_classes_is_text(tmp_path):
    draw = np.random.default_rng(0)
    for k in range(2):
        rows = [
            f"{a:.3f},{EVIL!s:.30}{b},{'<b>yes' if a > 0 else '</script>no'}"
            for a, b in zip(draw.normal(size=40), [0, 1] * 20, strict=True)
        ]
        header = f"<i>age{EVIL[:30]}".replace(",", "") + ",</td><u>ward,outcome"
        (tmp_path / f"{EVIL[:60]}{k}.csv".replace("/", "")).write_text("\n".join([header, *rows]) + "\n")
    out = tmp_path / "run"
    settings = {key: value for key, value in QUICK.items() if key != "model"}
    coterie.run("fedavg", silos=[str(tmp_path)], target="outcome", out=out, model="linear", **settings)
    for page in [out / "report.html", *out.glob("**/report.html")]:
        text = page.read_text()
        assert "&lt;img src=x" in text
        elements = _Elements(text).found
        tags = {tag for tag, _ in elements}
        assert not tags & {"img", "a2", "i", "b", "u", "iframe", "object", "svg", "base", "form"}
        assert sum(tag == "script" for tag, _ in elements) == text.count("<script") == 4
        for tag, attributes in elements:
            assert not any(name.startswith("on") for name in attributes), (tag, attributes)
            assert tag != "a" or (attributes["href"] or "").startswith("#")
        figures = re.search(r'id="figures">(.*?)</script>', text, re.S)[1]
        assert "<" not in figures


def test_gains_are_sorted_and_have_intervals(copied):
    add_benefit(copied)
    figure = next(p for p in make([copied]).pictures if p.name == "gain").figure
    ends = {bar["name"]: bar["error_x"] for bar in figure.data}
    assert set(ends) == {"gains (2)", "undecided (2)", "loses (2)"}
    assert all(error.keys() >= {"array", "arrayminus"} for error in ends.values())
    order = {y: x for bar in figure.data for y, x in zip(bar["y"], bar["x"], strict=True)}
    found = [order[place] for place in sorted(order)]
    assert found == sorted(found, reverse=True)


def test_the_verdict_says_who_gains_who_loses_and_who_is_undecided(copied):
    add_benefit(copied)
    told = verdict(read(copied))
    assert told.startswith("FedAMP is better than training alone for 2 of 6 clients and worse for 2; 2 are undecided.")
    assert "2.1 points better" in told
    assert "95 % interval −1.0 to +5.0" in told
    assert "p\u00a0=\u00a00.031" in told


def test_a_run_of_an_older_version_has_the_same_report(copied):
    add_benefit(copied)
    new = verdict(read(copied))
    text = (copied / "benefit.json").read_text()
    old = text.replace('"undecided":', '"cannot_tell":').replace('"undecided"', '"cannot tell"')
    (copied / "benefit.json").write_text(old)
    assert old.count("cannot") == 3
    assert verdict(read(copied)) == new
    assert "cannot tell" not in render(make([copied]))


def test_fairness_is_a_table_where_the_run_has_it(copied, fedamp):
    add_benefit(copied)
    tables = [block.name for section in make([copied]).sections for block in section.blocks if hasattr(block, "rows")]
    assert "fairness" in tables
    assert "worst tenth of clients" in render(make([copied]))


def test_without_a_reference_it_says_so_and_what_to_do(tmp_path):
    run(tmp_path / "run", "fedavg", reference=False, rounds=1, report=True)
    text = (tmp_path / "run" / "report.html").read_text()
    assert "No client was trained alone" in text
    assert "--reference" in text
    assert 'data-figure="gain"' not in text


def test_metrics_that_are_null_leave_gaps(copied):
    lines = [json.loads(line) for line in (copied / "rounds.jsonl").read_text().splitlines()]
    for record in lines:
        record["test"]["auroc"] = [None, 0.5, float("nan"), 0.7, 0.8, 0.9]
    (copied / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    curves = next(p for p in make([copied]).pictures if p.name == "curves")
    state = next(state for state in curves.states if state.label == "AUROC (%)")
    each = np.array(state.traces[0]["y"]).reshape(6, -1)  # a client's values, and the gap after them
    assert np.isnan(each).all(1).tolist() == [True, False, True, False, False, False]
    assert np.allclose(each[1, :-1], 50)
    assert np.isnan(each[:, -1]).all()
    assert np.allclose(np.array(state.traces[-1]["y"], dtype=float), 100 * 2.9 / 4)
    assert "NaN" not in re.sub(r'<script type="text/plain".*', "", render(make([copied])))


def test_a_regression_and_a_method_with_one_weight_a_client(tmp_path):
    data = {name: (x, x[:, 0] * 2) for name, (x, _) in clients().items()}
    run(tmp_path / "run", "fedmap", data, rounds=2, lr=0.01)
    page = make([tmp_path / "run"])
    names = [picture.name for picture in page.pictures]
    assert "weights" in names
    assert "features-by-class" not in names
    assert "RMSE" in page.verdict


def test_no_report_if_not_wanted(tmp_path):
    run(tmp_path / "run", "local", rounds=1)
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "data.json").exists()  # so that it can be made later
    assert write(tmp_path / "run").exists()


# Collaboration


def test_clients_that_learn_from_each_other_are_neighbours():
    group = np.array([0, 1, 0, 1, 0, 1, 1, 0])
    matrix = np.where(group[:, None] == group, 0.2, 0.01)
    found = group[collaboration.cluster_order(matrix)]
    assert np.abs(np.diff(found)).sum() == 1


def test_the_matrix_has_a_state_a_round_and_starts_at_the_selected_one(fedamp):
    told = read(fedamp)
    matrix, graph, one = collaboration.pictures(told)
    assert [state.label for state in matrix.states] == ["1", "2", "3"]
    assert matrix.states[matrix.start].label == str(told.selected)
    assert matrix.group == graph.group
    order = collaboration.cluster_order(np.array(told.rounds[told.selected - 1]["server"]["collaboration"]))
    raw = np.array(told.rounds[0]["server"]["collaboration"])[np.ix_(order, order)]
    assert np.allclose(np.array(matrix.states[0].traces[0]["z"]), raw, atol=1e-6)
    assert len(one.states) == 6
    assert np.allclose(one.states[0].traces[0]["y"], [r["server"]["collaboration"][0][0] for r in told.rounds])


def test_many_clients_and_rounds_stay_within_the_size():
    draw = np.random.default_rng(0)
    names = [f"client-{i}" for i in range(200)]
    rounds = [
        {
            "round": k + 1,
            "participants": names,
            "server": {"collaboration": draw.random((200, 200)).tolist()},
            "test": {"accuracy": draw.random(200).tolist()},
            "bytes_up": 1,
            "bytes_down": 1,
            "seconds": 1.0,
        }
        for k in range(18)
    ]
    rows = [{"client": name, "train": 5.0, "test": 3.0, "test_accuracy": 0.5} for name in names]
    config = {"method": "fedamp", "data": "d", "model": "m"}
    told = RunData(None, config, rows, rounds, {"selected_round": 20}, "accuracy")
    found = collaboration.weights(told)
    assert found.matrices.shape[1] == collaboration.MAX_CLIENTS_SHOWN
    assert found.matrices.size <= collaboration.MAX_MATRIX_CELLS
    pictures = collaboration.pictures(told)
    text = render(Page("t", "s", "v", [], [Section("c", pictures)]))
    assert len(text.encode()) < 6_000_000
    assert "120 of 200 clients are shown." in pictures[0].caption


# Features and data


def test_features_are_the_clients_own_and_t_sne_is_kept(fedamp, monkeypatch):
    told = read(fedamp)
    found = embedding.embedding(told)
    assert found.at.shape == (len(found.client), 2)
    assert set(found.client) == set(range(6))
    monkeypatch.setattr(embedding, "tsne", lambda _: pytest.fail("it was computed already"))
    assert np.array_equal(embedding.embedding(told).at, found.at)


def test_the_own_model_of_a_mixture_is_its_first(tmp_path):
    result = coterie.run("federico", clients(), **{**QUICK, "rounds": 1, "reference": False})
    view = result.view(0)
    own = own_model(result.task, view)
    assert all(torch.equal(own[name], value[0]) for name, value in view.models.items())
    assert own_model(result.task, (torch.zeros(3),)) is None


def test_examples_are_shared_out_fairly():
    assert _shares([5, 5]) == [5, 5]
    assert sum(_shares([10_000] * 7)) <= MAX_EXAMPLES
    assert _shares([3, 10_000, 10_000]) == [
        3,
        (MAX_EXAMPLES - 3) // 2,
        MAX_EXAMPLES - 3 - (MAX_EXAMPLES - 3) // 2,
    ]


def test_facts_count_every_example_once():
    federation = coterie.prepare("fedavg", clients(), **QUICK).federation
    told = describe_federation(federation)
    total = sum(np.array(told["counts"][part]).sum() for part in ("train", "validation", "test"))
    assert total == len(federation.y)
    assert told["classes"] == ["0", "1", "2"]


def test_bubbles_and_sizes():
    made = bubbles(np.array([[4, 0], [1, 9]]), ["a", "b"], ["no", "yes"])
    assert list(made.data[0]["marker"]["size"]) == [4, 1, 9]
    assert list(made.layout["yaxis"]["ticktext"]) == ["no", "yes"]
    assert list(sizes(np.array([[4, 0], [1, 9]]), ["a", "b"]).data[0]["y"]) == [4, 10]


# Several runs


def test_a_folder_of_runs_becomes_a_comparison(compared):
    assert (compared / "report.html").exists()
    assert not (compared / "fedavg-seed0" / "report.html").exists()
    page = make([compared])
    table = page.sections[0].blocks[0]
    assert [row[0] for row in table.rows] == ["local", "fedamp", "fedavg"]
    assert table.columns[3:5] == ["gain over local", "clients that gain"]
    told = json.loads((compared / "comparison.json").read_text())["methods"]
    mean = next(row[2][1] for row in table.rows if row[0] == "fedavg")
    assert mean == pytest.approx(told["fedavg"]["mean"])
    gain = next(row[3][1] for row in table.rows if row[0] == "fedavg")
    assert gain == pytest.approx(np.mean(told["fedavg"]["gain_over_local"]))
    names = [picture.name for picture in page.pictures]
    assert len(names) == len(set(names))
    assert "collaboration-fedamp" in names
    for picture in page.pictures:
        go.Figure(vars(picture.figure))


def test_a_reference_serves_as_the_local_method(fedamp, tmp_path):
    run(tmp_path / "other", "fedavg", reference=False)
    table = make([fedamp, tmp_path / "other"]).sections[0].blocks[0]
    assert [row[0] for row in table.rows] == ["local", "fedamp", "fedavg"]
    assert table.rows[2][3][1] is not None


def test_settings_tell_two_of_one_method_apart(compared, tmp_path):
    run(tmp_path / "a", "fedprox", reference=False, rounds=1, mu=0.1)
    run(tmp_path / "b", "fedprox", reference=False, rounds=1, mu=5.0)
    assert list(grouped([read(tmp_path / "a"), read(tmp_path / "b")])) == ["fedprox (mu = 0.1)", "fedprox (mu = 5.0)"]


def test_runs_of_different_data_are_not_compared(fedamp, tmp_path):
    run(tmp_path / "fewer", data=clients(5), rounds=1, reference=False)
    with pytest.raises(CoterieError, match=r"cannot be compared: their clients differ.*different data separately"):
        write([fedamp, tmp_path / "fewer"], tmp_path / "report.html")
    shutil.copytree(tmp_path / "fewer", tmp_path / "renamed")
    config = (tmp_path / "renamed" / "config.toml").read_text()
    (tmp_path / "renamed" / "config.toml").write_text(config.replace('"own-data"', '"mnist"'))
    with pytest.raises(CoterieError, match="their data differ: own-data and mnist"):
        write([tmp_path / "fewer", tmp_path / "renamed"], tmp_path / "report.html")
    run(tmp_path / "other", data=clients(size=40), rounds=1, reference=False)
    with pytest.raises(CoterieError, match="with seed 0 their clients' train examples differ"):
        write([fedamp, tmp_path / "other"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_run_twice_is_told(fedamp, copied):
    with pytest.raises(CoterieError, match="more than once"):
        write([fedamp, copied], copied / "report.html")


# Bad folders


@pytest.mark.parametrize("name", ["environment.json", "summary.json", "data.json"])
def test_a_run_of_a_newer_version_is_told(copied, name):
    told = json.loads((copied / name).read_text())
    (copied / name).write_text(json.dumps({**told, "format": 99}))
    with pytest.raises(CheckpointError, match=rf"{name}' was written by a newer version.*update Coterie"):
        write(copied)


def test_what_is_not_a_complete_run_is_told(copied, tmp_path):
    with pytest.raises(CoterieError, match="there is no folder"):
        write(tmp_path / "nowhere")
    with pytest.raises(CoterieError, match="is not a run folder"):
        write(copied / "clients")
    (copied / "rounds.jsonl").write_text("{\n")
    with pytest.raises(CheckpointError, match=r"rounds.jsonl' line 1 cannot be read"):
        write(copied)
    (copied / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="is not complete: 'coterie resume"):
        write(copied)


def test_the_command_writes_and_complains_in_words(fedamp, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(fedamp), "--out", "my.html"])
    assert result.exit_code == 0
    assert "Written to my.html" in result.output
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["report", str(fedamp), "--out", "my.html", "--figures", "figures"])
    assert result.exit_code == 1
    assert "pip install 'coterie[figures]'" in result.stderr
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "is not a run folder" in result.stderr


def test_without_a_browser_figures_say_what_to_install(monkeypatch):
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(images.shutil, "which", lambda _: None)
    with pytest.raises(CoterieError, match="neither was found: install one"):
        images.find_browser()


@pytest.mark.parametrize("before", [None, ""])
def test_the_environment_names_the_browser_only_while_it_draws(before, monkeypatch, tmp_path):
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    if before is not None:
        monkeypatch.setenv("BROWSER_PATH", before)
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(images.shutil, "which", lambda name: f"/usr/bin/{name}")
    seen = []
    monkeypatch.setattr("plotly.io.write_images", lambda *_, **__: seen.append(os.environ["BROWSER_PATH"]))
    images.export(Page("", "", "", [], []), tmp_path)
    assert seen == ["/usr/bin/chromium"]
    assert os.environ.get("BROWSER_PATH") == before
