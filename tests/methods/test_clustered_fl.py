import numpy as np
import pytest
import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population, TrainedAndBuffers
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import ClusteredFL
from coterie.methods.clustered_fl import _gram, _halves
from coterie.storage.paged_rows import Store

from .planted import KINDS, simulation
from .quadratic import LOOP, STACKED


def ups(*updates: list[float]) -> TrainedAndBuffers:
    return TrainedAndBuffers({"w": torch.tensor(updates)}, {}, torch.tensor([1.0, 1.0, 2.0, 2.0][: len(updates)]))


def test_a_stalled_cluster_is_split_by_direction_and_then_its_halves_go_their_own_ways():
    method = ClusteredFL(first_split=1)
    server = method.init_server({"w": torch.zeros(2)}, Population(4, 4))
    everybody = torch.arange(4)
    server = method.aggregate(server, everybody, ups([2.0, 0.0], [2.0, 0.2], [-1.0, 0.0], [-1.0, -0.1]))
    # The mean is (1 * 2 + 1 * 2 - 2 - 2) / 6 = 0 and (0.2 - 0.2) / 6 = 0: stalled. All have the same model still.
    torch.testing.assert_close(server.w["w"], torch.zeros(4, 2))
    assert server.cluster.tolist() == [0, 0, 2, 2]
    server = method.aggregate(server, everybody, ups([1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 3.0]))
    torch.testing.assert_close(server.w["w"], torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]))
    assert server.cluster.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({}, True),
        ({"splitting": False}, False),
        ({"first_split": 2}, False),
        ({"eps1": 0.7}, True),
        ({"eps1": 0.6}, False),
        ({"eps2": 1.9}, True),
        ({"eps2": 2.1}, False),
        ({"ratio": 0.3}, False),
        ({"separation": 0.999}, True),  # the cosine is -1
    ],
)
def test_when_a_cluster_is_split(options, split):
    """Updates 2, 2 and -0.7, which counts twice: their mean is 0.65, which is 0.325 of the longest."""
    method = ClusteredFL(**{"first_split": 1, "ratio": 0.4, **options})
    server = method.init_server({"w": torch.zeros(2)}, Population(3, 3))
    server = method.aggregate(server, torch.arange(3), ups([2.0, 0.0], [2.0, 0.0], [-0.7, 0.0]))
    assert (server.cluster[2] != server.cluster[0]).item() == split


def test_not_all_heard_no_split():
    method = ClusteredFL(first_split=1)
    server = method.init_server({"w": torch.zeros(2)}, Population(5, 4))
    server = method.aggregate(server, torch.arange(4), ups([2.0, 0.0], [2.0, 0.2], [-1.0, 0.0], [-1.0, -0.1]))
    assert server.cluster.tolist() == [0] * 5


def test_the_halves_are_the_best_of_all_bipartitions():
    flat = torch.randn(6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=2)

    def across(second: torch.Tensor) -> float:
        return float(cosine[second][:, ~second].max())

    every = [torch.tensor([bool(code >> i & 1) for i in range(6)]) for code in range(1, 63)]
    found, cross = _halves(_gram({"w": flat[:, :2], "b": flat[:, 2]}))
    assert not found[0]
    assert cross == pytest.approx(across(found))
    assert across(found) == pytest.approx(min(map(across, every)))


def test_planted_clusters_are_found_and_fit():
    sim = simulation(ClusteredFL(SGD(0.5)))
    for number in range(1, 21):
        sim.train(number, STACKED)
    cluster = sim.state.server.cluster
    kinds = [set(cluster[list(kind)].tolist()) for kind in KINDS]
    assert not kinds[0] & kinds[1]
    assert float(sim.evaluate(20, LOOP)["test"]["accuracy"].mean()) > 0.8
    assert [len(kind) for kind in kinds] == [1, 1]
    for value in sim.state.server.w.values():
        assert [torch.equal(value[0], value[k]) for k in range(6)] == [True, True, True, False, False, False]


def test_alike_clients_stay_together():
    """Thirty clients with examples of one distribution: their updates become noise, which is no reason to part."""
    draw, size = torch.Generator().manual_seed(7), 20
    x = torch.randn(30 * size, 5, generator=draw)
    y = (x[:, 0] + 0.5 * x[:, 1] + 0.5 * torch.randn(len(x), generator=draw) > 0).long()
    rows = [np.arange(k * size, (k + 1) * size) for k in range(30)]
    data = Federation("alike", x, y, {f"site-{k}": Split(r[:18], r[18:19], r[19:]) for k, r in enumerate(rows)}, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        task = Task(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), num_classes=2)
    clusters = []
    for separation in (0.75, 0.0):
        method = ClusteredFL(SGD(0.5), separation=separation)
        sim = Simulation.start(method, task, data, Plan(batch_size=9, epochs=1), 30, seed=0)
        for number in range(1, 31):
            sim.train(number, STACKED)
        clusters.append(len(set(sim.state.server.cluster.tolist())))
    assert clusters[0] == 1
    assert clusters[1] > 1  # the mean alone would have split them


@pytest.mark.parametrize("separation", [0.7, 0.75])
def test_orthogonal_updates_are_split_only_on_demand(separation):
    """sqrt((1 - 0) / 2) = 0.707; all pairs are equally far apart, and some client is still the first to part."""
    method = ClusteredFL(first_split=1, ratio=0.9, separation=separation)
    server = method.init_server({"w": torch.zeros(3)}, Population(3, 3))
    server = method.aggregate(server, torch.arange(3), ups([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]))
    assert len(set(server.cluster.tolist())) == (2 if separation < 0.707 else 1)


def test_the_order_of_clients_does_not_matter():
    method = ClusteredFL(first_split=1)
    updates = ups([2.0, 0.0], [2.0, 0.2], [-1.0, 0.0], [-1.0, -0.1])
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        server = method.init_server({"w": torch.zeros(2)}, Population(4, 4))
        server = method.aggregate(server, torch.tensor(order), tree.rows(updates, torch.tensor(order)))
        assert server.cluster.tolist() == [0, 0, 2, 2]
        other = ups([1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 3.0])
        server = method.aggregate(server, torch.tensor(order), tree.rows(other, torch.tensor(order)))
        torch.testing.assert_close(server.w["w"], torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 2.0]]))


def test_rows_in_files():
    method = ClusteredFL(first_split=1)
    server = method.init_server({"w": torch.zeros(2)}, Population(3, 3, None, None, Store(1)))
    server = method.aggregate(server, torch.arange(3), ups([2.0, 0.0], [2.0, 0.0], [-2.0, 0.0]))
    server = method.aggregate(server, torch.arange(3), ups([1.0, 0.0], [3.0, 0.0], [0.0, 5.0]))
    found = method.dispatch(server, torch.arange(3), torch.Generator())["w"]
    assert found.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 5.0]]


def test_a_part_of_the_clients_is_cautioned_about():
    task = testing.task()
    assert "use --fraction 1" in ClusteredFL().cautions(task, Population(4, 3))[0]
    assert ClusteredFL().cautions(task, Population(4, 4)) == []
    assert ClusteredFL(splitting=False).cautions(task, Population(4, 3)) == []
