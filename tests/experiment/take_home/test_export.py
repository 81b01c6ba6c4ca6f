import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import coterie
from coterie.core import tree
from coterie.core.errors import ConfigError, CoterieError
from coterie.experiment.take_home.export import export
from tests.experiment.conftest import QUICK, two_kinds

# One model; a mixture of collaborators; prototypes; modules beside the model; Gaussian processes.
KINDS = ["fedmap", "federico", "fedproto", "fedcp", "gpfl", "pfedgp"]
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", KINDS)
def test_torch_archives_predict_the_same_for_any_number_of_rows(joined, method, tmp_path):
    run = joined(method).path
    path = export(run, 2, "torch", tmp_path / "m.pt2")
    program = torch.export.load(path).module()
    model = coterie.load(run, 2)
    for rows in (1, 7):
        assert torch.equal(program(X[:rows]), model(X[:rows]))


def test_no_part_of_a_torch_archive_is_a_pickle(joined, tmp_path):
    path = export(joined("federico").path, 1, "torch", tmp_path / "m.pt2")
    view = coterie.load(joined("federico").path, 1)
    with zipfile.ZipFile(path) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert not parts["data/sample_inputs/model.pt"]
    weights = [content for name, content in parts.items() if name.startswith("data/weights/weight_")]
    assert sorted(map(len, weights)) == sorted(leaf.nbytes for leaf in view.buffers())  # raw, and this client's only
    assert not any(content[:2] in (b"PK", b"\x80\x02", b"\x80\x04") for content in parts.values())
    assert json.loads(parts["extra/model.json"])["client"] == joined("federico").names[0]


def test_it_loads_without_coterie(joined, tmp_path):
    path = export(joined("federico").path, 1, "torch", tmp_path / "m.pt2", probabilities=True)
    code = (
        "import sys, torch\n"
        f"out = torch.export.load({str(path)!r}).module()(torch.zeros(3, 4))\n"
        "assert 'coterie' not in sys.modules and torch.allclose(out.sum(1), torch.ones(3)), out"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("method", KINDS)
def test_onnx_is_what_pytorch_says(joined, method, tmp_path):
    pytest.importorskip("onnxscript", reason="needs coterie[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="needs coterie[onnx]")
    run = joined(method).path
    probabilities = method == "federico"
    path = export(run, 2, "onnx", tmp_path / "m.onnx", probabilities=probabilities)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = "probabilities" if probabilities else "logits"
    assert [each.name for each in session.get_inputs()] == ["x"]
    assert json.loads(session.get_modelmeta().custom_metadata_map["output"]) == name
    with torch.no_grad():
        outputs = coterie.load(run, 2)(X)
    expected = outputs.softmax(1) if probabilities else outputs
    for rows in (1, 7):  # the first axis is free
        (found,) = session.run([name], {"x": X[:rows].numpy()})
        np.testing.assert_allclose(found, expected[:rows].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", KINDS)
def test_safetensors_and_how_to_rebuild(joined, method, tmp_path):
    result = joined(method)
    path = export(result.path, 2, "safetensors", tmp_path / "m.safetensors")
    about = json.loads((tmp_path / "m.safetensors.json").read_text())
    flat = load_file(path)
    assert {"method", "model", "input_shape", "rebuild", "weights"} <= about.keys()
    own = tree.pack(result.view(1))
    assert flat.keys() == own.keys()
    assert all(torch.equal(flat[key], value) for key, value in own.items())
    if method == "fedmap":  # plain PyTorch is enough
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, about["outputs"])
        )
        model.load_state_dict(flat)
        assert torch.equal(model(X), coterie.load(result.path, 2)(X))


def test_where_it_goes(joined, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = joined("fedmap").names[0]
    assert str(export(joined("fedmap").path, 1, "safetensors")) == f"{name}.safetensors"
    (tmp_path / "models").mkdir()
    assert export(joined("fedmap").path, 1, "safetensors", "models").exists()


def test_what_is_wrong_is_told(joined, tmp_path, monkeypatch):
    run = joined("fedmap").path
    with pytest.raises(ConfigError, match="format = 'keras': choose from torch, onnx, safetensors"):
        export(run, 1, "keras")
    with pytest.raises(ConfigError, match="probabilities: safetensors holds weights only"):
        export(run, 1, "safetensors", probabilities=True)
    with pytest.raises(CoterieError, match="there is no client 'nobody'"):
        export(run, "nobody")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[onnx\]'"):
        export(run, 1, "onnx", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


class Untraceable(nn.Sequential):
    """A path that depends on the data."""

    def forward(self, x):
        return super().forward(x) if float(x.sum()) > -1e9 else x


def test_a_model_that_cannot_be_traced_is_told(tmp_path):
    settings = {**QUICK, "rounds": 1, "model": "linear"}
    coterie.run("local", two_kinds(3), out=tmp_path / "run", **settings)
    model = Untraceable(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(CoterieError, match=r"cannot be traced .*--format safetensors exports its weights"):
        export(tmp_path / "run", 1, "torch", tmp_path / "m.pt2", model=model)
    assert not (tmp_path / "m.pt2").exists()
