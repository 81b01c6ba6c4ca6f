"""Machines that are not like ours: a run succeeds on each, and says in one true sentence what it does without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import compiles

# FedAvg has one step to compile: what becomes of it is the question here, and not what it computes.
COMMAND = (
    "run --method fedavg --data digits --clients 3 --rounds 2 --engine stacked --compile --workers 1 --no-reference "
    "--no-report --out"
)
START = "from coterie.cli import main; main()"
WITHOUT_A_NAME = "import torch._inductor.compile_fx as module; del module.compile_fx; "


def run(out: Path, before: str = "", **environment: str) -> tuple[dict[str, Any], str]:
    """A run in a process of its own: (how its steps were taken, what it printed)."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", **environment}
    done = subprocess.run(
        [sys.executable, "-c", before + START, *COMMAND.split(), str(out)],
        env={name: value for name, value in variables.items() if value},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert (out / "summary.json").exists()
    return json.loads((out / "engine.json").read_text()), " ".join(told.split())


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    nothing_kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "COTERIE_BACKEND": ""}
    engine, told = run(tmp_path / "run", PATH=str(tmp_path / "bin"), CXX="", **nothing_kept)
    why = "there is no C++ compiler: g++ is not on the PATH (CXX names another one)"
    assert (engine["steps"]["path"], engine["steps"]["why"]) == ("plain", why)
    assert why in told


@compiles
@pytest.mark.slow
def test_no_compiler_but_the_steps_of_a_machine_that_has_one(tmp_path: Path) -> None:
    """The cache folder of a machine that is like ours but for the compiler: steps are found, checked and repeated."""
    (tmp_path / "bin").mkdir()
    cache, without = str(tmp_path / "cache"), str(tmp_path / "bin")
    first, _ = run(tmp_path / "first", COTERIE_BACKEND="", TORCHINDUCTOR_CACHE_DIR=cache)
    then, _ = run(tmp_path / "then", PATH=without, CXX="", COTERIE_BACKEND="", TORCHINDUCTOR_CACHE_DIR=cache)
    assert first["steps"]["path"] == then["steps"]["path"] == "replayed"
    model = "clients/client-1/model.safetensors"
    assert (tmp_path / "first" / model).read_bytes() == (tmp_path / "then" / model).read_bytes()


@compiles
def test_an_unknown_torchinductor(tmp_path: Path) -> None:
    """A private name that this version of PyTorch lacks is told as what it is, not as a missing compiler."""
    cache = str(tmp_path / "cache")  # without steps of earlier runs, for which TorchInductor is not needed
    engine, told = run(tmp_path / "run", WITHOUT_A_NAME, COTERIE_BACKEND="", TORCHINDUCTOR_CACHE_DIR=cache)
    assert engine["steps"]["path"] == "plain"
    assert engine["steps"]["why"].endswith("has no torch._inductor.compile_fx.compile_fx")
    assert engine["steps"]["why"] in told
    assert "is there a C++ compiler" not in told


@compiles
def test_generated_code_of_another_form(tmp_path: Path) -> None:
    """TORCHINDUCTOR_GRAPH_PARTITION=0 makes TorchInductor write a function instead of a method: it is repeated, too."""
    engine, _ = run(tmp_path / "run", TORCHINDUCTOR_GRAPH_PARTITION="0", COTERIE_BACKEND="")
    assert (engine["steps"]["path"], engine["steps"]["why"]) == ("replayed", "")


@compiles
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """A file stands where the home folder should be, so that not even root can write there."""
    (tmp_path / "home").write_text("")
    folders = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "", "XDG_DATA_HOME": "", "TORCHINDUCTOR_CACHE_DIR": ""}
    engine, told = run(tmp_path / "run", COTERIE_BACKEND="", **folders)
    why = "compiled steps are not kept for later runs, since ~/.cache cannot be used (Not a directory)"
    assert engine["steps"]["path"] == "replayed"
    assert engine["notes"] == [why]
    assert why in told


def test_plain_by_the_environment(tmp_path: Path) -> None:
    engine, told = run(tmp_path / "run", COTERIE_BACKEND="plain")
    why = "COTERIE_BACKEND=plain asks for ordinary PyTorch"
    assert (engine["steps"]["path"], engine["steps"]["why"]) == ("plain", why)
    assert why in told
