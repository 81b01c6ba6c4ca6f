"""Who takes part in a round, and how everybody is evaluated."""

import numpy as np

from coterie.compute import inference
from coterie.engine import Engine
from coterie.methods import FedAvgFT
from tests.engine.small import simulation


def test_evaluation_of_many_examples_goes_in_pieces(monkeypatch):
    sim = simulation(sizes=(60, 50))
    whole = sim.evaluate(1, Engine("stacked"))
    monkeypatch.setattr("coterie.experiment.scored_examples.ACTIVATION_BYTES", 24 * 32 * 4)
    pieces = sim.evaluate(1, Engine("stacked"))
    np.testing.assert_allclose(whole["test"]["loss"], pieces["test"]["loss"], rtol=1e-6)


def test_partial_participation_is_fair_and_does_not_depend_on_the_order():
    sim = simulation(participants=2)
    counts = np.zeros(5)
    for number in range(1, 1001):
        counts[sim.sample(number)] += 1
    # 1,000 draws of 2 in 5: mean 400, standard deviation sqrt(1000 * 0.4 * 0.6) = 15.5
    assert (abs(counts - 400) < 5 * 15.5).all()
    assert all(len(sim.sample(number)) == 2 for number in range(1, 20))


def test_faster_layers_are_for_predictions_and_not_for_what_clients_train(monkeypatch):
    """Compiled steps are found by what they are: traced among other layers, one would be another step."""
    calls = []
    linear = inference._linear
    monkeypatch.setattr(inference, "_linear", lambda *args: calls.append(1) or linear(*args))
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    sim = simulation(FedAvgFT(finetune_epochs=1))
    sim.train(1, Engine("loop"))
    sim.views(1, Engine("loop"))
    assert not calls
    sim.evaluate(1, Engine("loop"))
    assert calls
