"""Models on everybody's test examples, and on each client's own."""

import numpy as np
import pytest
import torch

from coterie.engine import Engine
from coterie.experiment.global_tests import both_tests
from coterie.experiment.setup import prepare
from tests.experiment.test_conclude import QUICK, clients, factory, run
from tests.experiment.test_scored_examples import Refusing, simulation


@pytest.mark.parametrize("name", ["pfedme", "ditto", "fedrod"])
def test_both_tests_on_the_spot_are_what_engines_find(name, monkeypatch):
    sim = simulation(name)
    here = both_tests(sim, 1, Refusing())
    monkeypatch.setattr("coterie.experiment.scored_examples.EVALUATION_BYTES", 0)
    monkeypatch.setattr("coterie.experiment.global_tests.POOLED_OUTPUTS_AT_ONCE", 50)  # several calls of the engine
    for engine in (Engine(), Engine("stacked", chunk=2)):
        there = both_tests(sim, 1, engine)
        assert there["examples"] == here["examples"]
        for which in ("G", "P"):
            for test in ("global", "local"):
                assert there[which][test] == pytest.approx(here[which][test], rel=1e-5)


def test_global_and_local_tests_of_both_models():
    """By hand: the models on the examples of all, and on each client's own weighted by their number."""
    result = run("pfedme", rounds=2, reference=False)
    setup = prepare("pfedme", clients(), model=factory, **{**QUICK, "rounds": 2})
    own = [torch.from_numpy(setup.federation.split(i).test) for i in range(4)]
    pool = torch.cat(own)
    x, y = setup.federation.x, setup.federation.y
    models = [result.model(name) for name in result.names]
    sizes = [len(each) for each in own]
    everywhere = np.mean([float((model(x[pool]).argmax(1) == y[pool]).double().mean()) for model in models])
    at_home = [
        float((model(x[each]).argmax(1) == y[each]).double().mean()) for model, each in zip(models, own, strict=True)
    ]
    found = result.g_and_p["selected"]
    assert found["round"] == result.selected
    assert found["examples"] == len(pool)
    assert found["P"]["global"]["accuracy"] == pytest.approx(everywhere)
    assert found["P"]["local"]["accuracy"] == pytest.approx(np.average(at_home, weights=sizes))
    chosen = result.rounds[result.selected - 1]["global_test"]["accuracy"]
    # Accuracy adds up over examples, so the one global model's two tests agree.
    assert found["G"]["local"]["accuracy"] == pytest.approx(np.average(chosen, weights=sizes))
    assert found["G"]["global"]["accuracy"] == pytest.approx(found["G"]["local"]["accuracy"])
    assert found["G"]["global"]["balanced_accuracy"] != pytest.approx(found["G"]["local"]["balanced_accuracy"])
    assert result.g_and_p["last"]["round"] == 2


def test_global_tests_among_peers_and_with_too_many_examples(monkeypatch):
    on_ring = run("pfedme", rounds=1, reference=False, topology="ring").g_and_p["last"]
    assert on_ring["G"]["global"]["accuracy"] > 0
    monkeypatch.setattr("coterie.experiment.global_tests.MAX_POOLED_PREDICTIONS", 40)
    monkeypatch.setattr("coterie.experiment.global_tests.POOLED_OUTPUTS_AT_ONCE", 15)
    part = run("pfedme", rounds=1, reference=False).g_and_p["last"]
    assert part["examples"] == 10  # a part, and it says so
    assert part["P"]["global"]["accuracy"] >= 0
