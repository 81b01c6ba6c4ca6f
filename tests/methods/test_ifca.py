import torch
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.methods import IFCA, FedAvg
from coterie.methods.ifca import Up

from .planted import KINDS, simulation
from .quadratic import LOOP


def test_each_cluster_is_the_mean_of_those_who_took_it():
    method, params = IFCA(clusters=3), {"w": torch.zeros(2)}
    server = method.init_server(params, Population(4, 4))
    server = server._replace(theta={"w": torch.full((3, 2), 9.0)})
    w = torch.tensor([[1.0, 0.0], [5.0, 2.0], [3.0, 3.0]])
    ups = Up({"w": w}, torch.tensor([2, 2, 0]), torch.tensor([1.0, 3.0, 7.0]))
    server = method.aggregate(server, torch.tensor([0, 1, 3]), ups)
    # Cluster 0: client 3 alone; cluster 1: nobody, so it stays; cluster 2: (1 * [1, 0] + 3 * [5, 2]) / 4.
    assert server.theta["w"].tolist() == [[3.0, 3.0], [9.0, 9.0], [4.0, 1.5]]
    assert server.cluster.tolist() == [2, 2, -1, 0]
    shares = method.server_info(server)["collaboration"]
    assert shares.tolist() == [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    first = method.server_info(method.init_server(params, Population(4, 4)))["collaboration"]
    assert torch.equal(first, torch.eye(4))  # nobody took part yet


def test_a_client_takes_the_model_that_fits_its_data():
    """Of a linear model and its negative, the one that predicts the client's labels."""
    task = Task(nn.Linear(6, 3), num_classes=3)
    batches, right = testing.batches(0), {"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}
    for _ in range(3):
        right = FedAvg(SGD(0.5)).local_update(task, (), right, batches)[1].params
    models = tree.stack([tree.scale(right, -1.0), right])
    _, up, _ = IFCA(SGD(1e-6), clusters=2).local_update(task, (), models, batches)
    assert int(up.cluster) == 1
    torch.testing.assert_close(up.w["weight"], right["weight"], rtol=0, atol=1e-4)
    view = IFCA(clusters=2).personalize(task, (), models, batches)
    assert torch.equal(view["weight"], right["weight"])


def test_models_begin_different_and_the_same_everywhere():
    method, params = IFCA(clusters=3), testing.task().init()
    first, again = (method.init_server(params, Population(4, 4)).theta for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value[0].to(params[name].dtype), params[name])
        assert torch.equal(value[1].flatten().sort().values, params[name].to(value).flatten().sort().values)
    assert not torch.equal(first["0.weight"][0], first["0.weight"][1])
    assert not torch.equal(first["0.weight"][2], first["0.weight"][1])


def test_a_cluster_that_does_not_exist_is_refused():
    up = Up({"w": torch.zeros(2)}, torch.tensor(3), torch.tensor(5.0))
    assert "cluster 3 of 3" in IFCA(clusters=3).implausible(up, 5)
    assert IFCA(clusters=4).implausible(up, 5) is None
    assert IFCA(clusters=4).implausible(up, 4) is not None


def test_planted_clusters_are_found():
    """Two kinds of clients whose labels are each other's opposite."""
    sim = simulation(IFCA(SGD(0.5), clusters=2))
    for number in range(1, 9):
        sim.train(number, LOOP)
    cluster = sim.state.server.cluster.tolist()
    assert {tuple(sorted({cluster[i] for i in kind})) for kind in KINDS} == {(0,), (1,)}
