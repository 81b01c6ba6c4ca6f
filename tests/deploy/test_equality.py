"""The same method, seed, data and participation: the simulator's loop engine and the deployment give the same bits."""

from pathlib import Path

import pytest
import torch

from coterie import METHODS, ConfigError, CoterieError
from coterie.core import tree
from coterie.engine import Engine
from coterie.evaluation.metrics import with_one_nan
from coterie.experiment.run import run_setup
from coterie.experiment.take_home.load import load
from coterie.storage import files
from coterie.storage.run_folder import RunFolder

from . import inprocess
from .inprocess import NAMES, ledger, make, net, private, same, simulate

METRICS = ("validation", "test", "info", "participants", "bytes_up", "bytes_down")


def frozen_below(shape, outputs):
    """A network whose first layers are frozen, with more numbers than anything that is sent."""
    below = torch.nn.Sequential(torch.nn.Linear(*shape, 7), torch.nn.Tanh(), torch.nn.Linear(7, *shape))
    below.register_parameter("unused", torch.nn.Parameter(torch.randn(20_000)))  # it would make mail large
    whole = torch.nn.Sequential(below.requires_grad_(False), *net(shape, outputs))
    whole.register_parameter("deploy", torch.nn.Parameter(torch.ones(1), requires_grad=False))  # as a message's part
    return whole


def nobody_sends_what_is_frozen(queue, setup):
    """Neither by name nor, in sealed mail, by size."""
    frozen = {name: leaf for name, leaf in setup.task.init().items() if name.startswith("0.")}
    for _, _, _, envelope in queue.seen:
        assert envelope.nbytes < tree.nbytes(frozen)
        assert not any(f"/{name}".encode() in envelope.body for name in frozen)


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_are_the_simulators_bits(method, tmp_path, monkeypatch):
    monkeypatch.setattr(inprocess, "net", frozen_below)
    setup, server, queue = make(method, tmp_path, clients_per_round=3, reference=False, evaluate_every=3)
    book = ledger()
    result = server.run(book)
    assert result.selected == 3
    nobody_sends_what_is_frozen(queue, setup)
    sim = simulate(setup)
    kept, _ = RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))
    assert same(kept.server, sim.state.server)
    for i, name in enumerate(NAMES):
        assert same(tree.rows(private(queue, book, name).client, 0), tree.rows(sim.state.clients, i)), name
    scores = sim.evaluate(3, Engine("loop"))
    for part, by in scores.items():
        assert {metric: with_one_nan(values) for metric, values in by.items()} == result.rounds[-1][part]
    views, x = sim.views(3, Engine("loop")), setup.federation.x[:3]
    for i, name in enumerate(NAMES):
        model = load(queue.sites[name].root / book.run / name / "result", name, model=frozen_below)
        assert torch.equal(model(x), setup.method.predict(setup.task, tree.rows(views, i), x))


def test_a_site_with_other_frozen_weights_takes_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(inprocess, "net", frozen_below)
    rules = inprocess.Rules(sites=4, deadline=2, joining=30, quorum=0.5)
    _, server, queue = make("fedavg", tmp_path, rules, reference=False)

    def others(shape, outputs):
        whole = frozen_below(shape, outputs)
        with torch.no_grad():
            whole[0][0].weight.copy_(whole[0][0].weight.flip(0))
        return whole

    queue.sites["b"].model = others
    result = server.run(book := ledger())
    assert [row["participants"] for row in result.rounds] == [["a", "c", "d"]] * 3
    assert book.sites["b"].refused["unlike"] > 0
    assert "frozen weights of the model here are not the server's" in (tmp_path / "b" / "site.log").read_text()


def test_a_robust_server_is_the_simulators_bits(tmp_path):
    setup, server, _ = make("fedavg", tmp_path, reference=False, robust="nnm:1+median")
    server.run(ledger())
    sim = simulate(setup)
    kept, _ = RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))
    assert same(kept.server, sim.state.server)
    plain = simulate(make("fedavg", tmp_path / "plain", reference=False)[0])
    assert not same(plain.state.server, sim.state.server)


def test_a_robust_rule_waits_for_as_many_sites_as_it_needs(tmp_path):
    rules = inprocess.Rules(sites=4, deadline=2, joining=30, quorum=0.25, patience=1)
    lost = lambda way, name, round, envelope: [] if way == "from" and name in "cd" and round > 0 else [envelope]  # noqa: E731
    _, server, _ = make("fedavg", tmp_path, rules, lost, reference=False, robust="nnm:1+median")
    with pytest.raises(CoterieError, match=r"2 of 4 sites answered .*, but 3 must; continue when they are back"):
        server.run(ledger())
    _, server, _ = make("fedavg", tmp_path / "few", reference=False, robust="krum:1")
    with pytest.raises(ConfigError, match="robust = 'krum:1' needs 5 sites in a round, not 4"):
        server.run(ledger())


TRAINING = {
    "schedule": "warmup:rounds=1:then=cosine:per=step",
    "clip_gradient": 0.5,
    "sampler": "by-size",
    "server_optimizer": "fedadam:lr=0.05",
}


@pytest.mark.parametrize("topology", ["server", "ring"])
def test_schedule_sampler_and_server_optimizer_are_the_simulators_bits(topology, tmp_path):
    """Training alone has the schedule, too; peers keep the memory of the server's optimiser with their copies."""
    setup, server, queue = make("fedprox", tmp_path, clients_per_round=3, topology=topology, **TRAINING)
    book = ledger()
    result, whole = server.run(book), run_setup(setup, None)
    for ours, theirs in ((result, whole), (result.reference, whole.reference)):
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            assert {key: one[key] for key in METRICS[:4]} == {key: other[key] for key in METRICS[:4]}
    sim = simulate(setup)
    if topology == "server":
        kept, _ = RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))
        assert same(kept.server, sim.state.server)
        assert any(float(leaf.abs().max()) > 0 for leaf in tree.leaves(kept.server.state))
    else:
        assert same(private(queue, book, "a").copy, tree.rows(sim.state.server, 0))
    assert (server.out / "config.toml").read_text().count("fedadam:lr=0.05:beta1") == 1


@pytest.mark.parametrize("method", ["fedmap", "ditto"])
def test_the_run_folder_is_a_simulations(method, tmp_path, monkeypatch):
    setup, server, _ = make(method, tmp_path, clients_per_round=3, report=True)
    written, write = list[Path](), files.write_text
    monkeypatch.setattr(files, "write_text", lambda path, text: (written.append(path), write(path, text)))
    book = ledger()
    result, whole = server.run(book), run_setup(setup, tmp_path / "simulated", report=False)
    tables = [path for path in written if path.name in ("clients.csv", "summary.json")]
    assert len(tables) == len(set(tables)) == 2 * 2 * (1 + len(NAMES) + 1), "each table is written once"
    for ours, theirs in ((result, whole), (result.reference, whole.reference)):
        assert ours.selected == theirs.selected
        assert [{key: row[key] for key in mine} for row, mine in zip(theirs.clients, ours.clients, strict=True)] == [
            *ours.clients
        ]
        for one, other in zip(ours.rounds, theirs.rounds, strict=True):
            wanted = METRICS if ours is result else METRICS[:4]
            assert {key: one[key] for key in wanted} == {key: other[key] for key in wanted}
    for name in ("config.toml", "reference/clients.csv", "reference/config.toml", "reference/summary.json"):
        assert (server.out / name).read_text() == (tmp_path / "simulated" / name).read_text(), name
    site = tmp_path / "a" / book.run / "a" / "result"
    for name in ("report.html", "benefit.json", "clients/a/card.md", "clients/a/model.safetensors"):
        assert (site / name).exists(), name
    assert not list(server.out.glob("clients/*")), "models stay at the sites"


PEERS = [("federico", "ring"), ("fedavg", "star"), ("fedamp", "complete"), ("fedfomo", "ring"), ("gpfl", "ring")]


@pytest.mark.parametrize(("method", "topology"), PEERS)
def test_peers_are_the_simulators_bits(method, topology, tmp_path, monkeypatch):
    monkeypatch.setattr(inprocess, "net", frozen_below)
    setup, server, queue = make(method, tmp_path, topology=topology, clients_per_round=3, reference=False)
    book = ledger()
    result, whole = server.run(book), run_setup(setup, None)
    assert result.selected == whole.selected
    assert result.clients == whole.clients
    nobody_sends_what_is_frozen(queue, setup)
    for one, other in zip(result.rounds, whole.rounds, strict=True):
        assert {key: one[key] for key in METRICS[:4]} == {key: other[key] for key in METRICS[:4]}
    sim = simulate(setup)
    for i, name in enumerate(NAMES):
        mine = private(queue, book, name)
        assert same(mine.copy, tree.rows(sim.state.server, i)), name
        assert same(tree.rows(mine.client, 0), tree.rows(sim.state.clients, i)), name


def test_clients_heard_and_sparse_evaluation(tmp_path):
    settings = {"clients_heard": 2, "evaluate_every": 2, "rounds": 3, "clients_per_round": 3, "average": "trimmed"}
    setup, server, _ = make("pfedbred", tmp_path, reference=False, **settings)
    result, whole = server.run(ledger()), run_setup(setup, None)
    assert [sorted(row) for row in result.rounds] == [sorted(row) for row in whole.rounds]
    assert result.clients == whole.clients


def test_sites_choose_what_they_take_home_as_in_a_simulation(tmp_path):
    setup, server, queue = make("fedavg", tmp_path, take_home="best", take_home_folds=0, calibrate=True)
    book, told = ledger(), []
    server.say = told.append
    server.run(book)
    number = len(NAMES)
    assert f"{number} of {number} sites have fewer than 50 validation examples, by which alone they choose" in "".join(
        told
    )
    run_setup(setup, tmp_path / "simulated", report=False)
    told = files.read_json(tmp_path / "simulated" / "take_home.json")
    x = setup.federation.x[:3]
    for i, name in enumerate(NAMES):
        out = queue.sites[name].root / book.run / name / "result"
        (row,) = files.read_json(out / "take_home.json")["clients"]
        assert row["kept"] == told["clients"][i]["kept"]
        assert row["temperature"] == pytest.approx(told["clients"][i]["temperature"], rel=1e-4)
        ours, theirs = load(out, name, model=net), load(tmp_path / "simulated", name, model=net)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
