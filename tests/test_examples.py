"""Every example runs as it stands."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_own_model_and_data(capsys):
    result = load("own_model_and_data").main()
    assert len(result.clients) == 4
    assert "client-3: alone" in capsys.readouterr().out
    assert isinstance(result.model(0), torch.nn.Sequential)
    assert np.isfinite(result.gains()).all()


def test_sine_curve(capsys, tmp_path):
    """The picture of FedeRiCo's Figure 1: pieces of the curve use the lines of the pieces beside them."""
    weights, results = load("sine_curve").main(str(tmp_path / "sine.html"))
    distance = np.abs(np.subtract.outer(np.arange(10), np.arange(10)))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    assert (weights * (distance <= 1)).sum(1).mean() > 0.45  # 0.28 by chance
    assert (weights * (distance >= 5)).sum(1).mean() < 0.15  # 0.3 by chance
    assert results["federico"].mean() < results["fedavg"].mean() - 0.1
    assert "by chance 0.28" in capsys.readouterr().out
    assert "client 10" in (tmp_path / "sine.html").read_text()


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_model_and_data", "sine_curve"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 60
