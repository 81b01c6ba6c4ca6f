"""Machine code is kept on disk, and a machine without a compiler does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.compute import inductor
from coterie.compute.inductor import compiling_takes

RUN = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import torch, coterie, coterie.experiment.progress
from coterie.compute import compiled
draw = torch.Generator().manual_seed(0)
data = [(torch.randn(size, 3, generator=draw), torch.arange(size) % 2) for size in (40, 40, 90)]
counts = []
class Count(coterie.experiment.progress.Silent):
    def say(self, text): print(text)
    def round(self, record, metric): counts.append(compiled.compilations())
options = dict(model="linear", rounds=4, batch_size=8, compile=True, workers=1, engine="stacked", progress=Count())
result = coterie.run("fedavg", data, **options)
coterie.run("fedavg", data, seed=1, reference=False, **options)
print("compilations", counts)
"""


def run(cache: Path, **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=variables, text=True, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_step_is_compiled_once_and_then_found_on_disk(tmp_path: Path) -> None:
    # One step for clients of both sizes, all rounds, the local reference (whose step is the same), and another seed.
    once = "compilations [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
    assert once in run(tmp_path)
    libraries = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert libraries
    assert once in run(tmp_path)
    assert libraries == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert not list(tmp_path.rglob("fxgraph"))  # graphs would be pickles


@pytest.mark.slow
def test_without_a_compiler_steps_run_as_they_are(tmp_path: Path) -> None:
    told = run(tmp_path, CXX=str(tmp_path / "none"), PATH="")
    assert "there is no C++ compiler" in told
    assert "compilations [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]" in told


def test_compiling_is_expected_to_take_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(inductor, "_taken", [])
    assert compiling_takes() == inductor.STEP_SECONDS + inductor.COLD_SECONDS  # nothing was ever compiled here
    (tmp_path / "precompiled_headers").mkdir()
    (tmp_path / "precompiled_headers" / "header.h.gch").write_text("")
    assert compiling_takes() == inductor.STEP_SECONDS
    assert compiling_takes(convolves=True) == inductor.CONVOLUTION_SECONDS
    found = inductor.MIN_SECONDS  # on disk, in less time than the next one may take
    for taken, expected in (([30.0], inductor.STEP_SECONDS), ([2.0], 2.0), ([2.0, 30.0], 30.0), ([2.0, 0.3], found)):
        monkeypatch.setattr(inductor, "_taken", taken)
        assert compiling_takes() == expected


def test_importing_leaves_the_folder_open() -> None:
    """TorchInductor's modules choose one in /tmp, where others could write, if they are imported too early."""
    code = "import os, coterie, coterie.core.scan, coterie.cli; print(os.environ.get('TORCHINDUCTOR_CACHE_DIR'))"
    clean = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    told = subprocess.run([sys.executable, "-c", code], env=clean, text=True, capture_output=True, check=True)
    assert told.stdout.strip() == "None"
