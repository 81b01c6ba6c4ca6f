import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.core.optimizers import SGD
from coterie.core.training import train
from coterie.methods import PFedBayes
from coterie.methods.pfedbayes import Gaussian, _draw, divergence

from .quadratic import LOOP, SHARE, SIZES, hessians, linear_terms, simulation, task


def gaussian(seed: int) -> Gaussian:
    draw = torch.Generator().manual_seed(seed)
    return Gaussian(*({"a": torch.randn(3, 2, generator=draw), "b": torch.randn(4, generator=draw)} for _ in range(2)))


def test_divergence_against_torch():
    q, w = gaussian(0), gaussian(1)
    expected = sum(
        kl_divergence(*(Normal(g.mu[name], torch.log1p(g.rho[name].exp())) for g in (q, w))).sum() for name in q.mu
    )
    torch.testing.assert_close(divergence(q, w), expected)
    assert float(divergence(q, q)) == pytest.approx(0, abs=1e-6)


def test_draws_have_the_mean_and_the_spread():
    rho = math.log(math.expm1(0.5))
    q = Gaussian({"a": torch.full((100_000,), 2.0)}, {"a": torch.full((100_000,), rho)})
    drawn, other = (_draw(q, torch.tensor(key))["a"] for key in (3, 4))
    assert float(drawn.mean()) == pytest.approx(2.0, abs=0.01)  # six standard errors
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.01)
    assert abs(float(torch.corrcoef(torch.stack([drawn, other]))[0, 1])) < 0.02
    assert torch.equal(drawn, _draw(q, torch.tensor(3))["a"])


def test_without_noise_and_with_fixed_variances_it_is_proximal():
    """One step of each of q and w_i: the pull on mu is zeta / (n sigma^2), and w_i goes towards the new mu."""
    lr, zeta, sigma, prior_lr = 0.1, 2.0, 0.3, 0.02
    method = PFedBayes(SGD(lr), zeta=zeta, sigma=sigma, prior_lr=prior_lr, noise=False, learn_variance=False)
    sim = simulation(method, steps=2)
    x0 = task().init()["weight"].flatten()
    sim.train(1, LOOP)
    expected = 0
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        mu = prior = x0
        for _ in range(2):
            mu = mu - lr * (h @ mu - b + zeta / (SIZES[k] * sigma**2) * (mu - prior))
            prior = prior - prior_lr * (prior - mu) / sigma**2
        torch.testing.assert_close(sim.state.clients.q.mu["weight"][k].flatten(), mu, rtol=1e-5, atol=1e-6)
        expected = expected + SHARE[k] * prior
    torch.testing.assert_close(sim.state.server.mu["weight"].flatten(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(sim.views(1, LOOP)["weight"], sim.state.clients.q.mu["weight"])


def test_without_noise_pull_and_variances_it_is_training():
    """Statistics of normalisation layers follow the client's own batches, and are averaged."""
    model, batches = testing.task(), testing.batches(1)
    method = PFedBayes(SGD(0.1), zeta=0.0, sigma=0.1, noise=False, learn_variance=False, prior_lr=0.0)
    down = method.init_server(model.init(), Population(4, 4, model))
    client, up, _ = method.local_update(model, method.init_client(model.init()), down, batches)
    trained, _ = train(model, SGD(0.1), model.init(), batches)
    testing.same(client.q.mu, trained, "the posterior's mean is not the trained model", tolerance=1e-6)
    assert not torch.equal(trained["1.running_mean"], model.init()["1.running_mean"])
    torch.testing.assert_close(up.mu["1.running_mean"], trained["1.running_mean"])


@pytest.mark.parametrize("noise", [True, False])
def test_a_step_is_down_the_gradient_at_the_weights_that_were_drawn(noise):
    model, batches, lr = testing.task(norm=False), testing.batches(1).first_steps(1), 0.1
    method = PFedBayes(SGD(lr), zeta=0.0, sigma=0.3, noise=noise, learn_variance=False)
    down = method.init_server(model.init(), Population(4, 4, model))
    client, _, _ = method.local_update(model, method.init_client(model.init()), down, batches)
    where = _draw(down, batches.key[0, 0]) if noise else down.mu
    x, y = (part[batches.index[0, 0]][batches.mask[0, 0] > 0] for part in (batches.x, batches.y))
    slope = torch.func.grad(lambda theta: torch.nn.functional.cross_entropy(model.logits(theta, x), y))(where)
    for name, value in model.init().items():
        torch.testing.assert_close(client.q.mu[name], value - lr * slope[name], rtol=1e-5, atol=1e-6)


def test_a_pull_stronger_than_a_step_can_follow_just_reaches_the_prior():
    """zeta / (n sigma^2) times lr is above 2 here, so that the plain step would diverge."""
    lr, sigma = 0.1, 1e-3
    method = PFedBayes(SGD(lr), zeta=1.0, sigma=sigma, noise=False, learn_variance=False)
    assert lr / (max(SIZES) * sigma**2) > 2
    sim = simulation(method, steps=2)
    x0 = task().init()["weight"].flatten()
    sim.train(1, LOOP)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        mu = prior = x0
        for _ in range(2):
            mu = mu - lr * (h @ mu - b) - (mu - prior)  # the whole way to the prior's mean
            prior = prior - (prior - mu) / 10  # auto: a tenth of the way
        torch.testing.assert_close(sim.state.clients.q.mu["weight"][k].flatten(), mu, rtol=1e-5, atol=1e-6)


def test_relaxation_of_the_server():
    whole, half = (testing.simulate(PFedBayes(SGD(0.05), sigma=0.1, beta=beta), rounds=1) for beta in (1.0, 0.5))
    first = testing.task().init()
    for name in sorted(testing.task().trainable):
        middle = (whole.state.server.mu[name] + first[name]) / 2
        torch.testing.assert_close(half.state.server.mu[name], middle, rtol=1e-5, atol=1e-6)
        spread = (whole.state.server.rho[name] + math.log(math.expm1(0.1))) / 2
        torch.testing.assert_close(half.state.server.rho[name], spread, rtol=1e-5, atol=1e-6)


def test_predicting_with_draws_is_the_mean_of_their_probabilities():
    method, x = PFedBayes(SGD(0.05), draws=3), testing.federation().x[:4]
    sim = testing.simulate(method, rounds=1)
    view = tree.rows(sim.views(1, LOOP), 0)
    models = [tree.rows(view.models, k) for k in range(3)]
    expected = sum(testing.task().logits(model, x).softmax(1) for model in models) / 3
    torch.testing.assert_close(method.predict(testing.task(), view, x).exp(), expected)
    assert not torch.equal(models[0]["0.weight"], models[1]["0.weight"])


def test_the_posterior_goes_on_from_round_to_round():
    """Two rounds of one proximal step: the second begins at the client's own mu, not at the server's."""
    lr, sigma = 0.1, 0.3
    method = PFedBayes(SGD(lr), zeta=2.0, sigma=sigma, prior_lr=0.02, noise=False, learn_variance=False)
    sim = simulation(method, steps=1)
    sim.train(1, LOOP)
    before, w = sim.state.clients.q.mu["weight"], sim.state.server.mu["weight"].flatten()
    sim.train(2, LOOP)
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        mu = before[k].flatten()
        mu = mu - lr * (h @ mu - b + 2.0 / (SIZES[k] * sigma**2) * (mu - w))
        torch.testing.assert_close(sim.state.clients.q.mu["weight"][k].flatten(), mu, rtol=1e-5, atol=1e-6)


def test_the_automatic_pull_is_that_of_a_tenth_of_a_round_whatever_sigma_is():
    lr, steps = 0.1, 3
    for sigma in (0.3, 0.01):
        sim = simulation(PFedBayes(SGD(lr), sigma=sigma, noise=False, learn_variance=False), steps)
        x0 = task().init()["weight"].flatten()
        sim.train(1, LOOP)
        for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
            mu = prior = x0
            for _ in range(steps):
                mu = mu - lr * (h @ mu - b + 0.1 / (lr * steps) * (mu - prior))
                prior = prior - (prior - mu) / 10
            torch.testing.assert_close(sim.state.clients.q.mu["weight"][k].flatten(), mu, rtol=1e-5, atol=1e-6)


def test_the_automatic_spread_is_a_tenth_of_each_tensors_weights():
    params = {"a": torch.tensor([[3.0, -4.0]]), "zero": torch.zeros(3), "count": torch.tensor(7)}
    q = PFedBayes().init_server(params, Population(2, 2))
    found = {name: torch.nn.functional.softplus(rho) for name, rho in q.rho.items()}
    rms = {"a": 12.5, "zero": 6.25}  # the mean of both where a tensor is 0
    for name, square in rms.items():
        torch.testing.assert_close(found[name], torch.full(params[name].shape, square**0.5 / 10))
    assert all(rho.dtype == torch.float32 for rho in q.rho.values())


def test_the_mean_of_the_localised_global_model_goes_no_further_than_the_posteriors():
    """prior_lr is far above sigma^2 here: w_i is q_i after every step, and so the pull is 0."""
    lr = 0.1
    sim = simulation(PFedBayes(SGD(lr), sigma=0.01, prior_lr=2.0, noise=False, learn_variance=False), steps=3)
    x0 = task().init()["weight"].flatten()
    sim.train(1, LOOP)
    expected = 0
    for k, (h, b) in enumerate(zip(hessians(), linear_terms(), strict=True)):
        mu = x0
        for _ in range(3):
            mu = mu - lr * (h @ mu - b)
        expected = expected + SHARE[k] * mu
    torch.testing.assert_close(sim.state.server.mu["weight"].flatten(), expected, rtol=1e-5, atol=1e-6)
