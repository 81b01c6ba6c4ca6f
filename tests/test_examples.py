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


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_model_and_data"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 40
