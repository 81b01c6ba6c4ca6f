import dataclasses
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from coterie import testing
from coterie.core import tree
from coterie.core.batches import Batches
from coterie.core.method import Newcomer, Population
from coterie.core.optimizers import SGD, Adam
from coterie.core.rng import keys_of
from coterie.core.routes import NOBODY, Addressed, Asked
from coterie.core.task import Task
from coterie.data.federation import from_clients
from coterie.data.minibatches import Plan, draw
from coterie.engine import make_peers
from coterie.experiment.simulation import Simulation
from coterie.methods import FedeRiCo, Local
from coterie.methods.federico import Down
from coterie.parts.mixtures import (
    Contributions,
    Losses,
    Mixture,
    capped,
    deployed_mass,
    epsilon_greedy,
    pruned_mixture,
    track_losses,
)

from .quadratic import LOOP, SIZES, STACKED, hessians, linear_terms, loss, simulation, task

COUNT = torch.tensor(SIZES, dtype=torch.float64)
EVERYBODY = FedeRiCo(SGD(0.01), local_work="gradient", mode="all-to-all", beta=1.0, temperature=4.0)
LETTER = dataclasses.replace(EVERYBODY, optimizer=SGD(0.0005), loss_tracking="accumulated", temperature="count")


def models(sim: Simulation) -> torch.Tensor:
    return sim.state.server.models["weight"][:, 0].clone()  # [N, DIM]


def mean_losses(phi: torch.Tensor) -> torch.Tensor:
    """[N, N]: of phi_j on the data of i, independently of the library."""
    return torch.stack([torch.stack([loss(i, each) for each in phi]) for i in range(len(SIZES))])


def collaboration(sim: Simulation) -> torch.Tensor:
    return sim.method.server_info(sim.state.server)["collaboration"]


@pytest.mark.parametrize(("method", "tau"), [(EVERYBODY, torch.tensor(4.0)), (LETTER, COUNT)], ids=["tau", "letter"])
def test_one_round_is_one_em_step_eq_3_to_6(method, tau):
    sim = simulation(method, steps=1)
    sim.train(1, STACKED)
    phi = models(sim)
    sim.train(2, STACKED)
    weights = torch.softmax(-tau[..., None] * mean_losses(phi), 1)  # a uniform prior, so far
    torch.testing.assert_close(collaboration(sim).double(), weights, rtol=1e-4, atol=1e-6)
    # The M-step's objective: sum_i w_ij * (mean loss, or with the letter the sum of losses).
    scale = tau[:, None] if method is LETTER else 1.0
    gradient = torch.func.grad(lambda phi: (scale * weights * mean_losses(phi)).sum())(phi)
    torch.testing.assert_close(models(sim), phi - method.optimizer.lr * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [EVERYBODY, LETTER], ids=["fixed prior", "letter"])
def test_em_never_decreases_the_likelihood_eq_1(method):
    """sum_i log sum_j Pi_ij exp(-l_ij). The letter moves the prior, Pi = w of the round before (eq. 4), starting from
    uniform; with beta = 1, w is the posterior under a prior that stays uniform, and so the objective keeps it."""
    sim = simulation(method, steps=1)
    sim.train(1, STACKED)
    tau = COUNT[:, None] if method is LETTER else method.temperature
    prior = torch.full((len(SIZES), len(SIZES)), 1 / len(SIZES), dtype=torch.float64)
    found = []
    for number in range(2, 40):
        found.append(torch.logsumexp(prior.log() - tau * mean_losses(models(sim)), 1).sum())
        sim.train(number, STACKED)
        if method is LETTER:
            prior = collaboration(sim).double()
    gains = torch.stack(found).diff()
    assert (gains > -1e-5).all(), gains.min()
    assert gains.sum() > 0.5


def test_weights_of_another_likelihood_do_decrease_it():
    """The test above can fail: models that have found their clients lose likelihood under (nearly) equal weights."""
    sim = simulation(dataclasses.replace(EVERYBODY, optimizer=SGD(0.05)), steps=1)
    for number in range(1, 41):
        sim.train(number, STACKED)
    before = torch.logsumexp(-4 * mean_losses(models(sim)), 1).sum()
    sim.method = dataclasses.replace(sim.method, temperature=0.01)
    sim.train(41, STACKED)
    assert torch.logsumexp(-4 * mean_losses(models(sim)), 1).sum() < before - 1e-3


def test_the_default_round_goes_the_weighted_ways_over_their_total_weight():
    """`epochs`: phi_j goes sum_i w_ij (phi_j - end_ij) / max(1, sum_i w_ij), where end_ij is phi_j after client i's
    three steps of gradient descent, w <- w - eta (H_i w - b_i)."""
    method = FedeRiCo(SGD(0.05), mode="all-to-all", beta=1.0, temperature=4.0)
    assert method.local_work == "epochs", "by default"
    sim = simulation(method, steps=3)
    sim.train(1, STACKED)
    phi = models(sim)
    sim.train(2, STACKED)
    weights = torch.softmax(-4.0 * mean_losses(phi), 1)
    total = weights.sum(0)
    assert total.max() > 1.1, "or dividing by the total does nothing"
    assert total.min() < 0.9, "or not dividing by less than 1 does nothing"
    expected = phi.clone()
    for i, (hessian, term) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        for j, start in enumerate(phi):
            end = start
            for _ in range(3):
                end = end - 0.05 * (hessian @ end - term)
            expected[j] -= weights[i, j] * (start - end) / total[j].clamp_min(1.0)
    torch.testing.assert_close(models(sim), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("m_step", ["at-hand", "all"])
def test_contributions_weigh_by_the_posterior_over_the_models_at_hand(m_step):
    """With M = 1 of three clients, two models are at hand; `all` leaves their weights as eq. 3 has them over three."""
    method = FedeRiCo(SGD(0.05), neighbours=1, m_step=m_step, temperature=4.0)
    whose = torch.tensor([0, 2, NOBODY])  # its own, another's, and room for a third
    losses = Losses(torch.tensor([0.4, 0.1, 0.7]), torch.tensor([0.4, 0.1, 0.7]), torch.ones(3, dtype=torch.bool))
    sim = simulation(method, steps=1)
    models = tree.broadcast(task().init(), 3)
    batches = drawn_for(sim, 0)
    _, up, _ = method.local_update(sim.task, (), Down(Asked(whose, models), losses), batches)
    tracked = losses.tracked.clone()
    mine = 4.0 * mean_losses(task().init()["weight"].reshape(1, -1))[0, 0]
    for j in (0, 2):
        tracked[j] = 0.4 * tracked[j] + 0.6 * mine
    weight = torch.softmax(-tracked, 0)[[0, 2]]
    expected = weight / weight.sum() if m_step == "at-hand" else weight
    torch.testing.assert_close(up.parts.weight, torch.cat([expected, torch.zeros(1)]), rtol=1e-5, atol=1e-6)


def drawn_for(sim: Simulation, client: int) -> Batches:
    drawn = draw(sim.federation, [client], sim.plan, seed=0, purpose="test", round=1)
    return drawn._replace(index=drawn.index[0], mask=drawn.mask[0], key=drawn.key[0], count=drawn.count[0])


def quadratic_losses(phi: torch.Tensor) -> torch.Tensor:
    """`mean_losses` again, by f_i(w) = w' H_i w / 2 - b_i . w + f_i(0): quicker, for many rounds."""
    constant = torch.stack([loss(i, torch.zeros_like(phi[0])) for i in range(len(SIZES))])
    curved = torch.einsum("jd,ide,je->ij", phi, torch.stack(hessians()), phi) / 2
    return curved - torch.stack(linear_terms()) @ phi.T + constant[:, None]


def test_the_mean_gradient_falls_with_the_number_of_rounds_theorem_3_1():
    """With eta = a / sqrt(T), (1/T) sum_t ||grad_Phi f||^2 <= C / sqrt(T).

    f = sum_i log sum_j exp(-tau l_ij), up to a constant: the likelihood under the uniform prior that beta = 1 keeps. A
    round goes eta / tau along its gradient, and for steps below the inverse of its curvature gains at least
    eta / (2 tau) ||grad f||^2. Added up, and as f stays below f* = sum_i log N - tau min f_i, C = 2 tau (f* - f_1) / a.
    It counts from the round in which all models are on offer.
    """
    tau, a = EVERYBODY.temperature, 0.4

    def likelihood(phi: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(-tau * quadratic_losses(phi), 1).sum()

    minimisers = [torch.linalg.solve(h, b) for h, b in zip(hessians(), linear_terms(), strict=True)]
    best = sum(math.log(len(SIZES)) - tau * loss(i, w) for i, w in enumerate(minimisers))
    means = []
    for rounds in (10, 40, 90):
        sim = simulation(dataclasses.replace(EVERYBODY, optimizer=SGD(a / rounds**0.5)), steps=1)
        sim.train(1, LOOP)
        first, squares = likelihood(models(sim)), []
        for number in range(2, rounds + 2):
            squares.append((torch.func.grad(likelihood)(models(sim)) ** 2).sum())
            sim.train(number, LOOP)
        means.append(float(torch.stack(squares).mean()))
        assert means[-1] < 2 * tau * (best - first) / a / rounds**0.5
        gained = likelihood(models(sim)) - first
        assert means[-1] < 2 * tau * gained / a / rounds**0.5, "every round gains what its gradient promises"
    assert means[2] < means[1] < means[0], means


def test_the_prior_moves_less_with_more_rounds_theorem_3_1():
    """(1/T) sum_t Delta_Pi, the likelihood gained by moving the prior (eq. 4), is O(T^(-3/4)) and never negative."""

    def mean_gain(rounds: int) -> float:
        sim = simulation(dataclasses.replace(LETTER, optimizer=SGD(0.02 / rounds**0.5)), steps=1)
        sim.train(1, LOOP)
        prior, total = torch.full((3, 3), 1 / 3, dtype=torch.float64), 0.0
        for number in range(2, rounds + 2):
            evidence = -COUNT[:, None] * quadratic_losses(models(sim))
            sim.train(number, LOOP)
            moved = collaboration(sim).double()
            gain = torch.logsumexp(moved.log() + evidence, 1) - torch.logsumexp(prior.log() + evidence, 1)
            assert (gain > -1e-5).all()
            prior, total = moved, total + float(gain.sum())
        return total / rounds

    means = [mean_gain(rounds) for rounds in (5, 20, 80)]
    assert means[1] < 4**-0.75 * means[0], means
    assert means[2] < 4**-0.75 * means[1], means


@pytest.mark.parametrize("optimizer", [SGD(0.05, momentum=0.5), Adam(0.02)], ids=["sgd", "adam"])
def test_without_neighbours_it_is_local_training(optimizer):
    alone, none = (simulation(m, 3) for m in (Local(optimizer), FedeRiCo(optimizer, neighbours=0, local_work="epochs")))
    for number in (1, 2, 3):
        alone.train(number, STACKED)
        none.train(number, STACKED)
    torch.testing.assert_close(models(none), alone.state.clients["weight"][:, 0])
    assert torch.equal(collaboration(none), torch.eye(len(SIZES)))


def test_without_neighbours_a_gradient_a_round_is_gradient_descent():
    alone, none = (
        simulation(m, 1) for m in (Local(SGD(0.05)), FedeRiCo(SGD(0.05), neighbours=0, local_work="gradient"))
    )
    for number in (1, 2, 3):
        alone.train(number, STACKED)
        none.train(number, STACKED)
    torch.testing.assert_close(models(none), alone.state.clients["weight"][:, 0])


def test_weights_sum_to_one_and_the_unvisited_have_none():
    sim = simulation(FedeRiCo(SGD(0.01), neighbours=1, epsilon=0.0, local_work="gradient"), steps=1)
    assert torch.equal(collaboration(sim), torch.eye(len(SIZES)))
    for number, visited in ((1, 1), (2, 2), (3, 3), (4, 3)):  # itself, and then one more each round
        sim.train(number, STACKED)
        weights, seen = collaboration(sim), sim.state.server.losses.visited
        torch.testing.assert_close(weights.sum(1), torch.ones(len(SIZES)))
        assert torch.equal(seen.sum(1), torch.full((len(SIZES),), visited))
        assert torch.equal(weights > 0, seen)


def test_losses_are_tracked_as_algorithm_1_says():
    old = Losses(torch.tensor([2.0, 4.0, 0.0, 0.0]), torch.tensor([1.0, 3.0, 0.0, 0.0]), torch.tensor([1, 1, 0, 0]) > 0)
    whose = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0]]) > 0  # itself, and a newcomer
    new = track_losses(old, whose, torch.tensor([5.0, 6.0]), beta=0.6)
    # Itself; not visited now, its last loss counts again; the newcomer starts level with itself; never visited.
    expected = [0.4 * 2 + 0.6 * 5, 0.4 * 4 + 0.6 * 3, 0.4 * 2 + 0.6 * 6, 0.0]
    torch.testing.assert_close(new.tracked, torch.tensor(expected))
    torch.testing.assert_close(
        track_losses(old, whose, torch.tensor([5.0, 6.0]), None).tracked, torch.tensor([7.0, 7, 8, 0])
    )
    assert new.visited.tolist() == [True, True, True, False]


def test_epsilon_greedy():
    number = 400
    keys, ids = keys_of([f"client-{i}" for i in range(number)]), torch.arange(number)
    tracked = torch.rand(number, number, generator=torch.Generator().manual_seed(0))
    losses = Losses(tracked, tracked, ids.expand(number, -1) > 1)  # the first two were never visited

    def score(epsilon, keys=keys, losses=losses):
        return epsilon_greedy(losses, epsilon, torch.Generator().manual_seed(5), ids, keys)

    greedy = score(0.0)
    assert (greedy[:, :2].min(1).values > greedy[:, 2:].max(1).values).all()
    assert torch.equal(greedy[:, 2:].argmax(1), tracked[:, 2:].argmin(1))
    assert abs(float((greedy[:, 0] > greedy[:, 1]).double().mean()) - 0.5) < 0.1  # no order among those
    explores = (score(0.3) != greedy).all(1)  # one coin a client: a whole row, or nothing of it
    assert torch.equal(explores, (score(0.3) != greedy).any(1))
    assert abs(float(explores.double().mean()) - 0.3) < 0.08
    chosen = torch.bincount(score(1.0).argmax(1) // 100, minlength=4)
    assert (chosen > 60).all(), chosen  # every quarter is chosen by about a quarter
    order = torch.randperm(number, generator=torch.Generator().manual_seed(1))
    moved = Losses(*(part[order][:, order] for part in losses))
    assert torch.equal(score(0.3, keys[order], moved), score(0.3)[order][:, order])  # by client, not by position


def test_a_model_that_nobody_uses_is_not_moved_by_adam():
    params, ids = {"w": torch.zeros(2)}, torch.arange(2)
    tiny = torch.tensor([[1.0, 1e-6], [1.0 - 1e-6, 0.0]])  # what each of two clients gives to the models of 0 and 1
    steps = Contributions(tiny, {"w": tiny[..., None] * torch.ones(2)}, {})
    moved = {}
    for method in (
        FedeRiCo(Adam(0.01), local_work="gradient"),
        FedeRiCo(Adam(0.01), local_work="gradient", idle_below=0.0),
    ):
        server = method.init_server(params, Population(2, 2))
        ups = Addressed(server.losses, torch.tensor([[0, 1], [0, 1]]), steps)
        server = method.aggregate(server, ids, ups)
        moved[method.idle_below] = server.models["w"][:, 0]
        assert server.optimizer[2].tolist() == [1.0, float(method.idle_below == 0)]
    torch.testing.assert_close(moved[0.0], torch.tensor([-0.01, -0.01]), rtol=1e-2, atol=0)  # a full step of 1e-6
    torch.testing.assert_close(moved[1e-3], torch.tensor([-0.01, 0.0]))


def test_no_other_model_weighs_more_than_the_cap():
    weight = torch.tensor([0.1, 0.7, 0.2])
    assert capped(weight, 0.3).tolist() == pytest.approx([0.5, 0.3, 0.2])
    assert torch.equal(capped(weight, 1.0), weight)


def test_predictions_are_mixed_and_the_useless_are_pruned():
    task = Task(nn.Linear(3, 2), num_classes=2)
    draw = torch.Generator().manual_seed(0)
    phi = {"weight": torch.randn(3, 2, 3, generator=draw), "bias": torch.randn(3, 2, generator=draw)}
    view = pruned_mixture(phi, -torch.tensor([0.6, 0.395, 0.005]).log(), torch.ones(3) > 0, prune_below=0.01, cap=1.0)
    share = torch.tensor([0.6, 0.395, 0.0]) / 0.995
    torch.testing.assert_close(view.weight, share)
    assert torch.equal(view.models["weight"][2], phi["weight"][0]), "what is pruned is not deployed"
    x = torch.randn(5, 3, generator=draw)
    outputs = [torch.softmax(x @ w.T + b, 1) for w, b in zip(phi["weight"], phi["bias"], strict=True)]
    expected = share[0] * outputs[0] + share[1] * outputs[1]
    torch.testing.assert_close(FedeRiCo().predict(task, view, x), expected.log())
    assert pruned_mixture(
        phi, torch.zeros(3), torch.ones(3) > 0, prune_below=0.9, cap=1.0
    ).weight.tolist() == pytest.approx([1 / 3] * 3)
    regression = Task(nn.Linear(3, 2), "regression")
    mean = sum(s * (x @ w.T + b) for s, w, b in zip(share, phi["weight"], phi["bias"], strict=True))
    torch.testing.assert_close(FedeRiCo().predict(regression, Mixture(phi, share), x), mean)


TRACKED = torch.tensor([2.0, 0.5, 1.0, 0.1, 3.0])  # on the data of client 0
VISITED = torch.tensor([True, True, True, False, True])


def known_server(method: FedeRiCo):
    """Five clients; the model of client j is the number j, and client 0 knows what the models are worth to it."""
    server = method.init_server({"w": torch.zeros(1)}, Population(5, 5))
    losses = Losses(*(each.clone() for each in server.losses))
    losses.tracked[0], losses.last[0], losses.visited[0] = TRACKED, TRACKED, VISITED
    return server._replace(models={"w": torch.arange(5.0)[:, None]}, losses=losses, heard=torch.ones(5) > 0)


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({"neighbours": 2}, [0, 1, 2]),  # not the worst, 4, nor the one never visited, 3
        ({"neighbours": 1}, [0, 1]),
        ({"neighbours": 0}, [0]),
        ({"neighbours": 1, "deployed": 2}, [0, 1, 2]),
        ({"neighbours": 3, "deployed": 0}, [0]),
        ({"neighbours": 1, "deployed": "all"}, [0, 1, 2, 4]),
        ({"neighbours": 1, "mode": "all-to-all"}, [0, 1, 2, 4]),
    ],
)
def test_a_client_deploys_its_own_model_and_the_best_of_those_visited(options, whose):
    method = FedeRiCo(prune_below=0.0, **options)
    down = method.deploy(known_server(method), torch.tensor([0]), torch.Generator())
    view = method.personalize(None, (), tree.rows(down, 0), None)
    held = view.weight > 0
    assert view.models["w"][held, 0].tolist() == whose
    torch.testing.assert_close(view.weight[held], torch.softmax(-TRACKED[whose], 0))


def test_what_is_deployed_of_the_posterior_is_reported():
    weights = torch.softmax(-TRACKED[VISITED], 0)  # of 0, 1, 2, 4
    itself = torch.arange(5) == 0
    for number, prune, expected in [
        (5, 0.0, 1.0),
        (3, 0.0, weights[:3].sum()),
        (2, 0.0, weights[:2].sum()),
        (1, 0.0, weights[0]),
        (3, 0.15, weights[1:3].sum()),  # its own share is 0.12: pruned
    ]:
        assert float(deployed_mass(TRACKED, VISITED, itself, number, prune)) == pytest.approx(float(expected))
    sim = simulation(FedeRiCo(SGD(0.01), neighbours=1, epsilon=0.0, prune_below=0.0), steps=1)
    for number in (1, 2, 3):
        outcome = sim.train(number, STACKED)
    posterior = collaboration(sim)
    own = posterior.diagonal()
    torch.testing.assert_close(outcome.info["deployed_mass"], own + (posterior - torch.diag(own)).max(1).values)
    assert (outcome.info["deployed_mass"] < 0.99).all(), "three models are known, and two are deployed"


def test_only_an_owner_that_takes_steps_has_an_optimisers_state():
    params = {"w": torch.zeros(3)}
    assert FedeRiCo(Adam(0.01)).init_server(params, Population(4, 4)).optimizer == ()
    kept = FedeRiCo(Adam(0.01), local_work="gradient").init_server(params, Population(4, 4)).optimizer
    assert tree.nbytes(kept) >= 2 * 4 * 12, "two moments for each of four models"


@pytest.mark.parametrize(("topology", "asks"), [("complete", 3), ("ring", 2), ("server", 4)])
def test_a_client_and_round_cost_2m_messages_of_a_models_size_section_3_3(topology, asks):
    """Eight clients, M = 3: three models in and three updates out; beside them numbers. A ring has two neighbours. A
    server also sends the client its own model, and hears its update."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 64, generator=draw), torch.randint(3, (20,), generator=draw)) for _ in range(8)]
    data = from_clients(clients, num_classes=3, seed=0)
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)), num_classes=3)
    size = tree.nbytes(task.init())
    place = make_peers(topology, data.names, 0)
    sim = Simulation.start(FedeRiCo(), task, data, Plan(batch_size=10), 8, 0, place=place)
    for number in (1, 2, 3):
        outcome = sim.train(number, LOOP)
    for traffic in (outcome.bytes_up, outcome.bytes_down):
        assert asks <= traffic / 8 / size < asks + 0.01
    assert tree.nbytes(sim.state.server) < 8.1 * size, "each model is with its owner, and nowhere else"


@pytest.mark.parametrize("bound", [{"reject": 1}, {"cap": 0.3}], ids=str)
def test_peers_bound_contributions_as_a_server_does(bound):
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(20, 4, generator=draw), torch.randint(3, (20,), generator=draw)) for _ in range(6)]
    data = from_clients(clients, num_classes=3, seed=0)
    torch.manual_seed(0)
    task = Task(nn.Linear(4, 3), num_classes=3)

    def models(topology, **options):
        sim = Simulation.start(
            *(FedeRiCo(SGD(0.1), neighbours=5, **options), task, data, Plan(batch_size=10), 6, 0),
            place=make_peers(topology, data.names, 0),
        )
        for number in (1, 2, 3):
            sim.train(number, LOOP)
        return [leaf.flatten(0, -2) for leaf in tree.leaves(sim.state.server.models)]

    whole, plain = models("server", **bound), models("server")
    for leaf, other, undefended in zip(whole, models("complete", **bound), plain, strict=True):
        torch.testing.assert_close(leaf, other.reshape(leaf.shape))
        assert (leaf - undefended).abs().max() > 1e-3


def groups(seed: int):
    """Eight clients of scikit-learn's digits: four of five labels, four of the other five."""
    x, y = load_digits(return_X_y=True)
    draw = np.random.default_rng(seed)
    labels = draw.permutation(10)
    clients = []
    for half in (labels[:5], labels[5:]):
        for own in np.array_split(draw.permutation(np.flatnonzero(np.isin(y, half))), 4):
            clients.append((torch.tensor(x[own] / 16, dtype=torch.float32), torch.tensor(y[own])))
    return from_clients(clients, num_classes=10, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_find_those_with_the_same_labels(seed):
    torch.manual_seed(seed)
    task = Task(nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), num_classes=10)
    sim = Simulation.start(FedeRiCo(), task, groups(seed), Plan(batch_size=64), 8, seed)
    for number in range(1, 13):
        sim.train(number, STACKED)
    group = torch.arange(8) // 4
    mass = (collaboration(sim) * (group[:, None] == group)).sum(1)
    assert mass.mean() > 0.9  # 0.5 by chance
    assert mass.min() > 0.6
    assert sim.evaluate(12, LOOP)["test"]["accuracy"].mean() > 0.6


def test_a_newcomer_begins_at_the_mean_of_those_heard_and_changes_no_model_but_its_own():
    method, ids = FedeRiCo(SGD(0.1)), torch.tensor([3])
    server = method.init_server({"w": torch.zeros(1)}, Population(4, 4))
    server = server._replace(
        models={"w": torch.tensor([[1.0], [5.0], [9.0], [0.0]])}, heard=torch.tensor([True, True, False, False])
    )
    joined = method.onboard(task(), Newcomer(server, {"w": torch.zeros(1)}), ids, None).server
    assert joined.models["w"].flatten().tolist() == [1.0, 5.0, 9.0, 3.0]
    losses = Losses(*(torch.zeros(1, 4) for _ in range(2)), torch.ones(1, 4, dtype=torch.bool))
    steps = Contributions(torch.tensor([[0.5, 0.5]]), {"w": torch.tensor([[[2.0], [2.0]]])}, {})
    ups = Addressed(losses, torch.tensor([[3, 0]]), steps)
    after = method.onboard(task(), Newcomer(joined, {"w": torch.zeros(1)}), ids, ups).server
    assert after.models["w"].flatten().tolist() == [1.0, 5.0, 9.0, 1.0]  # it contributed to client 0 in vain


def test_no_client_passes_for_many_with_several_steps_for_one_model():
    blank = torch.zeros(4)
    steps = Contributions(torch.full((3,), 0.2), {"w": torch.ones(3, 1)}, {})
    said = [
        FedeRiCo(reject=1).implausible(Addressed(Losses(blank, blank, blank == 0), torch.tensor(to), steps), 10)
        for to in ([3, 0, 1], [3, NOBODY, NOBODY], [3, 0, 0])
    ]
    assert said == [None, None, "several steps for one model"]


def test_a_model_that_overflows_elsewhere_is_worth_nothing_and_gets_no_step():
    """A hostile owner may offer a model whose loss overflows: the honest client's message stays finite."""
    method, model, batches = FedeRiCo(optimizer=SGD(0.1), neighbours=1), testing.task(), testing.batches(1)
    params = model.init()
    huge = {name: leaf * 1e30 if leaf.is_floating_point() else leaf for name, leaf in params.items()}
    models = {name: torch.stack([params[name], huge[name]]) for name in params}
    blank = torch.zeros(2)
    down = Down(Asked(torch.tensor([0, 1]), models), Losses(blank, blank, blank > 0))
    _, up, _ = method.local_update(model, (), down, batches)
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(up) if leaf.is_floating_point())
    assert float(up.parts.weight[0]) == pytest.approx(1.0)
    assert float(up.parts.weight[1]) == 0
    assert method.implausible(up, 10) is None


def test_too_few_contributions_to_leave_any_out_are_told():
    few = FedeRiCo(reject=1).cautions(testing.task(), Population(10, 10))
    assert len(few) == 1
    assert "wants contributions of 4 others" in few[0]
    assert "raise neighbours to 4 or more" in few[0]
    assert FedeRiCo(reject=1, neighbours=4).cautions(testing.task(), Population(10, 10)) == []
    assert FedeRiCo(reject=2, mode="all-to-all").cautions(testing.task(), Population(5, 5))
    assert FedeRiCo().cautions(testing.task(), Population(10, 10)) == []
