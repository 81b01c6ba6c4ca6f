import pytest
import torch

from coterie import METHODS, ConfigError
from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.engine import make_peers
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedmap import FedMAP
from coterie.methods.pfedme import PFedMe
from coterie.methods.scaffold import Scaffold
from coterie.parts import robust
from coterie.parts.server_optimizers import (
    SERVER_OPTIMIZERS,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    server_optimized,
    why_not,
)
from coterie.testing import kit

X = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}
G = [torch.tensor(each, dtype=torch.float64) for each in ([0.1, -0.02, 0.0], [-0.3, 0.05, 0.2], [0.05, 0.0, -0.4])]
ADMITTED = [name for name, cls in METHODS.items() if why_not(cls()) is None]


def taken(optimizer, grads=G):
    params, state = X, optimizer.init(X)
    for g in grads:
        params, state = optimizer.update({"w": g}, state, params)
    return params["w"], state


def test_fedavgm_by_hand():
    """u1 = g1, u2 = m u1 + g2, u3 = m u2 + g3; x goes -lr of each. Without momentum, lr 1 takes the mean."""
    u1, u2 = G[0], 0.9 * G[0] + G[1]
    expected = X["w"] - 0.5 * (u1 + u2 + 0.9 * u2 + G[2])
    torch.testing.assert_close(taken(FedAvgM(0.5, 0.9))[0], expected)
    torch.testing.assert_close(taken(FedAvgM(1.0, 0.0), G[:1])[0], X["w"] - G[0])
    torch.testing.assert_close(taken(FedAvgM(0.5, 0.9))[0], taken(SGD(0.5, momentum=0.9))[0])


def test_one_step_of_each_against_the_formula():
    """v begins with tau^2 and m with 0; Delta = -g in the paper."""
    g, tau, lr = G[0], 0.1, 0.03
    v = {
        FedAdagrad(lr, 0.5, tau): tau**2 + g**2,
        FedAdam(lr, 0.5, 0.8, tau): 0.8 * tau**2 + 0.2 * g**2,
        FedYogi(lr, 0.5, 0.8, tau): tau**2 - 0.2 * g**2 * torch.sign(tau**2 - g**2),
    }
    for optimizer, squares in v.items():
        new, (_, found) = taken(optimizer, G[:1])
        torch.testing.assert_close(found["w"], squares)
        torch.testing.assert_close(new, X["w"] - lr * 0.5 * g / (squares.sqrt() + tau))


def test_yogi_comes_down_slowly():
    """After a large g, Adam's v shrinks by its own share; Yogi's only by that of the small squares."""
    large, small = torch.full((3,), 10.0).double(), torch.full((3,), 1e-3).double()
    adam, yogi = (taken(cls(0.1, 0.9, 0.99, 1e-3), [large, small])[1][1]["w"] for cls in (FedAdam, FedYogi))
    torch.testing.assert_close(adam, torch.full_like(adam, 0.99 * (0.99e-6 + 1.0) + 1e-8))
    torch.testing.assert_close(yogi, torch.full_like(yogi, 1e-6 + 1.0 - 1e-8))


def test_fedadam_is_torchs_adam_without_the_correction_of_its_start():
    """torch's step is lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps): with lr and eps rescaled, they are equal."""
    lr, b1, b2, tau = 0.03, 0.9, 0.99, 1e-3
    free = X["w"].clone().requires_grad_()
    theirs = torch.optim.Adam([free], lr=lr, betas=(b1, b2), eps=tau)
    begin = {"exp_avg": torch.zeros_like(free), "exp_avg_sq": torch.full_like(free, tau**2), "step": torch.tensor(0.0)}
    theirs.state[free] = begin
    for t, g in enumerate(G, 1):
        root = (1 - b2**t) ** 0.5
        theirs.param_groups[0].update(lr=lr * (1 - b1**t) / root, eps=tau / root)
        free.grad = g.clone()
        theirs.step()
    torch.testing.assert_close(taken(FedAdam(lr, b1, b2, tau))[0], free.detach())


def test_adagrad_is_torchs():
    """Its v begins with 0 there, but `initial_accumulator_value` can be tau^2."""
    free = X["w"].clone().requires_grad_()
    theirs = torch.optim.Adagrad([free], lr=0.03, initial_accumulator_value=1e-6, eps=1e-3)
    for g in G:
        free.grad = g.clone()
        theirs.step()
    torch.testing.assert_close(taken(FedAdagrad(0.03))[0], free.detach())


@pytest.mark.parametrize("name", ADMITTED)
def test_the_whole_step_without_momentum_is_the_method(name):
    """To rounding, and buffers (of BatchNorm) bit for bit; whatever the method's server keeps beside the model."""
    ours = kit.simulate(server_optimized(METHODS[name]().scheduled(1), FedAvgM(1.0, 0.0)), rounds=1)
    theirs = kit.simulate(METHODS[name](), rounds=1)
    kit.same(ours.state.server.server, theirs.state.server, name, 1e-5)
    flat, expected = tree.pack(ours.state.server.server), tree.pack(theirs.state.server)
    stepped = ours.state.server.stepped
    assert stepped
    assert not any("running" in path or "num_batches" in path for path in stepped)
    beside = [path for path in flat if path.split("/")[-1] not in {each.split("/")[-1] for each in stepped}]
    assert all(torch.equal(flat[path], expected[path]) for path in beside)


@pytest.mark.parametrize("name", sorted(METHODS.keys() - set(ADMITTED)))
def test_others_are_refused_in_words(name):
    with pytest.raises(ConfigError, match="does not only average what it is sent"):
        server_optimized(METHODS[name](), FedAdam())


def test_which_methods_these_are():
    assert {"fedavg", "fedprox", "fedmap", "scaffold", "fedrep", "pfedme", "gpfl", "pfedbayes"} <= set(ADMITTED)
    assert not {"local", "fedamp", "clustered-fl", "ifca", "federico", "fedproto"} & set(ADMITTED)
    assert why_not(FedMAP(prior="student-t")) is not None


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
@pytest.mark.parametrize("method", [FedAvg(SGD(0.1)), Scaffold(SGD(0.1), server_lr=0.5), PFedMe(SGD(0.05), beta=2.0)])
def test_each_steps_from_the_servers_model_towards_what_the_method_makes_of_it(name, method):
    """Two rounds: the second begins at the model and the memory that the first one left."""
    optimizer = SERVER_OPTIMIZERS[name](lr=0.3)
    sim = kit.simulate(server_optimized(method, optimizer), rounds=1, norm=False)
    before = sim.state.server
    part = method.stepped
    inner = kit.Simulation.start(method, sim.task, sim.federation, sim.plan, sim.participants, 0)
    inner.state = type(sim.state)(before.server, sim.state.clients)
    inner.train(2, kit.LOOP)
    sim.train(2, kit.LOOP)
    old, mean, new = (
        each if part is None else getattr(each, part[0])
        for each in (before.server, inner.state.server, sim.state.server.server)
    )
    prefix = "" if part is None else f"{part[0]}/"
    grads = {f"{prefix}{key}": old[key] - mean[key] for key in old}
    expected, state = optimizer.update(grads, before.state, {f"{prefix}{key}": old[key] for key in old})
    kit.same({f"{prefix}{key}": new[key] for key in new}, expected, "the model", 1e-6)
    kit.same(sim.state.server.state, state, "the memory", 1e-6)


def test_on_the_complete_graph_copies_are_the_server():
    method = server_optimized(FedAvg(SGD(0.1)), FedAdam(0.1))
    central = kit.simulate(method)
    peers = kit.simulate(method, place=make_peers("complete", kit.federation().names, 0))
    for i in range(len(kit.SIZES)):
        kit.same(tree.rows(peers.state.server, i), central.state.server, "a copy", 1e-6)


def test_robust_models_come_first():
    """The server steps towards the robust mean: with momentum 0 and lr 1, it is the robust method's."""
    made = robust.robust(FedAvg(SGD(0.1)), "median")
    ours, theirs = kit.simulate(server_optimized(made, FedAvgM(1.0, 0.0))), kit.simulate(made)
    kit.same(ours.state.server.server, theirs.state.server, "median", 1e-5)


def test_nothing_of_it_is_sent():
    plain, stepped = (kit.simulate(each, rounds=1) for each in (FedAvg(), server_optimized(FedAvg(), FedAdam())))
    for sim in (plain, stepped):
        sim.sent = sim.method.dispatch(sim.state.server, torch.tensor([0, 1]), torch.Generator())
    assert tree.pack(plain.sent).keys() == tree.pack(stepped.sent).keys()
    assert tree.nbytes(plain.sent) == tree.nbytes(stepped.sent)


def test_a_state_that_is_not_a_model_has_to_say_where_its_model_is():
    class Odd(FedAvg):
        def init_server(self, params, population):
            return (params,)

    with pytest.raises(ConfigError, match="let its `stepped` name the fields"):
        kit.simulate(server_optimized(Odd(), FedAdam()), rounds=1)
