"""A federation in real processes on this machine. The bits are the simulator's."""

import json
import os
import time

import pytest
import torch

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.data import load as load_data
from coterie.deploy import app as app_folder
from coterie.deploy import processes
from coterie.deploy.ledger import Ledger
from coterie.deploy.up import collect, local_federation, local_settings, part_of, up, wait
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.take_home.load import load
from coterie.storage.run_folder import RunFolder
from tests.deploy.test_flower import LOOP

from .inprocess import same, simulate


def deployed(method, data="digits", **more):
    return prepare(method, data, rounds=3, seed=1, **{**LOOP, "reference": False, **more})


def compare(setup, result, out):
    expected = run_setup(setup, None)
    assert result.selected == expected.selected
    assert repr(result.clients) == repr(expected.clients), "some metrics may be NaN"
    sim = simulate(setup)
    if setup.config.topology == "server":
        kept, _ = RunFolder(out).load(3, type(sim.state)(sim.state.server, ()))
        assert same(kept.server, sim.state.server)
    for name in setup.federation.names:
        x = setup.federation.x[:5]
        assert torch.equal(load(out, name)(x), expected.model(name)(x))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topology"), [("fedmap", "server"), ("fedamp", "server"), ("federico", "ring")])
def test_real_processes_give_the_simulators_bits(method, topology, tmp_path):
    setup = part_of(deployed(method, topology=topology), 3)
    rules = {"deadline": 300.0, "joining": 300.0}
    result = up(setup, tmp_path / "run", rules, lambda told: None, 900)
    compare(setup, result, tmp_path / "run")
    assert not processes.descendants(os.getpid()), "everything is stopped"


@pytest.mark.slow
def test_another_kind_of_target_and_an_adapter_in_real_processes(tmp_path):
    """Times until an event, and a frozen network of which only low-rank updates travel."""
    setup = part_of(deployed("ditto", "survival-times", model="mlp:hidden=64/32", adapter="lora:rank=2"), 3)
    result = up(setup, tmp_path / "run", {"deadline": 300.0, "joining": 300.0}, lambda told: None, 900)
    compare(setup, result, tmp_path / "run")
    sent = tree.nbytes(setup.task.sent(setup.task.init()))
    assert result.rounds[-1]["bytes_down"] == 3 * sent < tree.nbytes(setup.task.init())


@pytest.mark.slow
def test_a_site_and_then_the_server_are_killed(tmp_path):
    """A SuperNode with its worker, in the middle of round 2; then the SuperLink with its ServerApp, in round 3."""
    setup, out = part_of(deployed("scaffold"), 3), tmp_path / "run"
    names, work = setup.federation.names, tmp_path / "run" / "flower"
    rules = {**local_settings(work, names, out), "deadline": 600.0, "joining": 300.0}
    app_folder.write(work / "app", setup.config, rules)

    def until(reached):
        limit = time.monotonic() + 600
        while time.monotonic() < limit:
            if (out / "sites.json").exists() and reached(json.loads((out / "sites.json").read_text())):
                return
            time.sleep(0.2)
        raise AssertionError("not reached")

    with local_federation(work, names) as running:
        running.submit(resume=False)
        until(lambda told: told["round"] == 1 and told["sites"][names[1]]["state"] == "working")
        running.stop_site(names[1], kill=True)
        running.start_site(names[1])
        until(lambda told: told["round"] == 2 and told["sites"][names[0]]["state"] == "working")
        running.superlink.kill()
    assert Ledger.load(out).round in (1, 2, 3)
    (out / "sites.json").unlink()
    with local_federation(work, names) as running:
        running.submit(resume=True)
        wait(running, out, lambda told: None, 900)
    compare(setup, collect(setup, out), out)


@pytest.mark.slow
def test_one_dead_site_does_not_stop_the_others(tmp_path):
    setup, out = part_of(deployed("fedavg"), 3), tmp_path / "run"
    names, work = setup.federation.names, tmp_path / "run" / "flower"
    killed = []

    def watch(told):
        if told["round"] == 1 and not killed:
            killed.append(True)
            holder[0].stop_site(names[2], kill=True)

    holder = []
    rules = {**local_settings(work, names, out), "deadline": 60.0, "joining": 300.0}
    app_folder.write(work / "app", setup.config, rules)
    with local_federation(work, names) as running:
        holder.append(running)
        running.submit(resume=False)
        wait(running, out, watch, 900)
    rows = RunFolder(out).read_rounds(9)
    assert rows[0]["participants"] == list(names)
    assert rows[2]["participants"] == list(names[:2])


@pytest.mark.slow
def test_secure_sums_in_real_processes_and_a_site_is_killed_under_its_masks(tmp_path):
    """Four sites; one is killed once it has shared its secrets in round 2, so that the others recover its masks."""
    setup, out = part_of(deployed("fedavg"), 4), tmp_path / "run"
    names, work = setup.federation.names, tmp_path / "run" / "flower"
    killed, holder = [], []

    def watch(told):
        if told["round"] == 1 and not killed and shared():
            killed.append(True)
            holder[0].stop_site(names[3], kill=True)

    def shared():
        path = next((work / "sites" / names[3]).rglob("masks.json"), None)
        kept = {} if path is None else json.loads(path.read_text())
        return kept.get("round") == 2 and bool(kept.get("own"))

    rules = {**local_settings(work, names, out), "deadline": 120.0, "joining": 300.0, "secure": True}
    app_folder.write(work / "app", setup.config, rules)
    with local_federation(work, names) as running:
        holder.append(running)
        running.submit(resume=False)
        wait(running, out, watch, 900)
    assert killed
    rows = RunFolder(out).read_rounds(9)
    assert rows[0]["participants"] == list(names)
    assert rows[2]["participants"] == list(names[:3])
    absent = {number: {*names} - {*rows[number - 1]["participants"]} for number in (1, 2, 3)}
    sim = simulate(setup, absent=absent)
    kept, _ = RunFolder(out).load(3, type(sim.state)(sim.state.server, ()))
    for path, leaf in tree.pack(kept.server).items():
        torch.testing.assert_close(leaf, tree.pack(sim.state.server)[path], rtol=1e-4, atol=1e-5)
    assert not processes.descendants(os.getpid()), "everything is stopped"


def test_the_data_set_has_the_clients_that_sites_are(tmp_path):
    """A node of a simulation is the client at its partition's place."""
    from coterie.deploy.site_data import site_data, site_name

    setup = prepare("fedavg", "digits", **LOOP)
    assert site_name(setup.config, {"partition-id": 2}) == "client-3"
    own = site_data(setup.config, {}, "client-3", None)
    whole = load_data("digits", 0)
    assert torch.equal(own.x[own.split(0).train], whole.x[whole.split(2).train])
    with pytest.raises(ConfigError, match="no client 'x'"):
        site_data(setup.config, {}, "x", None)


def test_sites_find_their_own_noise_for_the_epsilon_that_was_asked_for():
    """The noise of a simulation counts other clients, and only the rounds in which they are drawn."""
    setup = prepare("fedavg", "hospitals", rounds=4, epsilon=8.0, clients_per_round=2)
    some = part_of(setup, 3)
    assert setup.config.noise is not None
    assert some.config.noise is None
    assert some.config.epsilon == 8.0
    assert some.budget is not None
    assert some.budget.epsilons == dict.fromkeys(some.federation.names, 8.0)
