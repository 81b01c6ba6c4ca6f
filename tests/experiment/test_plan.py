"""Every warning appears where it should, and only there; what a plan says of a run is what the run then does."""

import json

import pytest
import torch
from torch import nn

import coterie
from coterie.core import tree
from coterie.core.method import Population
from coterie.experiment.plan import first_look
from coterie.experiment.plan_costs import memory_of, server_for
from coterie.experiment.setup import prepare
from tests.experiment.conftest import QUICK, two_kinds

HEALTHY = (
    "local",
    "fedavg",
    "fedavg-ft",
    "fedprox",
    "fedper",
    "fedrep",
    "fedproto",
    "fedmap",
    "fedamp",
    "heurfedamp",
    "federico",
    "ditto",
    "per-fedavg",
    "scaffold",
)
BN = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
HELD = "holds a client's model where it is"
INERT = "next to nothing"


@pytest.mark.parametrize("method", HEALTHY)
def test_defaults_on_digits_give_no_warning(method):
    assert coterie.plan(method, "digits").warnings == []


@pytest.mark.parametrize("method", coterie.METHODS)
def test_a_first_look_stops_no_run(method):
    found = first_look(prepare(method, two_kinds(), **QUICK))
    assert found.steps
    assert all(isinstance(warning, str) for warning in found.warnings)


@pytest.mark.parametrize(
    ("method", "broken", "sound", "words"),
    [
        ("fedprox", {"mu": 1e-4}, {"mu": 0.1}, INERT),
        ("fedprox", {"mu": 0.0}, {"mu": 0.1}, "is 0 but for rounding: choose a larger mu than 0"),
        ("fedprox", {"local_steps": 1}, {"local_steps": 2}, "take more local steps"),
        ("fedprox", {"mu": 1000.0, "lr": 1e-3}, {"mu": 1.0, "lr": 1e-3}, HELD),
        ("fedprox", {"mu": 100.0, "lr": 0.1}, {"mu": 1.0, "lr": 0.1}, "training diverged"),
        ("ditto", {"lam": 1e-5}, {"lam": 0.1}, INERT),
        ("fedmap", {"sigma2": 1e5}, {"sigma2": 1.0}, INERT),
        ("fedmap", {"sigma2": 1e-3, "lr": 1e-3, "optimizer": "sgd"}, {"sigma2": 1.0}, HELD),
        ("fedmap", {"likelihood": "sum", "sigma2": 1e-3, "weighting": "omega"}, {}, "nobody else is heard"),
        ("fedproto", {"lam": 1e-5}, {"lam": 0.1}, INERT),
        ("pfedvmp", {"xi1": 1e-3}, {"xi1": 10.0}, INERT),
        ("pfedme", {"lam": 15.0, "outer_lr": 0.01, "lr": 0.1}, {"lam": 1.0, "outer_lr": 0.1, "lr": 0.1}, HELD),
        ("heurfedamp", {"pull": 1e-5}, {"pull": 1.0}, INERT),
        ("heurfedamp", {"self_attention": 1.0}, {"self_attention": 0.5}, "learns from nobody"),
        ("fedamp", {"sigma": 1e-6}, {"sigma": "auto"}, "learns from nobody"),
        ("fedamp", {"sigma": 1e9}, {"sigma": "auto"}, "alike"),
        ("federico", {"temperature": 1e-6}, {"temperature": 5.0}, "alike"),
        ("federico", {"temperature": "count"}, {"temperature": 5.0}, "learns from nobody"),
        ("fedbn", {}, {"model": BN}, "no normalisation layers"),
        ("fedper", {"model": "linear"}, {"model": "mlp"}, "nothing but its head"),
        ("fedrep", {"model": "linear"}, {"model": "mlp"}, "nothing but its head"),
        ("fedavg", {"clients_per_round": 1}, {"clients_per_round": 2}, "only one client is heard"),
        ("fedavg", {"clients_heard": 1}, {"clients_heard": 2}, "raise clients_heard"),
        ("fedavg", {"clients_per_round": 2, "rounds": 2}, {"clients_per_round": 8}, "take part in no round"),
        ("fedavg", {"topology": [("client-1", "client-2")]}, {"topology": "ring"}, "never hear of each other"),
    ],
)
def test_a_warning_appears_where_it_should_and_not_where_it_should_not(method, broken, sound, words):
    warned = coterie.plan(method, "digits", **broken).warnings
    assert any(words in warning for warning in warned), warned
    assert not any(words in warning for warning in coterie.plan(method, "digits", **sound).warnings)


def test_a_server_that_remembers_clients_may_hear_one_a_round():
    assert coterie.plan("fedamp", "digits", clients_per_round=1).warnings == []


def test_one_client_has_nobody_to_hear():
    (warning, *_) = coterie.plan("fedavg", two_kinds(1), **QUICK).warnings
    assert "only one client" in warning


def test_what_a_method_says_in_a_round_is_a_warning_too():
    warned = coterie.plan("fedamp", "digits", sigma=1.0, alpha=10.0).warnings
    assert any("lowered" in warning for warning in warned)


@pytest.mark.parametrize("settings", [{"mu": 0.0}, {"local_steps": 1}, {"mu": 1e-6}])
def test_a_first_look_sees_a_pull_that_certainly_does_nothing(settings):
    assert first_look(prepare("fedprox", "digits", **settings)).warnings
    assert first_look(prepare("fedprox", "digits")).warnings == []


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("local", {}),
        ("fedavg", {}),
        ("fedper", {"clients_per_round": 2}),
        ("ditto", {"topology": "ring"}),
        ("fedamp", {}),
        ("scaffold", {"clients_heard": 2}),
    ],
)
def test_the_bytes_are_those_of_the_run(method, settings):
    planned = coterie.plan(method, two_kinds(), **QUICK, **settings)
    result = coterie.run(method, two_kinds(), reference=False, **QUICK, **settings)
    assert planned.traffic.exact
    assert planned.traffic.total == sum(each["bytes_up"] + each["bytes_down"] for each in result.rounds)
    assert planned.traffic.up == result.rounds[0]["bytes_up"]


def test_bytes_that_depend_on_the_data_are_about_those_of_the_run():
    planned = coterie.plan("fedproto", two_kinds(), **QUICK).traffic
    rounds = coterie.run("fedproto", two_kinds(), reference=False, **QUICK).rounds
    assert not planned.exact
    assert planned.total == pytest.approx(sum(each["bytes_up"] + each["bytes_down"] for each in rounds), rel=0.1)


def test_the_bytes_of_many_clients_are_those_of_few():
    few, many = (coterie.plan("fedavg", two_kinds(number, 12), **QUICK).traffic for number in (5, 40))
    assert many.exact
    assert many.total == 8 * few.total


@pytest.mark.parametrize("method", ["fedavg", "fedamp", "federico", "fedmap"])
def test_the_memory_of_many_clients_follows_from_that_of_few(method):
    setup = prepare(method, two_kinds(20, 12), **QUICK)
    assert memory_of(setup).server == tree.nbytes(server_for(setup, 20))
    server = setup.method.init_server(setup.task.init(), Population(20, 20, setup.task))
    assert memory_of(setup).server == tree.nbytes(server)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", ["fedprox", "fedamp", "federico"])
def test_a_run_after_a_plan_has_the_same_bits(method, engine):
    settings = {**QUICK, "engine": engine, "reference": False}
    before = coterie.run(method, two_kinds(), **settings)
    state = torch.get_rng_state()
    coterie.plan(method, two_kinds(), **settings)
    setup = prepare(method, two_kinds(), **settings)
    first_look(setup)
    assert torch.equal(state, torch.get_rng_state())
    after = coterie.run(method, two_kinds(), **settings)
    for one, other in zip(tree.leaves(before.views), tree.leaves(after.views), strict=True):
        assert torch.equal(one, other)
    without = [{k: v for k, v in each.items() if k != "seconds"} for each in before.rounds]
    assert without == [{k: v for k, v in each.items() if k != "seconds"} for each in after.rounds]


def test_a_plan_is_json():
    planned = coterie.plan("fedamp", "digits")
    found = json.loads(json.dumps(planned.to_dict()))
    assert found["pull"]["strength"] == planned.pull.strength
    assert found["traffic"]["exact"] is True
    assert found["weights"]["own"] == planned.weights.own
    assert sum(each["train"] for each in found["clients"].values()) > 1000
    assert 0 < found["seconds"][0] <= found["seconds"][1]
