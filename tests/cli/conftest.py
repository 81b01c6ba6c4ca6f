from importlib.util import find_spec

import pytest

import coterie
from tests.cli.commands import TINY, cli
from tests.data.tables.test_silos import sites
from tests.experiment.conftest import QUICK, two_kinds

if find_spec("flwr") is None or find_spec("cryptography") is None:
    collect_ignore = ["test_flower.py"]  # needs: pip install 'coterie[flower]'


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COTERIE_RUNS", raising=False)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, cli("run", *TINY, "--out", out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("home") / "run"
    coterie.run("fedmap", two_kinds(4), out=out, reference=False, **QUICK)
    return out


@pytest.fixture
def files(tmp_path):
    """Three sites' CSV files in the current folder."""
    return sites(tmp_path)


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    """Data folders that are empty."""
    for key in ("COTERIE_DATA", "XDG_DATA_HOME"):
        monkeypatch.setenv(key, str(tmp_path / key))
