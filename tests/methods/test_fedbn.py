import torch

from coterie import testing
from coterie.core.method import Newcomer, Population
from coterie.core.optimizers import SGD
from coterie.engine import Engine
from coterie.methods import FedAvg, FedBN


def test_norm_layers_stay_with_the_client_and_the_rest_is_shared():
    sim = testing.simulate(FedBN(SGD(0.1)), Engine("loop"), rounds=2)
    views = sim.views(2, Engine("loop"))
    norm = sim.task.norm_names
    assert norm == {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    for name, rows in views.items():
        shared = all(torch.equal(rows[0], row) for row in rows)
        assert shared == (name not in norm), name


def test_first_round_of_other_layers_is_fedavg():
    ours = testing.simulate(FedBN(SGD(0.1)), Engine("loop"), rounds=1)
    theirs = testing.simulate(FedAvg(SGD(0.1)), Engine("loop"), rounds=1)
    assert ours.state.server.keys() == theirs.state.server.keys() - ours.task.norm_names
    for name, value in ours.state.server.items():
        torch.testing.assert_close(value, theirs.state.server[name])


def test_a_newcomer_trains_its_normalisation_layers_alone():
    """On layers that nobody changes, so that its statistics become those of its own data."""
    task = testing.task()
    server = testing.simulate(FedBN(SGD(0.1)), Engine("loop"), rounds=2).state.server
    newcomer = FedBN().onboard(task, Newcomer(server, task.init()), torch.tensor([4]), None)
    assert newcomer.only == {"1.weight", "1.bias"}
    assert newcomer.server is server
    begun, method = task.beginning(newcomer.params, newcomer.only), FedBN(SGD(0.1))
    client = method.init_client(begun.init())
    batches = testing.batches(1)
    for _ in range(20):
        client, _, _ = method.local_update(begun, client, server, batches)
    assert all(torch.equal(client[name], value) for name, value in server.items())
    rows = torch.unique(batches.index[batches.mask > 0])
    z = batches.x[rows] @ server["0.weight"].T
    view = method.personalize(begun, client, server, batches)
    torch.testing.assert_close(view["1.running_mean"], z.mean(0), atol=0.25, rtol=0.1)
    assert not torch.allclose(task.init()["1.running_mean"], z.mean(0), atol=0.25, rtol=0.1)


def test_without_normalisation_layers_a_newcomer_trains_as_everybody_does():
    task = testing.task(norm=False)
    assert FedBN().onboard(task, Newcomer(task.init(), task.init()), torch.tensor([4]), None).only is None


def test_it_warns_of_models_in_which_it_is_fedavg():
    task, bare = testing.task(), testing.kit.task(norm=False)
    assert FedBN().cautions(task, Population(4, 4, task)) == []
    assert "no normalisation layers" in FedBN().cautions(bare, Population(4, 4, bare))[0]
