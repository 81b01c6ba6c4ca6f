import numpy as np
import torch

from coterie.core.optimizers import SGD
from coterie.methods import FedAvg, FedAvgFT, Local

from .quadratic import DIM, LOOP, SHARE, STACKED, hessians, linear_terms, simulation

LR = 0.2


def weight(params):
    return params["weight"].flatten()


def test_one_step_is_gradient_descent_on_the_weighted_loss():
    """With one full-batch step a round, FedAvg is gradient descent on sum_k (n_k / n) f_k."""
    sim = simulation(FedAvg(SGD(LR)), steps=1)
    w = weight(sim.state.server)
    sim.train(1, STACKED)
    gradient = sum(s * (h @ w - b) for s, h, b in zip(SHARE, hessians(), linear_terms(), strict=True))
    torch.testing.assert_close(weight(sim.state.server), w - LR * gradient, rtol=1e-6, atol=1e-7)


def test_rounds_of_one_step_reach_the_global_minimiser():
    sim = simulation(FedAvg(SGD(LR)), steps=1)
    for number in range(1, 101):
        sim.train(number, STACKED)
    h = sum(s * h for s, h in zip(SHARE, hessians(), strict=True))
    b = sum(s * b for s, b in zip(SHARE, linear_terms(), strict=True))
    torch.testing.assert_close(weight(sim.state.server), torch.linalg.solve(h, b), rtol=1e-5, atol=1e-6)


def test_many_steps_average_the_local_minimisers():
    """After enough local steps each client is at its own minimiser, and one round gives their weighted mean."""
    sim = simulation(FedAvg(SGD(LR)), steps=300)
    sim.train(1, STACKED)
    own = [torch.linalg.solve(h, b) for h, b in zip(hessians(), linear_terms(), strict=True)]
    torch.testing.assert_close(
        weight(sim.state.server), sum(s * w for s, w in zip(SHARE, own, strict=True)), rtol=1e-5, atol=1e-6
    )


def test_local_reaches_each_clients_minimiser():
    sim = simulation(Local(SGD(LR)), steps=300)
    sim.train(1, STACKED)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        own = sim.state.clients["weight"][k].flatten()
        torch.testing.assert_close(own, torch.linalg.solve(h, b), rtol=1e-5, atol=1e-6)


def test_fine_tuning_takes_exact_steps_from_the_global_model():
    """theta_k after t steps from w: theta* + (I - lr H)^t (w - theta*)."""
    epochs = 3
    sim = simulation(FedAvgFT(SGD(LR), finetune_epochs=epochs), steps=1)
    sim.train(1, STACKED)
    w = weight(sim.state.server)
    views = sim.views(1, LOOP)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        star = torch.linalg.solve(h, b)
        shrink = torch.linalg.matrix_power(torch.eye(DIM, dtype=torch.float64) - LR * h, epochs)
        torch.testing.assert_close(views["weight"][k].flatten(), star + shrink @ (w - star), rtol=1e-6, atol=1e-7)


def test_weights_are_numbers_of_examples():
    sim = simulation(FedAvg(SGD(LR)), steps=1)
    outcome = sim.train(1, LOOP)
    assert outcome.participants == [0, 1, 2]
    assert outcome.bytes_up == 3 * (DIM * 8 + 4)  # the model in float64 and one count in float32
    assert np.isfinite(outcome.info["loss"].numpy()).all()
