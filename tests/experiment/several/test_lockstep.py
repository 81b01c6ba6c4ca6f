"""Seeds in lockstep give the same runs as seeds one after another."""

import dataclasses
import json
import math
import signal

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.data import load
from coterie.experiment.several import compare as comparing
from coterie.experiment.several.lockstep import seeds_at_once, share_pool
from coterie.experiment.several.trials import prepare_trials
from tests.experiment.several.test_compare import Heard, clients, factory

STACKED = {"engine": "stacked", "compile": False, "workers": 1, "rounds": 3, "local_epochs": 2, "report": False}
STACKED |= {"batch_size": 8, "lr": 0.3}


def compare(methods=("local", "fedavg"), seeds=3, data=None, **settings):
    data = clients() if data is None else data
    return coterie.compare(methods, seeds, data, model=factory, **{**STACKED, **settings})


@pytest.fixture
def one_after_another(monkeypatch):
    def alone(*args, **settings):
        with monkeypatch.context() as patched:
            patched.setattr(comparing, "seeds_at_once", lambda *_: 1)
            return compare(*args, **settings)

    return alone


def assert_close(found, expected):
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert mine[key] == (pytest.approx(value, abs=1e-5, nan_ok=True) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    "settings", [{}, {"clients_per_round": 2}, {"topology": "ring"}, {"class_weights": "balanced"}]
)
def test_runs_in_lockstep_are_the_runs_alone(settings, one_after_another, tmp_path):
    heard = Heard()
    methods = ("local", "fedmap") if settings == {} else ("fedmap",)
    settings = {"rounds": 2, **settings}
    found = compare(methods, 2, progress=heard, out=tmp_path / "lockstep", **settings)
    alone = one_after_another(methods, 2, out=tmp_path / "alone", **settings)
    assert_close(found.rows, alone.rows)
    assert {label for label, _ in heard.rounds} == {f"{method} seeds 0, 1" for method in methods}
    for run in (tmp_path / "alone").glob("*-seed*"):
        mine, other = (_rounds(folder / run.name) for folder in (tmp_path / "lockstep", tmp_path / "alone"))
        for here, there in zip(mine, other, strict=True):
            assert here["participants"] == there["participants"]
            for metric, values in there["test"].items():
                np.testing.assert_allclose(_floats(here["test"][metric]), _floats(values), atol=1e-5)
        beside, by_itself = tmp_path / "lockstep" / run.name, run
        beside, by_itself = (
            {path.relative_to(folder) for path in folder.rglob("*") if "checkpoints" not in path.parts}
            for folder in (beside, by_itself)
        )
        assert beside == by_itself, "cards and models, too"


def test_seeds_whose_pools_differ(one_after_another):
    data = "synthetic-label-skew"
    settings = {"rounds": 1, "local_epochs": 1, "batch_size": 128}
    assert not torch.equal(load(data, 0).x, load(data, 1).x)
    found = coterie.compare(("fedmap",), 2, data, **{**STACKED, **settings})
    alone = [coterie.run("fedmap", data, seed=s, reference=False, **{**STACKED, **settings}).clients for s in (0, 1)]
    assert_close(
        [{k: v for k, v in row.items() if k not in ("method", "seed")} for row in found.rows], [*alone[0], *alone[1]]
    )


@pytest.fixture
def ctrl_c():
    """Ctrl-C as at a terminal: a job in the background may have inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("signalled", [False, True])
def test_a_stop_leaves_all_seeds_to_be_gone_on_with(tmp_path, signalled):
    whole = compare(("fedavg",))
    label = "fedavg seeds 0, 1, 2"
    stop = Heard(None if signalled else label, after=2)
    if signalled:  # as by Ctrl-C, while a run has its turn

        def interrupt(record, metric):
            if record["round"] == 2:
                signal.raise_signal(signal.SIGINT)

        stop.round = interrupt
    with pytest.raises(KeyboardInterrupt):
        compare(("fedavg",), out=tmp_path, progress=stop, checkpoint_every=5)
    for seed in range(3):
        assert [record["round"] for record in _rounds(tmp_path / f"fedavg-seed{seed}")] == [1, 2]
        assert (tmp_path / f"fedavg-seed{seed}" / "checkpoints" / "round-00002").exists()
    alone = coterie.resume(tmp_path / "fedavg-seed1", data=clients(), model=factory)  # one of them, by itself
    assert_close(alone.clients, [_plain(row) for row in whole.rows if row["seed"] == 1])
    heard = Heard()
    found = compare(("fedavg",), out=tmp_path, progress=heard)
    assert heard.rounds == [("fedavg seeds 0, 2", 3)]
    assert_close(found.rows, whole.rows)


def test_a_seed_that_diverges_is_named():
    with pytest.raises(CoterieError, match=r"^fedavg seed 0: training diverged: client 'site \d'"):
        compare(("fedavg",), lr=1e38, rounds=5)


def test_seeds_share_memory_or_wait():
    def number(seeds=4, **settings):
        trials = prepare_trials(("fedavg",), seeds, clients(), model=factory, **{**STACKED, **settings})
        return seeds_at_once([trials.first.with_method(method) for method in trials.methods.values()], seeds)

    assert number() == 4
    assert number(seeds=1) == 1
    assert number(engine="loop") == 1  # one client at a time gains nothing
    first = prepare_trials(("fedavg",), 1, clients(), model=factory, **STACKED).first
    x, y, model = first.federation.x, first.federation.y, tree.nbytes(first.task.init())
    # Of each seed: the examples, as they are and as they are evaluated, and three states of a model for each client.
    held = x.nbytes + y.nbytes + 4 * x.numel() + 3 * len(first.federation.names) * model
    assert [number(memory=f"{2 * held + more}B") for more in (-1, 0)] == [1, 2]
    assert number(memory="1KB") == 1
    assert number(holdout=0.3) == 1


def test_one_pool_where_the_data_are_the_same_and_all_of_them_where_not():
    trials = prepare_trials(("fedavg",), 2, clients(), model=factory, **STACKED)
    joined = share_pool([trials.first, trials.prepare(1)])
    assert joined[0].federation.x is joined[1].federation.x is trials.first.federation.x
    other = {name: (x + 1, y) for name, (x, y) in clients().items()}
    setups = [trials.first, prepare_trials(("fedavg",), 1, other, model=factory, **STACKED).first]
    groups = np.arange(len(setups[1].federation.y)) // 2  # patients of two rows
    setups[1] = dataclasses.replace(setups[1], federation=dataclasses.replace(setups[1].federation, groups=groups))
    joined = share_pool(setups)
    assert len(joined[0].federation.x) == 2 * len(trials.first.federation.x)
    for mine, alone in zip(joined, setups, strict=True):
        for client in range(3):
            here, there = (each.federation.split(client).test for each in (mine, alone))
            assert torch.equal(mine.federation.x[here], alone.federation.x[there])
            if alone.federation.groups is not None:
                assert np.array_equal(mine.federation.groups[here], alone.federation.groups[there])
    assert joined[0].federation.groups is None


def test_models_that_differ_are_not_stacked(one_after_another):
    class Drawn(nn.Linear):  # what it draws is no buffer, so it is another model with each seed
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.drawn = torch.rand(sizes[0])

        def forward(self, x):
            return super().forward(x * self.drawn)

    def drawn(shape, outputs):
        return Drawn(shape[0], outputs)

    heard = Heard()
    settings = {**STACKED, "rounds": 1}
    coterie.compare(("fedavg",), 2, clients(), model=drawn, progress=heard, **settings)
    assert [label for label, _ in heard.rounds] == ["fedavg seed 0", "fedavg seed 1"]


def _rounds(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def _floats(values):
    return [math.nan if value is None else value for value in values]


def _plain(row):
    return {key: value for key, value in row.items() if key not in ("method", "seed")}


def test_withheld_examples_are_those_of_each_seed(one_after_another):
    found, alone = (run(("fedfomo",), 2, rounds=2) for run in (compare, one_after_another))
    assert_close(found.rows, alone.rows)
