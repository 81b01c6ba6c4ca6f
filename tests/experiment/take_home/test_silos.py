"""Sites' own tables: rows are prepared for a model as they were in training, and a new site prepares its own alike."""

import csv
import json

import pytest
import torch

import coterie
from coterie.core import rng
from coterie.core.errors import ConfigError, DataError
from coterie.experiment.setup import prepare
from coterie.experiment.take_home.onboard import onboard
from coterie.experiment.take_home.predict import predict

HOW = {"engine": "loop", "compile": False, "workers": 1, "rounds": 2, "target": "state", "reference": False}


def write(path, site, rows=40, header=True):
    draw = rng.generator(0, site)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["age", "sex", "bp", "state"]] * header)
        for i in range(rows):
            age, sex = round(float(draw.normal(50 + 5 * len(site), 10)), 1), "fm"[draw.integers(2)]
            state = "ill" if (age > 55) ^ (draw.random() < 0.2) else "well"
            writer.writerow([age if i % 9 else "", sex, round(float(draw.normal(120, 15)), 1), state])
    return str(path)


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("silos")
    paths = [write(folder / f"{name}.csv", name) for name in ("a", "bb", "ccc")]
    result = coterie.run("fedmap", silos=paths, out=folder / "run", **HOW)
    return folder, paths, result


def without_target(source, target, header=True):
    with open(source, newline="") as file:
        rows = [row[:-1] for row in csv.reader(file)]
    with target.open("w", newline="") as file:
        csv.writer(file).writerows(rows if header else rows[1:])


def probabilities(run, client, path):
    _, text = predict(run, client, path)
    return text.splitlines()[0], torch.tensor([list(map(float, line.split(",")[1:])) for line in text.splitlines()[1:]])


def test_predictions_from_the_file_are_those_that_were_measured(silos, tmp_path):
    _, paths, result = silos
    federation = prepare("fedmap", silos=paths, **HOW).federation
    without_target(paths[1], tmp_path / "rows.csv")
    for file in (paths[1], tmp_path / "rows.csv"):
        header, found = probabilities(result.path, 2, file)
        assert header == "predicted,ill,well"
        own = federation.split(1).test
        start = sum(len(s.train) + len(s.validation) + len(s.test) for s in list(federation.clients.values())[:1])
        assert torch.allclose(found[own - start], result.predictions.of(1).outputs.softmax(1), atol=1e-5)


def test_classes_that_are_formulas_are_written_as_text(tmp_path):
    evil = {"ill": '=HYPERLINK("http://x")', "well": "-well"}
    paths = []
    for name in ("a", "bb"):
        text = (tmp_path / name).with_suffix(".csv")
        write(text, name)
        rows = list(csv.reader(text.open(newline="")))
        with text.open("w", newline="") as file:
            csv.writer(file).writerows([[*row[:-1], evil.get(row[-1], row[-1])] for row in rows])
        paths.append(str(text))
    result = coterie.run("fedavg", silos=paths, out=tmp_path / "run", **HOW | {"rounds": 1, "report": False})
    _, text = predict(result.path, 1, paths[0])
    header, *lines = csv.reader(text.splitlines())
    assert header == ["predicted", "'-well", "'" + evil["ill"]]
    assert {line[0] for line in lines} <= {"'" + name for name in evil.values()}
    assert all(0 <= float(cell) <= 1 for line in lines for cell in line[1:]), "numbers stay numbers"


def test_a_new_site_prepares_its_table_by_its_own_rows(silos, tmp_path):
    """Without the others' files, by the schema that they agreed on."""
    folder, paths, result = silos
    new = write(tmp_path / "clinic.csv", "dddd")
    hidden = [folder / f"{name}.hidden" for name in "abc"]
    for path, away in zip(paths, hidden, strict=True):
        (folder / path).rename(away)
    try:
        joined = onboard(result.path, new)
    finally:
        for path, away in zip(paths, hidden, strict=True):
            away.rename(path)
    record = json.loads((result.path / "clients" / "clinic" / "preprocessing.json").read_text())
    other = json.loads((result.path / "clients" / "a" / "preprocessing.json").read_text())
    assert record["schema"] == other["schema"]
    assert record["columns"]["age"]["mean"] > other["columns"]["age"]["mean"] + 5
    header, found = probabilities(result.path, "clinic", new)
    assert (header, len(found)) == ("predicted,ill,well", 40)
    card = json.loads((result.path / "clients" / "clinic" / "card.json").read_text())
    assert list(card["data"]["classes"]) == ["ill", "well"]
    assert joined.names == ["clinic"]
    with pytest.raises(ConfigError, match="target = 'age': the sites of this run agreed on state"):
        onboard(result.path, new, target="age", name="again")


def test_what_does_not_fit_is_told(silos, tmp_path):
    _, _, result = silos
    (tmp_path / "rows.csv").write_text("age,sex\n50,f\n")
    with pytest.raises(DataError, match="has no column 'bp'; it has age, sex"):
        predict(result.path, 1, tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_text("age,sex,bp\nold,f,120\n")
    with pytest.raises(DataError, match=r"column 'age', line 2 \('old'\): the schema says number"):
        predict(result.path, 1, tmp_path / "rows.csv")


def test_files_without_a_header(tmp_path):
    paths = [write(tmp_path / f"{name}.data", name, header=False) for name in ("a", "bb")]
    settings = {**HOW, "columns": "age,sex,bp,state"}
    coterie.run("fedmap", silos=paths, out=tmp_path / "run", **settings)
    with open(paths[0], newline="") as file:
        rows = list(csv.reader(file))
    expected = probabilities(tmp_path / "run", 1, paths[0])[1]
    for name, header, width in (
        ("with", [["age", "sex", "bp"]], 3),
        ("bare", [], 3),
        ("whole", [["age", "sex", "bp", "state"]], 4),
    ):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([*header, *(row[:width] for row in rows)])
        assert torch.equal(probabilities(tmp_path / "run", 1, tmp_path / f"{name}.csv")[1], expected)
