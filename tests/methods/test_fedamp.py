import dataclasses
import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from coterie import CoterieWarning
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data import Federation, from_clients
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAMP, HeurFedAMP

from .quadratic import DIM, LOOP, STACKED, hessians, linear_terms, simulation

EYE = torch.eye(DIM, dtype=torch.float64)
FUNCTIONS = ("negative-exponential", "scad", "minimax-concave")
BOTH = (FedAMP(), HeurFedAMP())


def a_of(name: str, t: torch.Tensor, sigma: float, a: float) -> torch.Tensor:
    """A(t), from the papers that define them: A' integrated by hand, with A'(0) = 1 / sigma."""
    s = t / sigma
    if name == "scad":
        bent = (a * s - s**2 / 2 - 0.5) / (a - 1)
        return torch.where(s < 1, s, torch.where(s < a, bent, (a + 1) / 2 + 0 * s))
    if name == "minimax-concave":
        return torch.where(s < a, s - s**2 / (2 * a), a / 2 + 0 * s)
    return 1 - torch.exp(-s)


def models(size: int = 6, scale: float = 0.5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "weight": scale * torch.randn(size, 4, 3, generator=draw, dtype=torch.float64),
        "bias": 1 + scale * torch.randn(size, 4, generator=draw, dtype=torch.float64),
    }


def flat(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf.flatten(1) for leaf in rows.values()], 1)


def after(method, uploads, ids=None, size=None):
    """The server after one round in which the clients `ids` sent `uploads`."""
    number = len(next(iter(uploads.values())))
    ids = torch.arange(number) if ids is None else torch.tensor(ids)
    server = method.init_server(tree.map(torch.zeros_like, tree.rows(uploads, 0)), Population(size or number, number))
    return method.aggregate(server, ids, uploads)


def total(name: str, w: torch.Tensor, sigma: float, a: float) -> torch.Tensor:
    """sum_{i<j} A(||w_i - w_j||^2)."""
    return a_of(name, ((w[:, None] - w[None]) ** 2).sum(2), sigma, a).triu(1).sum()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sigma", [2.5, 5.0, 40.0])
def test_cloud_models_are_a_gradient_step_on_the_attention_eq_3(name, sigma):
    """The gradient of ||w_i - w_j||^2 has a factor 2 that eq. 5 drops: U = W - (alpha / 2) grad A(W)."""
    w, alpha = models(), 0.9 * sigma / 5
    server = after(FedAMP(attention=name, sigma=sigma, alpha=alpha, shape=3.0), w)
    u = FedAMP().dispatch(server, torch.arange(6), torch.Generator())
    gradient = torch.func.grad(lambda w: total(name, w, sigma, 3.0))(flat(w))
    assert float(gradient.abs().max()) > 1e-3
    torch.testing.assert_close(flat(u), flat(w) - alpha / 2 * gradient)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fixed_points_are_stationary_for_eq_1(name):
    """With exact minimisers of eq. 6: grad F_i + (lambda / 2) grad_i A = 0 (half, by the factor that eq. 5 drops)."""
    method = FedAMP(attention=name, sigma=0.5, alpha=0.2, lam=0.3)
    quadratics = [*zip(hessians(), linear_terms(), strict=True)]
    w = {"weight": torch.zeros(3, DIM, dtype=torch.float64)}
    server = method.init_server(tree.rows(w, 0), Population(3, 3))
    for _ in range(300):
        u = method.dispatch(server, torch.arange(3), torch.Generator())["weight"]
        solved = [torch.linalg.solve(h + 1.5 * EYE, b + 1.5 * u[i]) for i, (h, b) in enumerate(quadratics)]
        w = {"weight": torch.stack(solved)}
        server = method.aggregate(server, torch.arange(3), w)
    own = torch.stack([h @ w["weight"][i] - b for i, (h, b) in enumerate(quadratics)])
    pulled = torch.func.grad(lambda w: total(name, w, 0.5, 3.7))(w["weight"])
    assert float(pulled.abs().max()) > 0.1
    torch.testing.assert_close(own, -0.15 * pulled)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_attention_functions_satisfy_definition_1(name):
    t = torch.linspace(0, 20, 400, dtype=torch.float64)
    slope = torch.func.vmap(torch.func.grad(lambda t: a_of(name, t, 2.0, 3.7)))(t)
    torch.testing.assert_close(FedAMP(attention=name)._slope(t / 2.0) / 2.0, slope)
    assert float(slope[0]) == 0.5
    assert bool((slope >= 0).all())  # nondecreasing
    assert bool((slope.diff() <= 1e-12).all())  # concave
    assert float(a_of(name, torch.zeros(()), 2.0, 3.7)) == 0


@pytest.mark.parametrize("method", [*(FedAMP(attention=name) for name in FUNCTIONS), HeurFedAMP()], ids=repr)
def test_weights_are_convex_and_equivariant(method):
    w, order = models(), torch.tensor([3, 0, 5, 1, 4, 2])
    xi = after(method, w).xi
    torch.testing.assert_close(xi.sum(1), torch.ones(6, dtype=torch.float64))
    assert bool((xi >= 0).all())
    torch.testing.assert_close(after(method, tree.rows(w, order)).xi, xi[order][:, order])
    assert isinstance(method, HeurFedAMP) or torch.equal(xi, xi.T)
    assert torch.equal(method.server_info(after(method, w))["collaboration"], xi)


@pytest.mark.parametrize("method", BOTH, ids=["fedamp", "heurfedamp"])
def test_equal_models_have_equal_weights_by_default(method):
    same = tree.map(lambda leaf: leaf[:1].expand(4, *leaf.shape[1:]), models())
    torch.testing.assert_close(after(method, same).xi, torch.full((4, 4), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("self_attention", ["auto", 0.3])
@pytest.mark.parametrize("sigma", ["auto", 7.0, 5000.0])
def test_heuristic_weights_eq_8(sigma, self_attention):
    w = models()
    xi = after(HeurFedAMP(sigma=sigma, self_attention=self_attention, contrast=3.0), w).xi
    cosine = torch.stack([torch.nn.functional.cosine_similarity(row, flat(w), dim=-1) for row in flat(w)])
    if sigma == "auto":
        above = torch.triu_indices(6, 6, 1)
        sigma = 3.0 / float((1 - cosine)[above[0], above[1]].median())
    own = 1 / 6 if self_attention == "auto" else self_attention
    for i in range(6):
        others = [j for j in range(6) if j != i]
        weight = torch.softmax(sigma * cosine[i, others], 0)
        torch.testing.assert_close(xi[i, others], (1 - own) * weight)
        assert float(xi[i, i]) == pytest.approx(own)


def test_automatic_sigma_is_the_median_squared_distance_over_the_contrast():
    w = models()
    t = torch.pdist(flat(w)) ** 2
    given = FedAMP(sigma=float(t.median()) / 3)
    torch.testing.assert_close(after(FedAMP(contrast=3.0), w).xi, after(given, w).xi)
    assert not torch.allclose(after(FedAMP(contrast=1.0), w).xi, after(given, w).xi)


def test_the_largest_step_size_that_is_allowed_is_not_lowered():
    """m = 3 and sigma = 2: alpha = 2 / 2 leaves equal models a self-weight of 0. A warning would be an error here."""
    assert not bool(after(FedAMP(sigma=2.0, alpha=1.0, lam=1.0), models(size=3)).warned)


@pytest.mark.parametrize(("alpha", "lam"), [(0.4, 1.0), ("theorem", 0.4 * math.sqrt(20))])
def test_step_size_is_kept_below_the_guard_with_one_warning(alpha, lam):
    """m = 6 and sigma = 1: alpha = 0.4 is above 1 / 5; equal models would have the self-weight 1 - 0.4 * 5 = -1."""
    asked, w = FedAMP(sigma=1.0, alpha=alpha, lam=lam), models(scale=0.05)
    with pytest.warns(CoterieWarning, match=r"self-weight .* = -1;"):
        server = after(asked, w)
    server = asked.aggregate(server, torch.arange(6), w)  # a second warning would be an error
    assert bool((server.xi >= -1e-12).all())
    torch.testing.assert_close(server.xi, after(FedAMP(sigma=1.0, alpha=0.2), w).xi)


@pytest.mark.parametrize(
    ("method", "pull"),
    [
        (FedAMP(alpha=0.05, lam=0.1, sigma=10.0), 2.0),
        (FedAMP(alpha="theorem", lam=0.3, total_rounds=9, sigma=10.0), 3.0),
        (FedAMP(lam=0.7), 0.7),
        (HeurFedAMP(pull=0.7), 0.7),
        (HeurFedAMP(pull="theorem", total_rounds=9), 3.0),
    ],
    ids=repr,
)
def test_local_minimiser_eq_6(method, pull):
    """w_i = argmin f_i(w) + (pull / 2) ||w - u_i||^2, in two rounds: u_i is the initial model, then sum_j xi_ij w_j."""
    sim = simulation(dataclasses.replace(method, optimizer=SGD(0.15)), steps=100)
    u = sim.state.server.w["weight"].flatten(1)
    for number in (1, 2):
        sim.train(number, STACKED)
        expected = [
            torch.linalg.solve(h + pull * EYE, b + pull * centre)
            for h, b, centre in zip(hessians(), linear_terms(), u, strict=True)
        ]
        torch.testing.assert_close(sim.state.clients["weight"].flatten(1), torch.stack(expected), rtol=1e-5, atol=1e-6)
        u = sim.state.server.xi @ sim.state.server.w["weight"].flatten(1)


@pytest.mark.parametrize("method", BOTH, ids=["fedamp", "heurfedamp"])
def test_absent_clients_count_with_their_last_upload_and_strangers_not_at_all(method):
    w = models()
    server = after(method, tree.rows(w, torch.arange(3)), ids=[0, 2, 3], size=5)
    assert bool((server.xi[:, [1, 4]].fill_diagonal_(0) == 0)[[0, 2, 3]].all())
    torch.testing.assert_close(server.xi[[0, 2, 3]][:, [0, 2, 3]], after(method, tree.rows(w, torch.arange(3))).xi)
    # Client 2 speaks again, as client 4 does for the first time; 0 and 3 are remembered.
    server = method.aggregate(server, torch.tensor([2, 4]), tree.rows(w, torch.tensor([3, 4])))
    known = [0, 2, 3, 4]
    expected = after(method, tree.rows(w, torch.tensor([0, 3, 2, 4]))).xi
    torch.testing.assert_close(server.xi[known][:, known], expected)


@pytest.mark.parametrize("method", BOTH, ids=["fedamp", "heurfedamp"])
def test_only_trained_parameters_are_sent_and_each_client_keeps_its_statistics(method):
    federation, _ = grouped(seed=0, groups=2)
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    net[3].bias.requires_grad_(False)
    task = Task(net, num_classes=10)
    sim = Simulation.start(method, task, federation, Plan(batch_size=10, epochs=1), 8, seed=0)
    sim.train(1, LOOP)
    sim.train(2, LOOP)
    assert sim.state.server.w.keys() == task.trainable
    means = sim.views(2, LOOP)["1.running_mean"]
    assert all(not torch.equal(means[0], other) for other in means[1:])


def grouped(seed: int, groups: int, clients: int = 8) -> tuple[Federation, torch.Tensor]:
    """(digits at 8 clients with 40 examples each, which of `groups` disjoint sets of labels each client has)."""
    draw = torch.Generator().manual_seed(seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    classes, data = torch.randperm(10, generator=draw), {}
    for k in range(groups):
        rows = torch.isin(labels, classes[k::groups]).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=draw)]
        for i, part in zip(range(k, clients, groups), rows.split(40), strict=False):
            data[i] = ((images[part] / 16).float(), labels[part])
    return from_clients([data[i] for i in range(clients)], num_classes=10, seed=seed), torch.arange(clients) % groups


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("method", [*(FedAMP(SGD(0.1), attention=name) for name in FUNCTIONS), HeurFedAMP(SGD(0.1))])
def test_clients_learn_from_those_with_the_same_labels(method, groups):
    """The papers' story: of the weight on others, clearly more than chance falls to the client's own group."""
    shares = []
    for seed in range(3):
        federation, group = grouped(seed, groups)
        torch.manual_seed(seed)
        task = Task(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), num_classes=10)
        sim = Simulation.start(method, task, federation, Plan(batch_size=24, epochs=2), 8, seed=seed)
        for number in range(1, 11):
            sim.train(number, STACKED)
        others = sim.state.server.xi * (1 - torch.eye(8))
        shares.append(float(others[group[:, None] == group[None, :]].sum() / others.sum()))
    chance = (8 / groups - 1) / 7
    print(f"{type(method).__name__} {getattr(method, 'attention', '')}: {shares}, chance {chance:.2f}")
    assert min(shares) > 1.2 * chance
