"""Kernels that are compiled together compute the same, each under a name of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from coterie import kernels
from coterie.machine_code import compile_graph
{before}
def step(x, w):
    y = (x @ w).relu() * 2  # products are not fused with what is around them: four kernels
    z = (y @ w).exp() + 1
    return [(z @ w).tanh().sum(1), y.amax(0)]
example = [torch.linspace(-1, 1, 96).view(8, 12), torch.linspace(0, 1, 144).view(12, 12)]
torch.set_num_threads(1)
run, _ = compile_graph(make_fx(step)(*example), example)
for got, expected in zip(run(*example), step(*example)):
    torch.testing.assert_close(got, expected)
"""
DIFFERENT = "kernels.HEADERS = 'nothing that a compiler would take'"  # then each is compiled alone


@pytest.mark.slow
@pytest.mark.parametrize(("before", "together"), [("", True), (DIFFERENT, False)])
def test_kernels_of_a_step(before: str, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(before=before)], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    sources = [path.with_suffix(".cpp").read_text() for path in tmp_path.rglob("*.main.so")]
    names = [re.findall(r"PyInit_(\w+)\(", source) for source in sources]
    if together:
        assert max(map(len, names)) > 1
        assert len({name for each in names for name in each}) == sum(map(len, names))
    else:
        assert all(each == ["kernel"] for each in names)
        assert len(names) > 1
