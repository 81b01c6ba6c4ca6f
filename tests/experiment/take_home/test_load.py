import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import coterie
from coterie import METHODS
from coterie.core import tree
from coterie.core.errors import CheckpointError, ConfigError, CoterieError
from coterie.core.method import Method
from coterie.core.task import Task
from coterie.evaluation import score
from coterie.experiment.setup import prepare
from tests.experiment.conftest import QUICK as KINDS
from tests.experiment.conftest import two_kinds

QUICK = {"engine": "loop", "compile": False, "workers": 1, "reference": False, "rounds": 2, "report": False}


def clients(regression=False, outputs=2):
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(30 + 7 * i, 5, generator=draw) for i in range(3)]
    return {f"site {i}/{i}": (x, x[:, :outputs] * 2 if regression else (x[:, 0] > 0).long()) for i, x in enumerate(xs)}


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    return coterie.run("fedmap", "digits", out=out, **QUICK)


def test_predicts_what_was_recorded(digits):
    about = json.loads((digits.path / "clients" / "client-4" / "model.json").read_text())
    state = torch.get_rng_state()
    model = coterie.load(digits.path, "client-4")
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    federation = coterie.prepare("fedmap", "digits", **QUICK).federation
    test = federation.clients["client-4"].test
    right = (model(federation.x[test]).argmax(1) == federation.y[test]).double().mean()
    assert float(right) == pytest.approx(about["metrics"]["test_accuracy"])
    assert isinstance(model, nn.Sequential)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), digits.model("client-4").parameters(), strict=True)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_predicts_what_evaluation_measured(joined, method):
    """Back from the folder by number and by name: the very outputs, and the metrics of the table."""
    result = joined(method)
    federation = prepare(method, two_kinds(), holdout=0.2, **KINDS).federation
    for i, row in enumerate(result.clients):
        test = federation.split(i).test
        with torch.no_grad():
            outputs = coterie.load(result.path, i + 1)(federation.x[test])
            assert torch.equal(outputs, coterie.load(result.path, row["client"])(federation.x[test]))
            assert torch.equal(outputs, result.method.predict(result.task, result.view(i), federation.x[test]))
        found = score(result.task, outputs, federation.y[test], torch.zeros(len(test), dtype=torch.long), 1)
        for metric, value in found.items():
            assert row[f"test_{metric}"] == pytest.approx(value[0], rel=1e-5, nan_ok=True), metric


def test_a_client_has_a_name_and_a_number(tmp_path):
    """A name that looks like a number is a name."""
    named = dict(zip(["x", "3", "1"], clients().values(), strict=True))
    result = coterie.run("local", named, model="linear", out=tmp_path / "run", **QUICK)
    x = torch.randn(6, 5)
    own = {name: result.model(name)(x) for name in named}
    assert torch.equal(coterie.load(tmp_path / "run", "3")(x), own["3"])
    assert torch.equal(coterie.load(tmp_path / "run", 3)(x), own["1"])
    assert torch.equal(coterie.load(tmp_path / "run", 1)(x), own["x"])
    assert torch.equal(coterie.load(tmp_path / "run", "2")(x), own["3"])
    for wrong in (0, 4, "4", "-1", ""):
        with pytest.raises(CoterieError, match=r"there are x, 3, 1 \(or a number from 1 to 3\)"):
            coterie.load(tmp_path / "run", wrong)


def test_no_data_is_read(digits, monkeypatch):
    monkeypatch.setattr("coterie.data.loading.load", lambda *_: pytest.fail("read the data"))
    monkeypatch.setattr("coterie.experiment.federations.load", lambda *_: pytest.fail("read the data"))
    coterie.load(str(digits.path), "client-1")


def test_own_model_is_given_again(tmp_path):
    result = coterie.run("fedbn", clients(), model=module(), out=tmp_path / "run", **QUICK)
    with pytest.raises(ConfigError, match=r"came from Python: coterie.load\('.*', 'site 1/1', model=\.\.\.\)"):
        coterie.load(tmp_path / "run", "site 1/1")
    own = module()
    before = tree.clone(dict(own.state_dict()))
    loaded = coterie.load(tmp_path / "run", "site 1/1", model=own)
    x = torch.randn(6, 5)
    assert torch.equal(loaded(x), result.model("site 1/1")(x))
    assert all(torch.equal(before[name], value) for name, value in own.state_dict().items())
    with pytest.raises(CheckpointError, match=r"model.safetensors' does not fit the model"):
        coterie.load(tmp_path / "run", "site 1/1", model=nn.Sequential(nn.Linear(5, 2)))


def test_regression_with_several_outputs(tmp_path):
    result = coterie.run("local", clients(regression=True), out=tmp_path / "run", model="linear", **QUICK)
    x = torch.randn(6, 5)
    assert torch.equal(coterie.load(tmp_path / "run", "site 0/0")(x), result.model("site 0/0")(x))


class Pair(NamedTuple):
    own: dict
    mean: dict


@dataclass(frozen=True)
class Ensemble(Method):
    """Deploys two models: what it was sent and its own; only here to have a view that is more than one model."""

    share: float = 0.25

    def init_server(self, params, population):
        return params

    def init_client(self, params):
        return params

    def dispatch(self, server, ids, rng):
        return tree.broadcast(server, len(ids))

    def local_update(self, task, client, down, batches):
        own = tree.map(lambda leaf: leaf + batches.count / 100, client)
        return own, own, {"loss": torch.zeros(())}

    def aggregate(self, server, ids, ups):
        return tree.mean(ups, torch.ones(len(ids)))

    def personalize(self, task, client, down, batches):
        return Pair(client, down)

    def predict(self, task: Task, view, x):
        return self.share * task.logits(view.own, x) + (1 - self.share) * task.logits(view.mean, x)


def test_a_view_of_several_models(tmp_path):
    result = coterie.run(Ensemble(share=0.75), clients(), model="linear", out=tmp_path / "run", **QUICK)
    x = torch.randn(6, 5)
    for name in result.names:
        assert torch.equal(coterie.load(tmp_path / "run", name)(x), result.model(name)(x))
    assert not torch.equal(result.model("site 0/0")(x), result.model("site 1/1")(x))


def test_what_is_wrong_is_told(digits, tmp_path):
    with pytest.raises(
        CoterieError, match=r"no client 'client-11' \(did you mean 'client-1+'\?\); there are client-1, "
    ):
        coterie.load(digits.path, "client-11")
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no config\.toml"):
        coterie.load(tmp_path / "nowhere", "client-1")
    (tmp_path / "config.toml").touch()
    with pytest.raises(CheckpointError, match="has no models yet: 'coterie resume"):
        coterie.load(tmp_path, "client-1")


def test_damaged_and_newer_models_are_named(tmp_path):
    coterie.run("local", clients(), model="linear", out=tmp_path / "run", **QUICK)
    folder = tmp_path / "run" / "clients" / "site%200%2F0"
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**about, "format": 99}))
    with pytest.raises(CheckpointError, match="written by a newer version of Coterie"):
        coterie.load(tmp_path / "run", "site 0/0")
    (folder / "model.json").write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model.safetensors' cannot be read"):
        coterie.load(tmp_path / "run", "site 0/0")
