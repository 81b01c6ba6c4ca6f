"""The tables of usual models, thresholds and temperatures as a user sees them."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import HOW, cli
from tests.data.tables.test_silos import sites

SITES = ("--target", "sick", "--drop", "id", "--model", "linear", "--rounds", "2", "--no-report", *HOW)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("references")
    choices = ("--take-home", "best", "--calibrate", "--threshold", "balanced_accuracy")
    words = ("run", "--silos", *sites(folder), *SITES, "--references", *choices, "--out", folder / "run")
    return folder / "run", cli(*words)


def rows(output, title):
    """The cells of a table's rows, by the first of them."""
    lines = output[output.index(title) :].splitlines()
    table = lines[: next(k for k, line in enumerate(lines) if line.startswith("└"))]
    cells = [[cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")] for line in table if "│" in line]
    return {row[0]: row[1:] for row in cells}


def test_usual_models_stand_beside_the_network(found):
    out, result = found
    assert result.exit_code == 0, result.output
    assert "references: scikit-learn's linear models and trees, on own and on pooled data" in result.output
    told = json.loads((out / "references.json").read_text())["test"]
    shown = rows(result.output, "Usual models on the same data: test AUROC (%)")
    names = ["linear, own", "trees, own", "linear, pooled", "trees, pooled"]
    for i, client in enumerate("abc"):
        assert shown[client] == [f"{100 * told[name]['auroc'][i]:.1f}" for name in names]
    assert shown["mean of 3"] == [f"{100 * sum(told[name]['auroc']) / 3:.1f}" for name in names]
    assert "Trained alone, the network is on average" in result.output


def test_two_classes_are_judged_by_auroc(found):
    _, result = found
    assert "Test AUROC (%)" in result.output
    assert "was selected by mean validation AUROC" in result.output


def test_thresholds_and_temperatures_are_told(found):
    out, result = found
    told = json.loads((out / "take_home.json").read_text())["clients"]
    shown = rows(result.output, "What each client takes home: test AUROC (%)")
    for row in told:
        assert f"{row['temperature']:.2f}" == shown[row["client"]][3]
        assert f"{row['threshold']:.2f}" == shown[row["client"]][4]
    own = sum(row["at_threshold"]["balanced_accuracy"] for row in told) / 3
    usual = sum(row["test"]["balanced_accuracy"] for row in told) / 3
    assert (
        "With thresholds chosen on validation data, mean test balanced accuracy is "
        f"{100 * own:.1f} % ({100 * usual:.1f} % at 0.5)." in result.output
    )
    loss = sum(row["test"]["loss"] for row in told) / 3
    assert f"mean test log-loss {loss:.4g}, calibration error" in result.output


def test_a_comparison_has_them_as_rows(files):
    words = ("compare", "--silos", *files, *SITES, "--methods", "local,fedavg", "--seeds", "1", "--references")
    result = cli(*words, "--out", "all")
    assert result.exit_code == 0, result.output
    for label in ("linear model, own data", "trees, own data", "linear model, pooled", "trees, pooled"):
        assert f"│ {label} " in result.output
    assert "Trained alone, the network is on average" in result.output
    assert Path("all/comparison.json").exists()
