import pytest

from coterie.experiment.config import read_toml
from tests.data.test_silos import rows, sites, write
from tests.test_cli import HOW, cli

FAST = ("--rounds", "1", "--local-epochs", "1", *HOW)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return sites(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ("--silos", "a.csv", "b.csv", "c.csv", "--target", "sick", "--drop", "id"),
        ("--target", "sick", "--drop", "id", "--silos", "a.csv", "b.csv", "--mu", "0.1", "c.csv"),
        ("--silos", "*.csv", "--target", "sick", "--drop", "id"),
        ("--silos", ".", "--target", "sick", "--drop", "id"),
        ("--silos", "a.csv", "--silos", "b.csv", "--silos", "c.csv", "--target", "sick", "--drop", "id"),
        ("mine.toml",),
        ("mine.toml", "--silos", "a.csv", "b.csv", "c.csv"),
    ],
    ids=["shell", "mixed", "glob", "folder", "repeated", "file", "both"],
)
def test_the_ways_to_name_files(words, files, tmp_path):
    (tmp_path / "mine.toml").write_text('silos = ["a.csv", "b.csv", "c.csv"]\ntarget = "sick"\ndrop = ["id"]\n')
    result = cli("run", "--method", "fedprox", *words, *FAST, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert read_toml(tmp_path / "run" / "config.toml")["silos"] == list(files)
    assert "fedprox on silos: 3 clients, model tabular" in result.output
    assert "target sick: 2 classes (0, 1)\nnumbers: age, bmi\ncategories: sex\n" in result.output


def test_schema_is_shown_written_and_used(tmp_path):
    shown = cli("data", "schema", "a.csv", "b.csv", "c.csv", "--target", "sick", "--drop", "id")
    assert shown.exit_code == 0
    assert "Write it with -o schema.toml" in shown.output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines() if line[:1] == "│"]
    assert ["sex", "category", "f, m", "", "", ""] in cells
    assert cells[-1] == ["rows", "", "", "40", "40", "40"]
    assert next(row for row in cells if row[0] == "bmi")[3].endswith(" %")
    written = cli("data", "schema", ".", "--target", "sick", "--drop", "id", "-o", "schema.toml")
    assert "Written to schema.toml" in written.output
    assert cli("data", "schema", ".", "--target", "sick", "--drop", "id", "-o", "schema.toml").exit_code == 1
    ran = cli("run", "--silos", "a.csv", "b.csv", "--schema", "schema.toml", *FAST, "--out", "run")
    assert ran.exit_code == 0, ran.stderr
    bad = rows(0)
    bad[0][1], bad[1][2] = "forty", "x"
    write(tmp_path / "a.csv", bad)
    refused = cli("run", "--silos", "a.csv", "b.csv", "--schema", "schema.toml", *FAST, "--out", "other")
    assert refused.exit_code == 1
    assert "a.csv' column 'age', line 2 ('forty'): a number was agreed on" in refused.stderr
    assert "a.csv' column 'sex', line 3 ('x'): a category was agreed on: f, m" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_schema_of_nothing(tmp_path):
    result = cli("data", "schema", "none.csv", "--target", "sick", "-o", "schema.toml")
    assert result.exit_code == 2
    assert "there is no file 'none.csv'" in result.stderr
    assert cli("data", "schema", ".", "--target", "sick", "--site-column", "id").exit_code == 2
    assert not (tmp_path / "schema.toml").exists()


def test_a_data_file_without_silos():
    result = cli("run", "a.csv")
    assert result.exit_code == 2
    assert "'a.csv' is a data file: name it after --silos" in result.stderr


def test_resume(tmp_path):
    assert cli("run", "--silos", ".", "--target", "sick", "--drop", "id", *FAST, "--out", "run").exit_code == 0
    assert cli("resume", "run", "--quiet").exit_code == 0
    write(tmp_path / "a.csv", rows(5))
    result = cli("resume", "run")
    assert result.exit_code == 1
    assert "a.csv' has changed since this run began" in result.stderr


def test_bare_data_still_lists():
    assert "Data sets (--data)" in cli("data").output
    assert "schema" in cli("data", "--help").output
