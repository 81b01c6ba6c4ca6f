"""What is released: the wheel and the source archive hold what they must, and work in an environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import coterie
from tests.places import ROOT

PACKAGE = ROOT / "src" / "coterie"


def run(command: Sequence[str | Path], folder: Path, seconds: float = 900) -> str:
    """Run a command outside the project's folder, without the project on Python's path: what it printed."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COTERIE", "VIRTUAL"))
    }
    variables |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "COLUMNS": "200"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=variables,
        text=True,
        capture_output=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    held = {Path(file.distribution_path).as_posix() for file in wheel.recurse_included_files()}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert held == {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    assert {"coterie/py.typed", "coterie/compute/replay.cpp", "coterie/report/assets/page.js"} <= held
    assert sum(name.startswith("coterie/settings/") and name.endswith(".toml") for name in held) > 40


def test_the_source_archive_can_be_built_and_tested() -> None:
    archive = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    held = {Path(file.relative_path).as_posix() for file in archive.recurse_included_files()}
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "constraints.txt",
        "tests/test_release.py",
        "docs/plan.md",
    } <= held
    assert not [name for name in held if name.startswith((".venv/", "site/", "runs/", "dist/"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files of a release, by their kind."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT], folder)
    wheel, archive = (next(folder.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    assert coterie.__version__ in wheel.name
    assert coterie.__version__ in archive.name
    return {"wheel": wheel, "sdist": archive}


@pytest.mark.slow
def test_the_files_have_the_same_package(built: dict[str, Path]) -> None:
    """The wheel is built from the source archive: nothing that it needs is lost on the way."""
    with zipfile.ZipFile(built["wheel"]) as wheel, tarfile.open(built["sdist"]) as archive:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        members = (name.partition("/")[2] for name in archive.getnames())
        assert packed == {name.removeprefix("src/") for name in members if name.startswith("src/coterie/")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment_and_runs(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    programs = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    constraints = ROOT / "constraints.txt"
    run([programs / "python", "-m", "pip", "install", "--quiet", "-c", constraints, built[kind]], tmp_path)
    home = run([programs / "python", "-c", "import coterie; print(coterie.__file__)"], tmp_path)
    assert Path(home.strip()).is_relative_to(tmp_path / "venv")
    assert run([programs / "coterie", "--version"], tmp_path).strip() == f"coterie {coterie.__version__}"
    assert coterie.__version__ in run([programs / "coterie", "doctor"], tmp_path)
    command = "run --method fedavg --data hospitals --rounds 2 --workers 1 --out run"
    assert "Written to run" in run([programs / "coterie", *command.split()], tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert "fedmap-1" in run([programs / "coterie", "reproduce"], tmp_path)
