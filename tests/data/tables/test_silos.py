import json

import numpy as np
import pytest
import torch

from coterie.core.errors import CoterieWarning, DataError
from coterie.data.tables.silos import Silos, agree_on_schema, apply_preprocessing, load_silos, read_like, sha256


def rows(seed, size=40, patients=None):
    """age, sex, bmi with gaps, and a class."""
    draw = np.random.default_rng(seed)
    lines = []
    for i in range(size):
        bmi = f"{draw.normal(25, 4):.2f}" if draw.random() > 0.2 else "?"
        lines.append([i % (patients or size), draw.integers(20, 90), draw.choice(["m", "f"]), bmi, i % 2])
    return lines


def write(path, lines, header=("id", "age", "sex", "bmi", "sick")):
    path.write_text("\n".join(",".join(map(str, line)) for line in [header, *lines]) + "\n")
    return str(path)


def sites(tmp_path, **changes):
    return tuple(write(tmp_path / f"{name}.csv", changes.get(name, rows(i))) for i, name in enumerate("abc"))


def test_one_file_a_site(tmp_path):
    files = sites(tmp_path)
    federation = load_silos(Silos(files, target="sick", drop=("id",)))
    assert federation.names == ("a", "b", "c")
    assert federation.classes == ("0", "1")
    assert federation.x.shape == (120, 4)
    assert federation.preprocessing["a"]["features"] == ["age", "sex=f", "sex=m", "bmi"]
    assert federation.files == {file: sha256(file) for file in files}
    for i in range(3):
        train = federation.x[torch.from_numpy(federation.split(i).train)]
        assert train[:, [0, 3]].mean(0).abs().max() < 1e-6  # on its own training rows
        torch.testing.assert_close(train[:, [0, 3]].std(0, correction=0), torch.ones(2))
    assert federation.y.tolist() == [0, 1] * 60


def test_a_site_depends_on_no_other(tmp_path):
    files = sites(tmp_path)
    whole = load_silos(Silos(files, target="sick", drop=("id",)))
    part = load_silos(Silos(files[:2], target="sick", drop=("id",)))
    assert torch.equal(whole.x[:80], part.x)
    assert whole.preprocessing["b"] == part.preprocessing["b"]


def test_test_rows_teach_the_preprocessing_nothing(tmp_path):
    lines = rows(0)
    base = load_silos(Silos((write(tmp_path / "a.csv", lines),), target="sick", drop=("id",)))
    for row in [*base.split(0).test, *base.split(0).validation]:
        lines[row][1], lines[row][3] = 10**6, "?"
    other = load_silos(Silos((write(tmp_path / "a.csv", lines),), target="sick", drop=("id",)))
    assert other.preprocessing["a"] == base.preprocessing["a"]
    train = torch.from_numpy(base.split(0).train)
    assert torch.equal(other.x[train], base.x[train])


def test_the_record_gives_the_inputs_of_training_again(tmp_path):
    """What `coterie predict` relies on, from the file and the JSON alone."""
    federation = load_silos(Silos(sites(tmp_path), target="sick", drop=("id",)))
    record = json.loads(json.dumps(federation.preprocessing["b"]))
    x = apply_preprocessing(read_like(tmp_path / "b.csv", record), record)
    assert torch.equal(x, federation.x[40:80])


def test_one_file_with_a_site_column_is_the_same_federation(tmp_path):
    files = sites(tmp_path)
    excluded = load_silos(Silos(files, target="sick", drop=("id",)))
    lines = [[name, *line] for i, name in enumerate("abc") for line in rows(i)]
    one = write(tmp_path / "all.csv", lines, ("where", "id", "age", "sex", "bmi", "sick"))
    together = load_silos(Silos((one,), target="sick", drop=("id",), site_column="where"))
    assert together.names == excluded.names
    assert torch.equal(together.x, excluded.x)
    assert [s.test.tolist() for s in together.clients.values()] == [s.test.tolist() for s in excluded.clients.values()]


def test_files_of_the_same_name_in_different_folders(tmp_path):
    files = []
    for i, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        files.append(write(tmp_path / name / "data.csv", rows(i)))
    assert load_silos(Silos(tuple(files), target="sick", drop=("id",))).names == ("a-data", "b-data")


def test_patients_stay_on_one_side(tmp_path):
    federation = load_silos(Silos((write(tmp_path / "a.csv", rows(0, 60, patients=15)),), target="sick", group="id"))
    assert "id" not in federation.preprocessing["a"]["features"]
    split = federation.split(0)
    patient = np.arange(60) % 15
    assert not set(patient[split.train]) & set(patient[split.test])
    assert not set(patient[split.train]) & set(patient[split.validation])


def test_regression(tmp_path):
    federation = load_silos(Silos(sites(tmp_path), target="age", drop=("id",), regression=True))
    assert federation.kind == "regression"
    assert federation.y[:3].tolist() == [float(line[1]) for line in rows(0)[:3]]


def test_everything_wrong_in_all_files_is_told_at_once(tmp_path):
    files = sites(tmp_path)
    schema, _ = agree_on_schema(Silos(files, target="sick", drop=("id",)))
    (tmp_path / "s.toml").write_text(schema.to_toml())
    bad_a, bad_b = rows(0), rows(1)
    bad_a[3][1], bad_b[0][2], bad_b[5][4] = "forty", "x", "perhaps"
    sites(tmp_path, a=bad_a, b=bad_b)
    (tmp_path / "c.csv").write_bytes(b"id,age\n1,\xff\n")
    with pytest.raises(DataError) as told:
        load_silos(Silos(files, schema=str(tmp_path / "s.toml")))
    words = str(told.value)
    assert "a.csv' column 'age', line 5 ('forty'): the schema says number" in words
    assert "b.csv' column 'sex', line 2 ('x'): the schema allows f, m" in words
    assert "b.csv' column 'sick', line 7 ('perhaps'): the schema's classes are 0, 1" in words
    assert "c.csv' line 2 is not UTF-8" in words


def test_a_schema_and_no_schema_agree(tmp_path):
    files = sites(tmp_path)
    silos = Silos(files, target="sick>0", drop=("id",))
    (tmp_path / "s.toml").write_text(agree_on_schema(silos)[0].to_toml())
    inferred, given = load_silos(silos), load_silos(Silos(files, schema=str(tmp_path / "s.toml")))
    assert torch.equal(inferred.x, given.x)
    assert inferred.classes == given.classes == ("sick<=0", "sick>0")
    assert str(tmp_path / "s.toml") in given.files


def test_small_and_one_sided_sites_are_named_together(tmp_path):
    one_class = [[*line[:4], 1] for line in rows(2)]
    files = sites(tmp_path, b=rows(1)[:1], c=one_class)
    with pytest.raises(DataError) as told:
        load_silos(Silos(files, target="sick", drop=("id",)))
    assert "b.csv': client 'b' has 1 example: at least 3 are needed" in str(told.value)
    assert "c.csv': client 'c' has only one class: sick is 1 in every row" in str(told.value)


def test_rows_that_are_in_training_and_test_are_told(tmp_path):
    lines = rows(0, 20) * 2
    with pytest.warns(
        CoterieWarning, match=r"a\.csv': \d+ of 12 test rows of client 'a' are identical to training rows"
    ):
        load_silos(Silos((write(tmp_path / "a.csv", lines),), target="sick"))


def test_rows_without_a_target_are_left_out_and_told(tmp_path):
    lines = rows(0)
    lines[4][4] = "?"
    with pytest.warns(
        CoterieWarning, match=r"1 rows have no sick, the target, and are ignored \(the first is line 6\)"
    ):
        federation = load_silos(Silos((write(tmp_path / "a.csv", lines),), target="sick", drop=("id",)))
    assert len(federation.y) == 39


def test_rows_without_a_patient_or_a_site(tmp_path):
    lines = rows(0)
    lines[4][0] = ""
    file = write(tmp_path / "a.csv", lines)
    for key in ("group", "site_column"):
        with pytest.raises(DataError, match=rf"a\.csv' line 6: column 'id' \({key}\) is empty"):
            load_silos(Silos((file,), target="sick", **{key: "id"}))
