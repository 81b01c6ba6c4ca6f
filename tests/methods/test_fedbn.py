import torch

from coterie import testing
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
    for name, value in theirs.state.server.items():
        torch.testing.assert_close(ours.state.server[name], value)
