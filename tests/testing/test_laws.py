"""Every registered method x every law. A method that is registered is tested, without another line."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import coterie
from coterie import METHODS, laws
from coterie.experiment.config import Config
from coterie.hyper import hyper_parameters
from coterie.local import OPTIMIZERS, SGD
from coterie.methods import FedAvg, FedMAP, FedProx
from coterie.tree import Params

FOLDER = Path(coterie.__file__).parent / "methods"


@pytest.mark.parametrize("law", laws.LAWS)
@pytest.mark.parametrize("method", METHODS)
def test_law(method, law):
    laws.LAWS[law](METHODS[method]())


LONG = ("fedmap", "federico", "pfedbred")  # so many options that they are left to `make test-all`


@pytest.mark.filterwarnings("ignore::coterie.CoterieWarning")  # an extreme value may deserve one
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in METHODS]
)
def test_every_option_obeys_the_first_law(method):
    plain = dataclasses.replace(METHODS[method](), optimizer=SGD(0.05))
    for name, variant in laws.variants(plain):
        if name.split(" = ")[0] in {hyper.name for hyper in hyper_parameters(type(plain))}:
            laws.engines_agree(variant, tolerance=laws.ROUNDING)


@pytest.mark.parametrize("method", METHODS)
def test_flags_are_unambiguous(method):
    names = {hyper.name for hyper in hyper_parameters(METHODS[method])}
    optimizers = {hyper.name for cls in OPTIMIZERS.values() for hyper in hyper_parameters(cls)}
    assert not names & (set(Config.model_fields) | optimizers)
    assert all(hyper.help for hyper in hyper_parameters(METHODS[method])), "say what the hyper-parameter means"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_method_files_are_pure(path):
    """No in-place operation, `.data`, `.item()`, global randomness, or inheritance between methods."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            in_place = node.attr.endswith("_") and not node.attr.startswith("_")
            assert not in_place, f"line {node.lineno}: {node.attr}"
            assert node.attr not in ("data", "item", "manual_seed"), f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("rand", "randn"):
            assert any(keyword.arg == "generator" for keyword in node.keywords), f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
            assert not (node.module or "").startswith("coterie.methods"), "methods share through local.py and tree.py"
    assert len(path.read_text().splitlines()) <= 132


# The laws must be able to fail: each of these breaks one on purpose.


@dataclasses.dataclass(frozen=True)
class DetachedProx(FedProx):
    """The defect of a well-known library: a penalty without a gradient."""

    def local_update(self, task, client, down, batches):
        return FedAvg(self.optimizer).local_update(task, client, down, batches)


class InPlace(FedAvg):
    def aggregate(self, server: Params, ids, ups):
        for value in ups.params.values():
            value.mul_(2)
        return super().aggregate(server, ids, ups)


class Peeks(FedAvg):
    def local_update(self, task, client, down, batches):
        return super().local_update(task, client, down, batches._replace(count=batches.x.sum()))


class ByPosition(FedMAP):
    def aggregate(self, server, ids, ups):
        return super().aggregate(server, ids, ups._replace(log_weight=ids.float()))


class CountsPadding(FedAvg):
    def local_update(self, task, client, down, batches):
        up = super().local_update(task, client, down, batches)
        return up[0], up[1]._replace(count=batches.index.numel() + up[1].count), up[2]


class Forgets(FedAvg):
    def aggregate(self, server, ids, ups):
        return server


class NoiseByPlace(FedAvg):
    """Peers that ask for one row of noise each get other noise than clients of a server, who ask for all at once."""

    def dispatch(self, server, ids, rng):
        noise = 0.1 * torch.rand(len(ids), generator=rng)
        return {name: w + noise.reshape(-1, *[1] * w.ndim).to(w.dtype) for name, w in server.items()}


class Hidden(FedAvg):
    def init_server(self, params, population):
        object.__setattr__(self, "rounds", 0)
        return super().init_server(params, population)

    def aggregate(self, server, ids, ups):
        object.__setattr__(self, "rounds", self.rounds + 1)
        averaged = super().aggregate(server, ids, ups)
        return averaged | {"0.weight": averaged["0.weight"] * (1 + 0.01 * self.rounds)}


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (NoiseByPlace(), "2 server = peers"),
        (DetachedProx(), "4 hyper-parameters change the result"),
        (InPlace(), "3 inputs are not modified"),
        (Peeks(), "8 own data only"),
        (ByPosition(), "6 relabelling relabels"),
        (CountsPadding(), "5 padding is ignored"),
        (Forgets(), "9 one client, own solution"),
        (Hidden(), "10 resuming changes nothing"),
    ],
    ids=lambda value: type(value).__name__ if dataclasses.is_dataclass(value) else value,
)
def test_the_laws_find_defects(broken, law):
    with pytest.raises(laws.LawBroken):
        laws.LAWS[law](broken)
