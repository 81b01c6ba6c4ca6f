"""Every example runs as it stands."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.tables.silos import Silos, load_silos
from tests.places import SHARED

EXAMPLES = Path(__file__).parent.parent / "examples"
HOSPITALS = Path(os.environ.get("COTERIE_DATA", SHARED)) / "heart-disease"
needs_hospitals = pytest.mark.skipif(
    not HOSPITALS.exists(), reason="the UCI heart-disease files are not here: set COTERIE_DATA"
)


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


@needs_hospitals
def test_heart_disease(capsys):
    """The four UCI hospitals, with the facts of their files."""
    example = load("heart_disease")
    results = example.main(str(HOSPITALS), rounds=2)
    silos = Silos(
        tuple(str(HOSPITALS / f"processed.{name}.data") for name in example.HOSPITALS),
        target="num>0",
        columns=tuple(example.COLUMNS.split(",")),
    )
    federation = load_silos(silos)
    own = [np.concatenate([split.train, split.validation, split.test]) for split in federation.clients.values()]
    assert list(map(len, own)) == [303, 294, 123, 200]
    positive = [float((federation.y[rows] == 1).float().mean()) for rows in own]
    assert positive == pytest.approx([0.459, 0.361, 0.935, 0.745], abs=5e-4)  # 139, 106, 115, 149 patients
    assert federation.x.shape == (920, 13)
    told = capsys.readouterr().out.splitlines()
    for i, method in enumerate(example.METHODS):
        assert told[6 * i].startswith(method)
        table = [line.split() for line in told[6 * i + 2 : 6 * i + 6]]
        assert [row[0] for row in table] == list(results[method].names) == list(federation.names)
        assert [float(row[-1]) for row in table] == pytest.approx(results[method].gains(), abs=6e-4)


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_model_and_data", "sine_curve", "heart_disease"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 60
