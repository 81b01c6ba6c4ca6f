import csv

from tests.cli.commands import cli, table
from tests.experiment.conftest import two_kinds


def test_onboard_a_file(run):
    x, y = two_kinds(5)["site-5"]
    table("clinic.csv", x, y.tolist())
    told = cli("onboard", run, "--data", "clinic.csv", "--target", "label")
    assert told.exit_code == 0, told.output
    assert "clinic" in told.output
    assert "clinic's model from FedMAP is" in told.output
    table("rows.csv", x[:3])
    again = cli("predict", run, "rows.csv", "--client", "clinic").stdout
    assert again == cli("predict", run, "rows.csv", "--client", "5").stdout
    with (run / "onboarded.csv").open() as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["clinic"]
    cli("onboard", run, "--data", "clinic.csv", "--name", "clinic 2", "--quiet")
    cli("onboard", run, "--data", "clinic.csv", "--quiet")
    with (run / "onboarded.csv").open() as file:
        assert sorted(row["client"] for row in csv.DictReader(file)) == ["clinic", "clinic 2"]
    assert "took part in this run" in cli("onboard", run, "--data", "clinic.csv", "--name", "site-1").stderr
