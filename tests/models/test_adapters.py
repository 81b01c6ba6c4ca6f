"""LoRA begins where the model was, trains and sends little, averages as it says, and merges into ordinary weights."""

import pytest
import safetensors.torch
import torch
from torch import nn

import coterie
from coterie.core import tree
from coterie.core.errors import ConfigError, CoterieWarning
from coterie.core.make_task import make_task
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.minibatches import Plan
from coterie.engine import Engine, in_order
from coterie.experiment.building import with_weights
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS, FedAvg
from coterie.models.adapters import LoRA, find_adapter, lora, merge
from coterie.storage.run_folder import RunFolder
from coterie.testing.engine_laws import ROUNDING, engines
from coterie.testing.kit import LOOP, PLAN, federation, same
from tests.marks import compiles

QUICK = {"engine": "loop", "compile": False, "workers": 1, "report": False}


class Attends(nn.Module):
    """Attention, BatchNorm and linear layers over six inputs as a sequence of six."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(1, 4), nn.BatchNorm1d(6)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(self.up(self.norm(x)[..., None])).mean(1))


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def moved(module):
    """The same module with updates that are not 0."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("_lora_b"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return module


@pytest.mark.parametrize("made", [Attends, perceptron])
def test_it_begins_where_the_model_was_and_merges_into_ordinary_weights(made):
    plain, x = made().eval(), torch.randn(5, 6)
    adapted = lora(plain, rank=2).eval()
    with torch.enable_grad():  # without it, PyTorch would take another path through an encoder
        torch.testing.assert_close(adapted(x), plain(x))
        expected = moved(adapted)(x)
        assert not torch.allclose(expected, plain(x), atol=1e-2)
        fused = adapted(x) if made is perceptron else None
    with torch.no_grad():
        torch.testing.assert_close(adapted(x), expected)  # on PyTorch's fused path as well
    state = dict(adapted.state_dict())
    merged = merge(adapted)
    assert type(merged) is type(plain)
    torch.testing.assert_close(merged(x), expected)
    plain.load_state_dict(LoRA(rank=2).merged(state))
    torch.testing.assert_close(plain(x), expected)
    assert {name: type(m).__name__.removeprefix("_Frozen") for name, m in merged.named_modules()}.keys() == {
        name for name, _ in plain.named_modules()
    }
    assert fused is None or torch.equal(fused, expected)


def test_an_update_is_alpha_over_rank_times_b_a():
    layer = moved(lora(perceptron(), rank=2, alpha=6.0, layers=("0",)))[0]
    a, b, frozen = (layer._parameters[name] for name in ("weight_lora_a", "weight_lora_b", "weight"))
    torch.testing.assert_close(layer.weight, frozen + 3.0 * b @ a)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), x @ (frozen + 3.0 * b @ a).T + layer.bias)


def test_only_updates_and_the_head_are_trained_and_travel():
    task = make_task(lora(Attends(), rank=2), "classification", 3, federation().x)
    narrow = {name for name in task.init() if "_lora_" in name}
    assert task.trainable == narrow | {"head.weight", "head.bias"} == task.sent(task.init()).keys()
    assert {name.rpartition(".")[2] for name in narrow if "self_attn.in" in name} == {
        "in_proj_weight_lora_a",
        "in_proj_weight_lora_b",
    }
    sim = Simulation.start(FedAvg(SGD(lr=0.5)), task, federation(), PLAN, 4, seed=0)
    begin = sim.state.server
    told = sim.train(1, LOOP)
    # up: 1 and 4 wide, the attention's 4 and 12, 4 and 4, the two of the encoder 4 and 8: times 2, and the head's 15.
    numbers = 2 * ((1 + 4) + (4 + 12) + (4 + 4) + 2 * (4 + 8)) + 4 * 3 + 3
    assert told.bytes_up == 4 * (4 * numbers + 4)  # four clients: float32, and how many examples they have
    for name, value in sim.state.server.items():
        assert torch.equal(value, begin[name]) == (name not in task.trainable), name  # statistics included


@pytest.mark.parametrize("method", METHODS)
def test_no_method_sends_the_frozen_model_in_either_direction(method):
    """What is counted is what crosses: with W of 64 thousand numbers, not even the largest message has room for one."""
    wide = nn.Sequential(nn.Linear(6, 256), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8), nn.Linear(8, 3))
    task = make_task(lora(wide, rank=1), "classification", 3, federation().x)
    sim = Simulation.start(METHODS[method]().scheduled(2), task, federation(), Plan(8), 4, seed=0)
    for number in (1, 2):  # in the first round there may be nothing to tell
        told = sim.train(number, LOOP)
    assert 0 <= told.bytes_up + told.bytes_down < 4 * 256 * 256 * 4
    assert told.bytes_down > 0 or method == "local"


def test_the_mean_of_products_is_the_product_of_means_only_where_one_factor_is_common():
    rows = torch.stack, torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, *shape, generator=rows[1]) for shape in ((2, 6), (8, 2)))
    assert not torch.allclose(b.mean(0) @ a.mean(0), (b @ a).mean(0), atol=0.1)
    torch.testing.assert_close(b.mean(0) @ a[0], (b @ a[0]).mean(0))
    task = Task(lora(perceptron(), rank=2, freeze_a=True), num_classes=3)
    sim = Simulation.start(FedAvg(SGD(lr=0.5)), task, federation(), PLAN, 4, seed=0)
    fn, ids, rows_of = sim.probe(1)

    _, ups, _ = in_order(LOOP.map(fn, sim.federation, ids, rows_of, purpose="train"), ids)
    frozen = {n: v for n, v in task.init().items() if n not in ups.params}
    adapter = LoRA(rank=2, freeze_a=True)
    each = [adapter.merged({**frozen, **tree.rows(ups.params, i)}) for i in ids]
    mean = tree.mean(tree.stack(each), ups.count)
    sim.train(1, LOOP)
    averaged = adapter.merged(sim.state.server)
    for name, value in averaged.items():
        torch.testing.assert_close(value, mean[name])


def outcome(engine):
    task = make_task(lora(perceptron(), rank=2), "classification", 3, federation().x)
    sim = Simulation.start(FedAvg(SGD(lr=0.1)), task, federation(), PLAN, 3, seed=0)
    for number in (1, 2):
        sim.train(number, engine)
    return sim.state, sim.views(2, engine), sim.predictions(2, engine).outputs


@compiles
@pytest.mark.slow
def test_every_engine_agrees(monkeypatch):
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    base = outcome(LOOP)
    for name, engine in engines():
        same(base, outcome(engine), f"{name} and one client at a time", ROUNDING)


def test_stacked_it_is_the_same():
    same(outcome(LOOP), outcome(Engine("stacked", chunk=3)), "loop and stacked", ROUNDING)


def test_over_flower_it_is_the_simulators_bits(tmp_path):
    pytest.importorskip("fcntl", reason="the server of real sites needs Linux or macOS")
    from tests.deploy.inprocess import ledger, make, simulate
    from tests.deploy.inprocess import same as same_bits

    setup, server, _ = make("fedavg", tmp_path, reference=False, adapter="lora:rank=2")
    server.run(ledger())
    sim = simulate(setup)

    kept, _ = RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))
    assert any("_lora_b" in name and value.abs().sum() > 0 for name, value in kept.server.items())
    assert same_bits(kept.server, sim.state.server)


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "ditto"])
def test_a_run_is_loaded_predicted_and_exported_merged(method, tmp_path):
    how = {"model": "mlp:hidden=16/8", "adapter": "lora:rank=2:alpha=4", "rounds": 2, **QUICK}
    result = coterie.run(method, "digits", lr=0.05, out=tmp_path / "run", reference=False, **how)
    x = torch.rand(5, 1, 8, 8)
    loaded, own = coterie.load(tmp_path / "run", 1), result.model(0)
    assert torch.equal(loaded(x), own(x))
    path = coterie.export(tmp_path / "run", 1, "safetensors", tmp_path / "weights.safetensors")
    weights = safetensors.torch.load_file(path)
    assert not any("_lora_" in name for name in weights)
    if method != "fedproto":  # whose view has prototypes beside the model
        plain = coterie.prepare(method, "digits", model="mlp:hidden=16/8").task
        assert {name: v.shape for name, v in weights.items()} == {name: v.shape for name, v in plain.init().items()}
        torch.testing.assert_close(plain.logits(weights, x), loaded(x))
    program = coterie.export(tmp_path / "run", 1, "torch", tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(program).module()(x), loaded(x))


def test_a_run_from_pretrained_weights_with_another_head(tmp_path):
    old = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    safetensors.torch.save_file({**old.state_dict(), "other": torch.zeros(1)}, tmp_path / "old.safetensors")
    how = {"model": "mlp:hidden=16", "pretrained": str(tmp_path / "old.safetensors"), **QUICK}
    with pytest.warns(CoterieWarning, match=r"head \(3.weight, 3.bias\) begins anew, and other is not in the model"):
        setup = coterie.prepare("fedavg", "digits", adapter="lora:rank=2", **how)
    assert torch.equal(setup.task.init()["1.weight"], old[1].weight)
    again = coterie.prepare("fedavg", "digits", adapter="lora:rank=2", **{**how, "pretrained": None})
    assert torch.equal(setup.task.init()["3.weight"], again.task.init()["3.weight"])


def test_files_that_do_not_fit_are_refused_in_words(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"0.weight": torch.zeros(8, 5), "2.weight": torch.zeros(8, 8)}, path)
    with pytest.raises(ConfigError, match=r"lacks 0.bias, 2.bias of the model(.|\n)*'0.weight' has shape \(8, 5\)"):
        with_weights(perceptron(), path)
    with pytest.raises(ConfigError, match="pretrained = "):
        with_weights(perceptron(), tmp_path / "none.safetensors")


def test_adapters_that_there_are_not_are_refused_in_words():
    assert find_adapter("lora:rank=2:alpha=3:layers=0/2:freeze_a=true") == LoRA(2, 3.0, ("0", "2"), True)
    with pytest.raises(ConfigError, match="no adapter 'dora'"):
        find_adapter("dora")
    with pytest.raises(ConfigError, match=r"'lora:rang=2' has no option 'rang' \(did.*\); write lora\[:rank=4\]"):
        find_adapter("lora:rang=2")
    with pytest.raises(ConfigError, match="no linear layer of the model is called query; it has 0, 2"):
        lora(perceptron(), layers=("query",))
    with pytest.raises(ConfigError, match="rank = 0 must be"):
        find_adapter("lora:rank=0")
