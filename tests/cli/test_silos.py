import pytest

from coterie.core.toml import read_toml
from tests.cli.commands import HOW, cli
from tests.data.tables.test_silos import rows, write

pytestmark = pytest.mark.usefixtures("files")
FAST = ("--rounds", "1", "--local-epochs", "1", *HOW)


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
