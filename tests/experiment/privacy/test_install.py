"""Private runs as users start them: what they cost, what is refused, and that they keep the laws."""

from __future__ import annotations

import json
import math

import pytest
import torch

import coterie
from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.privacy import Guard, Private
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.experiment.plan import first_look
from coterie.experiment.privacy.accountant import Release, epsilon
from coterie.experiment.privacy.refusals import AS_A_WHOLE, LEAKS, PROTECTED
from coterie.experiment.privacy.releases import count_releases
from coterie.experiment.run import resume
from coterie.experiment.setup import prepare
from coterie.methods import METHODS

PLAIN = {"engine": "loop", "compile": False, "workers": 1}
QUICK = {"rounds": 2, "batch_size": 16, "optimizer": "sgd", "lr": 0.1, **PLAIN}


def net():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def factory(shape, outputs):
    return net()


def clients(*sizes):
    draw = torch.Generator().manual_seed(2)
    made = {}
    for i, size in enumerate(sizes):
        x = torch.randn(size, 5, generator=draw) + 0.2 * i
        made[f"c{i}"] = (x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long())
    return from_clients(made, seed=0)


def ready(method="fedavg", data=None, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare(method, data or clients(60, 90), model=net(), **{**QUICK, **settings})


def run(method="fedavg", data=None, **settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return coterie.run(method, data or clients(60, 90), model=net(), **{**QUICK, **settings})


def close(one, other, **how):
    for name, leaf in tree.pack(one).items():
        torch.testing.assert_close(leaf, tree.pack(other)[name], **how)


def test_epsilon_finds_the_noise_and_the_worst_client_has_it():
    budget = ready(epsilon=4).budget
    assert 3.9 < budget.epsilon <= 4
    assert (budget.worst, budget.level, budget.delta) == ("c0", "record", 1e-5)
    size = len(ready().federation.train[1])
    parts = [Release(math.ceil(16 / size * 1000) / 1000, budget.noise, 2 * -(-size // 16))]
    assert budget.epsilons["c1"] == pytest.approx(epsilon(parts, 1e-5), rel=0.02)
    assert ready(noise=budget.noise).budget.epsilons == pytest.approx(budget.epsilons)
    assert ready(epsilon=4, delta=1e-7).budget.noise > budget.noise


def test_what_a_round_releases_is_counted():
    setup, plan = ready(), Plan(16, 2, poisson=True)

    def count(name, **options):
        method = METHODS[name](Private(METHODS[name]().optimizer, Guard(16)), **options)
        return count_releases(method, setup.task, setup.federation, plan, 0, 2)

    steps = plan.num_steps(setup.federation.sizes[0])
    assert count("fedavg") == ({1: steps}, 0)
    assert count("ditto") == ({1: steps}, 0)  # its own model is not sent
    assert count("fedrep", head_epochs=3, body_epochs=2) == ({5: steps}, 0)
    assert count("pfedme", prox_steps=4) == ({4: steps}, 0)
    assert count("scaffold") == ({1: steps}, 0)
    assert count("fedmap") == ({1: steps}, 2)
    assert count("fedmap", start="own", weighting="omega") == ({1: steps}, 1)
    assert count("pfedvmp", precision="diagonal") == ({1: steps}, 3)
    assert count("fedproto") == ({1: steps}, 2)
    assert count("fedpac") == ({2: steps}, 5)


def test_every_method_is_protected_or_refused_in_words():
    assert {*PROTECTED, *LEAKS} == {*METHODS}
    assert not {*PROTECTED} & {*LEAKS}
    for name in LEAKS:
        with pytest.raises(ConfigError, match="would still tell"):
            ready(name, noise=1.0)
    with pytest.raises(ConfigError, match="--precision diagonal"):
        ready("pfedvmp", noise=1.0)
    for name in {*METHODS} - {*AS_A_WHOLE}:
        with pytest.raises(ConfigError, match="messages are no models"):
            ready(name, noise=1.0, privacy="site-local")
    with pytest.raises(ConfigError, match="control gradient"):
        ready("scaffold", noise=1.0, control="gradient")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": 1e-6}, "privacy = 'record', 'site-local' or 'site-central'"),
        ({"privacy": "record"}, "say how much"),
        ({"epsilon": 1, "class_weights": "balanced"}, "class_weights"),
        ({"epsilon": 1, "noise": 0.5}, "leave out noise"),
        ({"privacy": "site-central", "noise": 1, "topology": "ring"}, "no server"),
        ({"privacy": "site-central", "noise": 1, "clients_heard": 1}, "clients_per_round"),
        ({"epsilon": -1}, "epsilon"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ready(**settings)


def test_layers_that_mix_examples_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    with pytest.raises(ConfigError, match="GroupNorm"):
        prepare("fedavg", clients(60, 90), model=model, noise=1.0, **QUICK)
    with pytest.raises(ConfigError, match="variances"):
        prepare("fedavg", clients(60, 90), model=model, noise=1.0, privacy="site-local", **QUICK)


@pytest.mark.parametrize("name", ["fedamp", "federico", "fedpac", "clustered-fl", "pfedvmp"])
def test_centrally_models_must_be_averaged(name):
    with pytest.raises(ConfigError, match="site-central"):
        ready(name, privacy="site-central", noise=1.0)


def test_no_noise_and_no_clip_are_the_ordinary_run():
    """With minibatches as large as the client, chance draws all of it, and nothing but rounding is left."""
    data, whole = clients(30, 30), {"batch_size": 100, "local_epochs": 3, "reference": False, "evaluate_every": 2}
    private = run("fedprox", data, noise=0, clip=1e9, **whole)
    plain = run("fedprox", data, **whole)
    assert math.isinf(private.budget.epsilon)
    close(private.server, plain.server, rtol=1e-4, atol=1e-6)
    site = run("fedprox", data, privacy="site-local", noise=0, clip=1e9, **whole)
    close(site.server, run("fedprox", data, **whole).server, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("privacy", ["record", "site-local"])
def test_a_resumed_run_is_equal_bit_for_bit(privacy, tmp_path):
    settings = {"privacy": privacy, "epsilon": 8, "reference": False, "rounds": 3}
    whole = run(out=tmp_path / "whole", **settings)

    class Stop:
        def say(self, text): ...
        def start(self, label, done, rounds): ...
        def stop(self): ...
        def round(self, record, metric):
            if record["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "part", progress=Stop(), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        again = resume(tmp_path / "part", data=clients(60, 90), model=net())
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again.server), tree.leaves(whole.server), strict=True))
    assert again.budget == whole.budget
    found = json.loads((tmp_path / "part/summary.json").read_text())
    assert found["privacy"]["epsilons"] == whole.budget.epsilons
    assert found["selected_round"] == 3  # no round is selected by validation examples
    assert "epsilon" in (tmp_path / "part/clients/c0/card.md").read_text()
    assert "Differential privacy" in (tmp_path / "part/report.html").read_text()


def test_the_reference_and_personal_models_are_trained_without_noise():
    quiet, loud = (run("ditto", noise=noise).reference for noise in (0.5, 50.0))
    close(quiet.views, loud.views, rtol=0, atol=0)
    private = run("fedavg-ft", noise=0.5, local_epochs=1)
    assert isinstance(private.method.optimizer, Private)


def test_a_search_is_refused():
    with pytest.raises(ConfigError, match="no epsilon would cover"):
        coterie.tune(["fedavg"], clients(60, 90), model=net(), trials=1, noise=1.0, **QUICK)


def test_seeds_in_lockstep_are_those_of_runs_alone(tmp_path):
    settings = {**QUICK, "noise": 1.0, "engine": "stacked", "reference": False}
    found = coterie.compare(["fedmap"], 2, clients(60, 90), model=factory, out=tmp_path, **settings)
    alone = coterie.run("fedmap", clients(60, 90), model=factory, seed=1, **settings)
    rows = [row for row in found.rows if row["seed"] == 1]
    assert [row["test_loss"] for row in rows] == pytest.approx([row["test_loss"] for row in alone.clients], rel=1e-3)
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    assert [each["privacy"]["noise"] for each in summaries] == [1.0, 1.0]


def test_a_plan_tells_what_it_will_cost():
    found = first_look(ready(epsilon=3))
    assert found.privacy["epsilon"] <= 3
    assert found.privacy["words"].startswith("Differential privacy (record): epsilon ")
    assert first_look(ready()).privacy is None


@pytest.mark.parametrize("name", ["fedavg", "fedmap"])
def test_stacked_clients_are_those_of_the_loop(name):
    settings = {"noise": 1.0, "reference": False}
    one, other = (run(name, engine=engine, **settings) for engine in ("loop", "stacked"))
    close(one.server, other.server, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROTECTED if name not in ("local", "fedavg", "fedmap")])
def test_all_methods_stack_with_privacy(name):
    settings = {"noise": 1.0, "reference": False, **({"precision": "diagonal"} if name == "pfedvmp" else {})}
    one, other = (run(name, engine=engine, **settings) for engine in ("loop", "stacked"))
    close(one.server, other.server, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in AS_A_WHOLE if name != "local"])
def test_all_methods_take_noisy_messages(name):
    settings = {"reference": False, **({"precision": "diagonal"} if name == "pfedvmp" else {})}
    found = run(name, privacy="site-local", noise=1.0, clip=0.1, **settings)
    assert math.isfinite(found.mean())
    assert found.selected == 2


@pytest.mark.slow
def test_workers_change_no_bit():
    settings = {"noise": 1.0, "reference": False, "engine": "stacked"}
    one, other = (run("fedavg", workers=number, **settings) for number in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(one.server), tree.leaves(other.server), strict=True))


@pytest.mark.slow
def test_compiled_steps_are_the_plain_ones():
    """Law 12 with privacy: gradients of single examples, and noise, compile."""
    settings = {"noise": 1.0, "reference": False}
    plain, compiled = (run("fedavg", engine=e, compile=c, **settings) for e, c in (("loop", False), ("stacked", True)))
    close(plain.server, compiled.server, rtol=1e-3, atol=1e-4)
