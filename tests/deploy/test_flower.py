"""Over Flower: in this process, in Ray's, and in real processes. The bits are the simulator's everywhere."""

import json
import uuid

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from coterie.core import tree
from coterie.core.errors import ConfigError, CoterieError
from coterie.deploy import flower, settings
from coterie.deploy.client_app import client_app, from_records
from coterie.deploy.flower import run_server
from coterie.deploy.ledger import Ledger
from coterie.engine import Engine
from coterie.experiment.setup import prepare
from coterie.experiment.take_home.load import load
from coterie.storage.run_folder import RunFolder

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


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_secure_sums_over_a_grid_are_the_simulators_within_rounding(method, tmp_path):
    setup, grid, run_config = play(method, tmp_path, **{"deploy.secure": True})
    grid.broken[101] = 2
    run_server(grid, run_config, net)
    sim = simulate(setup)
    kept, _ = RunFolder(tmp_path / "run").load(3, type(sim.state)(sim.state.server, ()))
    for path, leaf in tree.pack(kept.server).items():
        torch.testing.assert_close(leaf, tree.pack(sim.state.server)[path], rtol=2e-5, atol=2e-6)
    kinds = [json.loads(from_records(pair[0].content)[0])["kind"] for pair in grid.sizes]
    assert [kinds.count(kind) for kind in ("keys", "shares", "unmask")] == [12, 12, 12]


def test_secure_sums_that_cannot_be_are_refused_before_the_run(tmp_path):
    _, grid, run_config = play("fedamp", tmp_path, **{"deploy.secure": True, "deploy.sites": 2})
    with pytest.raises(ConfigError, match="fedamp cannot be summed") as error:
        run_server(grid, run_config, net)
    assert any("3 to 1000 are needed" in problem for problem in error.value.problems)


def test_a_site_for_secure_sums_only_sends_nothing_else(tmp_path):
    _, grid, run_config = play("fedavg", tmp_path, **{"deploy.deadline": 0.2, "deploy.joining": 60.0})
    for context in grid.nodes.values():
        context.node_config["secure"] = True
    with pytest.raises(CoterieError, match="0 of 4 sites answered"):
        run_server(grid, run_config, net)
    assert all(b'"info/loss"' not in bytes(from_records(reply.content)[1]) for _, reply in grid.sizes)


def test_a_node_that_answers_nonsense_is_a_node_that_failed(tmp_path):
    _, grid, run_config = play("fedavg", tmp_path, **{"deploy.deadline": 0.2, "deploy.joining": 60.0})
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
    monkeypatch.setattr(flower, "OTHER_SERVER_SECONDS", 0.1)
    with flower.one_server(tmp_path / "run"), pytest.raises(CoterieError, match="another server is using"):
        run_server(grid, run_config, net)
    assert not (tmp_path / "run" / "deployment.json").exists()
    with flower.one_server(tmp_path / "run"):
        pass  # free again


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
