"""Devices. There is none here but the CPU, so what runs where is seen on the meta device: shapes without values."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import coterie
from coterie import testing
from coterie.core import device, tree
from coterie.core.device import on
from coterie.core.errors import ConfigError
from coterie.data.minibatches import Plan
from coterie.engine import Central, Engine, in_order
from coterie.engine.engine import chunks
from coterie.experiment.resolve import resolve
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS, PFedVMP
from coterie.parts.mixtures import Losses, epsilon_greedy

META = torch.device("meta")
PLAN = Plan(batch_size=4, steps=2)
QUICK = {"engine": "loop", "compile": False, "workers": 1, "rounds": 2, "local_steps": 2, "report": False}


class NothingOnTheCPU(TorchDispatchMode):
    """Notes every operation that gives a tensor on the CPU, but for Python's numbers, which `vmap` wraps there."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            number = func is torch.ops.aten._to_copy.default and isinstance(value, Tensor) and value.ndim == 0
            if isinstance(value, Tensor) and value.device.type == "cpu" and not number:
                self.found.append((str(func), tuple(value.shape)))
        return out


def method_named(name):
    # The rows of a full precision are as many as a covariance has rank: their number is a value.
    return PFedVMP(precision="diagonal") if name == "pfedvmp" else METHODS[name]()


def drawn_before(sim, ids, engine):
    """(what is sent, rows): positions of minibatches are drawn on the CPU, as everywhere, and moved."""
    down, rows_of = sim._work(1, ids)
    groups = chunks(sim.federation, ids, 1 if engine.kind == "loop" else engine.chunk)
    ready = {tuple(group): rows_of(group) for group in groups}
    return down, lambda group: ready[tuple(group)]


@pytest.mark.parametrize("kind", ["stacked", pytest.param("loop", marks=pytest.mark.slow)])
# Clustered FL decides by numbers whether to split, FedFomo by who was heard, and meta tensors have none.
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("clustered-fl", "fedfomo")])
def test_a_round_of_every_method_stays_on_its_device(name, kind):
    engine = Engine(kind, chunk=3)
    method, federation = method_named(name), testing.federation()
    sim = Simulation.start(method, testing.task(), federation.to(META), PLAN, 3, seed=0)
    ids = sim.sample(1)
    down, rows_of = drawn_before(sim, ids, engine)
    at = sim._at(ids)
    with NothingOnTheCPU() as watch:
        results = engine.map(sim._local_update, sim.federation, ids, rows_of, purpose="train")
        with on(META):
            clients, ups, info = in_order(results, ids)
            server = Central().aggregate(method, sim.state.server, at, ups)
            views = engine.map(sim._view, sim.federation, ids, rows_of, purpose="view")
    for what in (sim.state, down, clients, ups, info, server, views[0][1]):
        assert all(leaf.is_meta for leaf in tree.leaves(what))
    assert set(watch.found) == set()
    here = Simulation.start(method, testing.task(), federation, PLAN, 3, seed=0)
    here.train(1, engine)
    for there, same in zip(tree.leaves(server), tree.leaves(here.state.server), strict=True):
        assert (there.shape, there.dtype) == (same.shape, same.dtype)


def test_what_is_watched_is_seen():
    with NothingOnTheCPU() as watch, on(META):
        torch.zeros(()), torch.tensor(0.3), torch.arange(3)
    assert watch.found == []
    with NothingOnTheCPU() as watch:
        torch.zeros(2)
    assert watch.found == [("aten.zeros.default", (2,))]


def test_servers_draw_on_the_cpu_wherever_they_are():
    never = torch.zeros(3, 3, dtype=torch.bool)
    losses, keys = Losses(never.float(), never.float(), never), torch.arange(3)
    rng = torch.Generator().manual_seed(0)
    there = tree.map(lambda leaf: leaf.to(META), losses)
    with on(META):
        score = epsilon_greedy(there, 0.3, rng, torch.arange(3), keys.to(META))
    assert score.is_meta
    after = torch.randint(100, (), generator=rng)
    rng = torch.Generator().manual_seed(0)
    epsilon_greedy(losses, 0.3, rng, torch.arange(3), keys)
    assert torch.equal(torch.randint(100, (), generator=rng), after)  # the same numbers were used up


def test_a_packed_tree_comes_to_where_it_is_wanted():
    flat = {"a": torch.ones(2), "b": torch.ones(3)}
    there = tree.unpack(flat, tree.map(lambda leaf: leaf.to(META), flat))
    assert all(leaf.is_meta for leaf in there.values())
    assert tree.unpack(flat, flat)["a"] is flat["a"]  # nothing is copied where it is there already


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpu", "device = 'gpu': choose from cpu, cuda"),
        ("mps:1", "choose from cpu, cuda"),
        ("meta", "choose from cpu, cuda"),
        ("cuda", "use device = 'cpu'"),
        ("mps", "PyTorch finds no Apple GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_words_with_all_else_that_is_wrong(name, words):
    if name in ("cuda", "mps") and device.unavailable_reason(name) is None:
        pytest.skip(f"there is a {name} here")
    with pytest.raises(ConfigError) as error:
        coterie.run("fedavg", "digits", device=name, rounds=0)
    assert words in str(error.value)
    assert "rounds = 0" in str(error.value)


def test_workers_are_for_the_cpu(monkeypatch):
    config, _ = resolve({"method": "fedavg", "device": "cuda"})
    assert config.workers == 1
    with pytest.raises(ConfigError, match="workers = 2: worker processes are for the CPU"):
        resolve({"method": "fedavg", "device": "cuda", "workers": 2})


def test_a_run_goes_on_on_another_device(tmp_path):
    """A run of a machine that had CUDA; here it goes on on the CPU, when told to."""
    whole = coterie.run("fedamp", "digits", reference=False, out=tmp_path / "whole", **{**QUICK, "rounds": 3})
    out = tmp_path / "run"
    coterie.run("fedamp", "digits", reference=False, out=out, **QUICK)
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(
        text.replace('device = "cpu"', 'device = "cuda"').replace("rounds = 2", "rounds = 3")
    )
    if device.unavailable_reason("cuda"):
        with pytest.raises(ConfigError, match="use device = 'cpu'"):
            coterie.resume(out)
    result = coterie.resume(out, device="cpu")
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert result.rounds[-1]["test"] == whole.rounds[-1]["test"]
