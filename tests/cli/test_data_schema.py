import pytest

from tests.cli.commands import HOW, cli
from tests.data.tables.test_silos import rows, write

pytestmark = pytest.mark.usefixtures("files")
FAST = ("--rounds", "1", "--local-epochs", "1", *HOW)


def test_schema_is_shown_written_and_used(tmp_path):
    shown = cli("data", "schema", "a.csv", "b.csv", "c.csv", "--target", "sick", "--drop", "id")
    assert shown.exit_code == 0
    assert "Add -o schema.toml" in shown.output
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
    assert "a.csv' column 'age', line 2 ('forty'): the schema says number" in refused.stderr
    assert "a.csv' column 'sex', line 3 ('x'): the schema allows f, m" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_schema_of_nothing(tmp_path):
    result = cli("data", "schema", "none.csv", "--target", "sick", "-o", "schema.toml")
    assert result.exit_code == 2
    assert "there is no file 'none.csv'" in result.stderr
    assert cli("data", "schema", ".", "--target", "sick", "--site-column", "id").exit_code == 2
    assert not (tmp_path / "schema.toml").exists()
