"""Over Flower: in this process, in Ray's, and in real processes. The bits are the simulator's everywhere."""

import json
import os
import subprocess
import sys
import time
import uuid

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from coterie import tree
from coterie.data import load as load_data
from coterie.deploy import app as app_folder
from coterie.deploy import flower, processes, settings
from coterie.deploy.flower import run_server, server_app
from coterie.deploy.ledger import Ledger
from coterie.deploy.up import app_config, collect, federation, local_settings, part_of, up, wait
from coterie.engine import Engine
from coterie.errors import ConfigError, CoterieError
from coterie.experiment.folder import RunFolder
from coterie.experiment.load import load
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie_site import client_app, from_records

from .inprocess import data, net, same, simulate

LOOP = {"engine": "loop", "compile": False, "workers": 1, "report": False}


class InProcess(Grid):
    """Flower's grid with its clients in this process; a message type of 'broken' nodes is an error reply."""

    def __init__(self, app, nodes, run_config):
        self.app, self.run_config = app, run_config
        self.nodes = {i: Context(1, i, node, RecordDict(), dict(run_config)) for i, node in enumerate(nodes, 100)}
        self.replies, self.broken, self.sizes = {}, {}, []
        # As Flower's own processes begin: a message knows who sends it.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def set_run(self, run): ...

    run = property(lambda self: None)

    def create_message(self, *args, **more):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            ids.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            if self.broken.get(node, 0) > 0:
                self.broken[node] -= 1
                reply = Message(Error(code=8, reason="gone"), reply_to=message)
            else:
                reply = self.app(message, self.nodes[node])
            self.sizes.append((message, reply))
            self.replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(each) for each in message_ids if each in self.replies]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


def flat(method, **more):
    setup = prepare(
        method, data(), model=net, rounds=3, batch_size=4, seed=3, reference=False, evaluate_every=3, **LOOP
    )
    return setup, {**settings.flatten(setup.config), "model": "", **more}


def play(method, tmp_path, **more):
    setup, run_config = flat(method, **{"deploy.out": str(tmp_path / "run"), "deploy.sites": 4, **more})
    names = setup.federation.names
    app = client_app(model=net, data=lambda node: data())
    grid = InProcess(app, [{"client": name, "store": str(tmp_path / "sites")} for name in names], run_config)
    return setup, grid, run_config


@pytest.mark.parametrize("method", ["fedavg", "fedmap", "fedamp", "pfedvmp", "federico", "pfedbred"])
def test_over_a_grid_in_this_process_the_bits_are_the_simulators(method, tmp_path):
    setup, grid, run_config = play(method, tmp_path)
    grid.broken[101] = 2  # once while joining, once in the first round: it is asked again
    run_server(grid, run_config, net)
    sim = simulate(setup)
    kept, _ = RunFolder(tmp_path / "run").load(3, type(sim.state)(sim.state.server, ()))
    assert same(kept.server, sim.state.server)
    book = Ledger.load(tmp_path / "run")
    assert book.best == 3, "or the models are those of another round"
    views = sim.views(3, Engine("loop"))
    for i, name in enumerate(setup.federation.names):
        folder = tmp_path / "sites" / name / book.run / name / "result"
        x = setup.federation.x[:4]
        expected = setup.method.predict(setup.task, tree.rows(views, i), x)
        assert torch.equal(load(folder, name, model=net)(x), expected)


def test_a_node_that_answers_nonsense_is_a_node_that_failed(tmp_path):
    _, grid, run_config = play("fedavg", tmp_path, **{"deploy.deadline": 0.2, "deploy.joining": 1.0})
    app = grid.app

    def nonsense(message, context):
        if context.node_id == 102 and message.metadata.message_type == "train":
            return Message(RecordDict({"coterie": ConfigRecord({"code": 1})}), reply_to=message)
        return app(message, context)

    grid.app = nonsense
    run_server(grid, run_config, net)
    assert [row["participants"] for row in RunFolder(tmp_path / "run").read_rounds(9)] == [["a", "b", "d"]] * 3


def test_what_goes_wrong_before_there_is_a_site_sends_no_words(tmp_path, capsys):
    _, grid, run_config = play("fedavg", tmp_path, **{"deploy.joining": 0.1})

    def secret(node):
        raise RuntimeError("patient Miller")

    grid.app = client_app(model=net, data=secret)
    with pytest.raises(CoterieError, match="0 of 4 sites joined"):
        run_server(grid, run_config, net)
    assert not any("Miller" in str(reply) for _, reply in grid.sizes)
    assert "patient Miller" in capsys.readouterr().out
    assert "0 of 4" in json.loads((tmp_path / "run" / "error.json").read_text())["error"]


def test_two_servers_do_not_write_into_one_folder(tmp_path, monkeypatch):
    _, grid, run_config = play("fedavg", tmp_path)
    monkeypatch.setattr(flower, "LEAVING", 0.1)
    with flower.only_one(tmp_path / "run"), pytest.raises(CoterieError, match="another server is at work"):
        run_server(grid, run_config, net)
    assert not (tmp_path / "run" / "deployment.json").exists()
    with flower.only_one(tmp_path / "run"):
        pass  # free again


def test_an_app_says_all_and_reads_itself_back(tmp_path):
    setup = prepare("fedamp", "digits", rounds=7, seed=4, lam=0.5, lr=0.2, **LOOP)
    out = app_folder.write(tmp_path / "my federation", setup.config, {"sites": 3, "deadline": 5.0})
    config, method, deploy = settings.read(app_config(out), own_data=False, own_model=False)
    assert method == setup.method
    assert config == setup.config.model_copy(update={"engine": "auto", "compile": None, "workers": None})
    assert (deploy.sites, deploy.deadline, deploy.federation) == (3, 5.0, "my-federation")
    assert deploy.rules().deadline == 5.0
    shown = app_config(out)
    assert {"clients_per_round", "local_steps", "head"} <= shown.keys(), "what is not set can be set for one run"
    config, *_ = settings.read({**shown, "local_steps": 4, "clients_per_round": 2}, own_data=False, own_model=False)
    assert (config.local_steps, config.clients_per_round) == (4, 2)
    with pytest.raises(ConfigError, match="holds an app already"):
        app_folder.write(out, setup.config, {})
    with pytest.raises(ConfigError) as caught:
        settings.read({**shown, "rounds": 0, "deploy.quorum": 2}, own_data=False, own_model=False)
    assert len(caught.value.problems) == 2
    for part in ("server_app", "client_app"):
        compile((out / "my_federation" / f"{part}.py").read_text(), part, "exec")
    assert server_app() is not None


def test_the_process_of_a_message_does_not_import_torch():
    code = "import sys, coterie_site; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=processes.environment(), check=False).returncode == 0


def test_bytes_are_those_of_the_methods_messages(tmp_path):
    """Envelopes of a model of 100 kB: what is beside the method's message is less than 2 %."""

    def wide(shape, outputs):
        return torch.nn.Sequential(torch.nn.Linear(*shape, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, outputs))

    _setup, grid, run_config = play("fedavg", tmp_path, rounds=2)
    grid.app = client_app(model=wide, data=lambda node: data())
    run_server(grid, run_config, wide)
    rows = RunFolder(tmp_path / "run").read_rounds(9)
    trains = [pair for pair in grid.sizes if pair[0].metadata.message_type == "train"][4:8]  # round 2: all there is
    sent, answered = (sum(len(part) for pair in trains for part in from_records(pair[side].content)) for side in (0, 1))
    assert rows[1]["bytes_down"] < sent < 1.02 * rows[1]["bytes_down"]
    assert rows[1]["bytes_up"] < answered < 1.02 * rows[1]["bytes_up"]


# With real processes: minutes, so marked slow.


def deployed(method, **more):
    return prepare(method, "digits", rounds=3, seed=1, **{**LOOP, "reference": False, **more})


def compare(setup, result, out):
    expected = run_setup(setup, None)
    assert result.selected == expected.selected
    assert result.clients == expected.clients
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

    with federation(work, names) as running:
        running.submit(resume=False)
        until(lambda told: told["round"] == 1 and told["sites"][names[1]]["state"] == "working")
        running.stop_site(names[1], kill=True)
        running.start_site(names[1])
        until(lambda told: told["round"] == 2 and told["sites"][names[0]]["state"] == "working")
        running.superlink.kill()
    assert Ledger.load(out).round in (1, 2, 3)
    (out / "sites.json").unlink()
    with federation(work, names) as running:
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
    with federation(work, names) as running:
        holder.append(running)
        running.submit(resume=False)
        wait(running, out, watch, 900)
    rows = RunFolder(out).read_rounds(9)
    assert rows[0]["participants"] == list(names)
    assert rows[2]["participants"] == list(names[:2])


def test_the_data_set_has_the_clients_that_sites_are(tmp_path):
    """A node of a simulation is the client at its partition's place."""
    from coterie.deploy.sitedata import site_data, site_name

    setup = prepare("fedavg", "digits", **LOOP)
    assert site_name(setup.config, {"partition-id": 2}) == "client-3"
    own = site_data(setup.config, {}, "client-3", None)
    whole = load_data("digits", 0)
    assert torch.equal(own.x[own.split(0).train], whole.x[whole.split(2).train])
    with pytest.raises(ConfigError, match="no client 'x'"):
        site_data(setup.config, {}, "x", None)
