import pytest
import torch

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population, TrainedAndBuffers
from coterie.core.optimizers import SGD
from coterie.methods import ClusteredFL, FedAvg
from coterie.methods.clustered_fl import _halves

from .planted import KINDS, simulation
from .quadratic import LOOP, STACKED


def test_without_splits_it_is_fedavg():
    ours, theirs = testing.simulate(ClusteredFL(SGD(0.1), splitting=False)), testing.simulate(FedAvg(SGD(0.1)))
    for name, value in theirs.state.server.items():
        torch.testing.assert_close(ours.state.server.w[name][1], value, rtol=1e-5, atol=1e-6)


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
    found = _halves({"w": flat})
    assert not found[0]
    assert across(found) == pytest.approx(min(map(across, every)))


def test_planted_clusters_are_found_and_fit():
    sim = simulation(ClusteredFL(SGD(0.5)))
    for number in range(1, 21):
        sim.train(number, STACKED)
    cluster = sim.state.server.cluster
    kinds = [set(cluster[list(kind)].tolist()) for kind in KINDS]
    assert not kinds[0] & kinds[1]
    assert float(sim.evaluate(20, LOOP)["test"]["accuracy"].mean()) > 0.8
    rows = tree.rows(sim.state.server.w, torch.tensor([0, 1, 2]))
    assert len(kinds[0]) > 1 or all(torch.equal(value[0], value[2]) for value in rows.values())
