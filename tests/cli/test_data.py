import pytest

from coterie.data import SOURCES
from coterie.models import MODELS
from tests.cli.commands import cli


def test_data_sets_and_models_are_listed():
    told = cli("data").output
    assert all(name in told for name in [*SOURCES, *MODELS])
    assert "optimizer adam, lr 0.0001" in told


@pytest.mark.usefixtures("no_data")
def test_the_listing_tells_what_is_here(tmp_path):
    told = cli("data").output
    for name, source in SOURCES.items():
        line = next(line for line in told.splitlines() if f"│ {name} " in line)
        facts = source.facts
        assert all(fact in line for fact in (facts.size, facts.classes, facts.licence, facts.origin)), name
    here = {
        line.split("│")[1].strip(): line.split("│")[-2].strip() for line in told.splitlines() if line.count("│") == 8
    }
    assert (here["digits"], here["cifar10"], here["office-31"]) == ("yes", "get", "ask")
    (tmp_path / "own" / "cifar10").mkdir(parents=True)
    (tmp_path / "own" / "cifar10" / "cifar-10-python.tar.gz").touch()
    line = next(
        line for line in cli("data", "--data-dir", tmp_path / "own").output.splitlines() if "│ cifar10 " in line
    )
    assert line.rstrip("│ ").endswith("yes")


def test_bare_data_still_lists():
    assert "Data sets (--data)" in cli("data").output
    assert "schema" in cli("data", "--help").output
