import networkx as nx
import pytest
import torch

import coterie
from coterie import CoterieError, testing
from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD
from coterie.engine import Peers, make_peers
from coterie.experiment.run import run_setup
from coterie.experiment.setup import prepare
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg, FedeRiCo, Local
from coterie.storage.journal import at_once

from ..methods.quadratic import LOOP, SIZES, federation, simulation, task

COUNTS = torch.tensor(SIZES)
NAMES = [f"client-{i}" for i in range(10)]


def degrees(peers: Peers) -> list[int]:
    return [len(near) - 1 for near in peers.near]


def graph(topology, names=NAMES, seed=0) -> nx.Graph:
    peers = make_peers(topology, names, seed)
    edges = [(i, j) for i, near in enumerate(peers.near) for j in near]
    assert all((j, i) in edges for i, j in edges), "whom I hear hears me"
    assert all(i in near for i, near in enumerate(peers.near)), "a peer hears itself"
    found = nx.Graph((i, j) for i, j in edges if i != j)
    found.add_nodes_from(range(len(names)))
    return found


def test_graphs_are_what_they_say():
    assert nx.utils.graphs_equal(graph("complete"), nx.complete_graph(10))
    assert nx.utils.graphs_equal(graph("ring"), nx.cycle_graph(10))
    assert nx.utils.graphs_equal(graph("star"), nx.star_graph(9))
    assert nx.utils.graphs_equal(graph("small-world:4:0"), nx.circulant_graph(10, [1, 2]))
    assert degrees(make_peers("k-regular:3", NAMES, 0)) == [3] * 10
    assert degrees(make_peers("k-regular", NAMES, 0)) == [4] * 10
    world = graph("small-world:4:0.5")
    assert world.number_of_edges() == 20
    assert set(world.edges) != set(graph("small-world:4:0").edges)
    assert make_peers("server", NAMES, 0) is None
    for size in (1, 2, 3):
        for kind in ("ring", "star", "complete"):
            assert nx.is_connected(graph(kind, NAMES[:size]))


@pytest.mark.parametrize("kind", ["k-regular:2", "k-regular:3", "small-world:2:0.9"])
def test_random_graphs_are_connected_and_drawn_from_the_seed(kind):
    drawn = [graph(kind, seed=seed) for seed in range(8)]
    assert all(nx.is_connected(each) for each in drawn)
    assert len({frozenset(map(frozenset, each.edges)) for each in drawn}) > 1
    assert nx.utils.graphs_equal(graph(kind), graph(kind))


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("rign", "choose from server, complete, ring"),
        ("ring:3", "choose from"),
        ("k-regular:many", "choose from"),
        ("k-regular:1", "at least 2"),
        ("k-regular:10", "need 11 clients"),
        ("small-world:3", "even"),
        ("small-world:4:1.5", "probability"),
        ([("client-1", "client-99")], "no client 'client-99'"),
    ],
)
def test_what_is_wrong_with_a_topology_is_told(topology, words):
    with pytest.raises(ConfigError, match=words):
        prepare("fedavg", "digits", topology=topology)


def test_a_method_that_needs_a_server_says_so():
    class NeedsServer(FedAvg):
        peer_to_peer = False

    with pytest.raises(CoterieError, match="needs a server"):
        prepare(NeedsServer(), "digits", topology="ring")


def path_graph(sim: Simulation) -> Simulation:
    """The same simulation with peers 0 - 1 - 2."""
    edges = [("client-0", "client-1"), ("client-1", "client-2")]
    place = make_peers(edges, sim.federation.names, seed=0)
    return Simulation.start(sim.method, task(), federation(), sim.plan, 3, seed=0, place=place)


def test_a_peer_averages_its_closed_neighbourhood():
    alone, peers = simulation(Local(SGD(0.05)), 2), path_graph(simulation(FedAvg(SGD(0.05)), 2))
    alone.train(1, LOOP)
    outcome = peers.train(1, LOOP)
    own = alone.state.clients["weight"]
    for i, near in enumerate(([0, 1], [0, 1, 2], [1, 2])):
        expected = tree.mean({"weight": own[near]}, COUNTS[near])["weight"]
        torch.testing.assert_close(peers.state.server["weight"][i], expected)
        torch.testing.assert_close(peers.views(1, LOOP)["weight"][i], expected)
    message = own[0].nbytes + COUNTS[:1].float().nbytes
    assert (outcome.bytes_up, outcome.bytes_down) == (4 * message, 0)  # both ways over two edges


def test_an_unheard_peer_keeps_its_copy_and_those_beside_a_participant_hear_it():
    sim = path_graph(simulation(FedAvg(SGD(0.05)), 1))
    sim.participants = 1
    before = sim.state.server["weight"]
    number = next(number for number in range(1, 50) if sim.sample(number) == [0])
    sim.train(number, LOOP)
    changed = (sim.state.server["weight"] != before).flatten(1).any(1)
    assert changed.tolist() == [True, True, False]


def test_peers_are_told_how_many_they_hear():
    class Counts(FedAvg):
        def init_server(self, params, population):
            return params | {"heard": torch.tensor(population.audience)}

    sim = path_graph(simulation(Counts(), 1))
    assert sim.state.server["heard"].tolist() == [2, 3, 2]


def test_federico_uses_neighbours_only():
    sim = path_graph(simulation(FedeRiCo(SGD(0.01), temperature=0.5, local_work="gradient"), 1))
    for number in (1, 2, 3):
        outcome = sim.train(number, LOOP)
    weights = outcome.server_info["collaboration"]
    assert weights.shape == (3, 3)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    assert (weights > 0).tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    assert sim.state.server.models["weight"].shape[:2] == (3, 1), "a peer holds its own model"


def test_a_copy_is_told_nothing_that_is_for_another():
    told = []

    class Watched(FedeRiCo):
        def aggregate(self, server, ids, ups):
            told.append((int(server.held), ids, ups))
            return super().aggregate(server, ids, ups)

    sim = path_graph(simulation(Watched(SGD(0.01)), 1))
    for number in (1, 2):
        sim.train(number, LOOP)
    assert [(peer, ids.tolist()) for peer, ids, _ in told[3:]] == [(0, [0, 1]), (1, [0, 1, 2]), (2, [1, 2])]
    for peer, ids, ups in told[3:]:
        assert ups.to.tolist() == [[peer]] * len(ids), "one part each, which is for this peer"
        assert ups.own.tracked.any(1).tolist() == (ids == peer).tolist(), "losses stay with the client"


def test_relabelling_clients_and_edges_relabels_the_results():
    edges = [("site-0", "site-1"), ("site-1", "site-2"), ("site-2", "site-3")]
    order = [2, 0, 3, 1]
    base = testing.federation()
    names = [base.names[i] for i in order]
    moved = coterie.Federation("laws", base.x, base.y, {name: base.clients[name] for name in names}, base.num_classes)
    views = []
    for each in (base, moved):
        place = make_peers(edges, each.names, seed=0)
        sim = Simulation.start(FedeRiCo(SGD(0.05), neighbours=1), testing.task(), each, testing.PLAN, 4, 0, place=place)
        for number in (1, 2, 3):
            sim.train(number, LOOP)
        views.append(sim.views(3, LOOP).models["0.weight"])
    torch.testing.assert_close(views[0][order][:, 0], views[1][:, 0], rtol=1e-4, atol=1e-5)


SETTINGS = {"engine": "loop", "compile": False, "workers": 1, "rounds": 3, "reference": False, "model": "linear"}


def test_a_run_among_peers_is_resumed_bit_for_bit(tmp_path):
    setup = prepare("federico", "digits", topology="ring", **SETTINGS)
    whole = run_setup(setup, tmp_path / "whole")
    with pytest.raises(testing.Killed), at_once():
        run_setup(setup, tmp_path / "killed", progress=testing.KillAfter(2))
    resumed = coterie.resume(tmp_path / "killed")
    assert all(map(torch.equal, tree.leaves(whole.views), tree.leaves(resumed.views)))
    assert testing.without_times(whole.rounds) == testing.without_times(resumed.rounds)
    used = torch.tensor(whole.rounds[-1]["server"]["collaboration"]) > 0
    assert not used[0, 2:9].any(), "on a ring, the first client hears the second and the last"


def test_edges_from_a_file_become_part_of_the_run(tmp_path):
    file = tmp_path / "edges.csv"
    file.write_text("client-1,client-2\nclient-2, client-3\n")
    result = coterie.run("fedavg", "digits", topology=str(file), out=tmp_path / "run", **(SETTINGS | {"rounds": 1}))
    file.unlink()
    assert coterie.resume(tmp_path / "run").config.topology == [("client-1", "client-2"), ("client-2", "client-3")]
    assert result.config.topology == [("client-1", "client-2"), ("client-2", "client-3")]
    bad = tmp_path / "bad.csv"
    bad.write_text("client-1,client-2\nclient-3\n")
    with pytest.raises(ConfigError, match="line 2"):
        prepare("fedavg", "digits", topology=str(bad))
