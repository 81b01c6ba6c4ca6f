"""The same method, seed, data and participation: the simulator's loop engine and the deployment give the same bits."""

import pytest
import torch

from coterie import METHODS, tree
from coterie.deploy.store import Store
from coterie.experiment.load import load
from coterie.experiment.run import run_setup

from .inprocess import NAMES, Rules, ledger, make, net, simulate


def same(one, other) -> bool:
    one, other = tree.pack(one), tree.pack(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def private(server, book, name, like):
    return Store(server.out.parent / name, book.run, name).load(10**6, like)[1]


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_are_the_simulators_bits(method, tmp_path):
    setup, server, queue = make(method, tmp_path, clients_per_round=3, reference=False)
    book = ledger()
    result = server.run(book)
    sim = simulate(setup)
    state, _ = server_state(server, sim)
    assert same(state.server, sim.state.server)
    for i, name in enumerate(NAMES):
        site = queue.sites[name]
        bench = next(iter(site._benches.values()))
        kept = private(server, book, name, bench.initial())
        assert same(tree.rows(kept.client, 0), tree.rows(sim.state.clients, i)), name
    whole = run_setup(setup, None)
    assert result.selected == whole.selected
    for ours, theirs in zip(result.rounds, whole.rounds, strict=True):
        for part in ("validation", "test"):
            assert ours[part] == theirs[part]
        assert ours["info"] == theirs["info"]
        assert ours["participants"] == theirs["participants"]
        assert (ours["bytes_up"], ours["bytes_down"]) == (theirs["bytes_up"], theirs["bytes_down"])
    for name in NAMES:
        folder = tmp_path / name / book.run / name / "result"
        x = setup.federation.x[:3]
        assert torch.equal(load(folder, name, model=net)(x), whole.model(name)(x))


def server_state(server, sim):
    from coterie.experiment.folder import RunFolder

    return RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))
