import dataclasses

import pytest
import torch

from coterie import testing
from coterie.core import tree
from coterie.core.method import Population
from coterie.methods import FedAMP, HeurFedAMP
from coterie.parts import neighbours
from coterie.parts.neighbours import NearestClients
from coterie.storage.paged_rows import Paged, Store

METHODS = (FedAMP(), HeurFedAMP())
BOTH = pytest.mark.parametrize("method", METHODS, ids=("fedamp", "heurfedamp"))


def models(size, seed=0):
    """Two kinds of models, by turns."""
    draw = torch.Generator().manual_seed(seed)
    kind = torch.arange(size)[:, None, None] % 2 * 2.0 - 1
    return {
        "weight": kind + 0.3 * torch.randn(size, 4, 3, generator=draw),
        "bias": 1 + torch.randn(size, 4, generator=draw),
    }


def with_few(method, k):
    return dataclasses.replace(method, neighbours=k)


def server_of(method, rounds, size, store=None):
    """After rounds [(ids, uploads)]."""
    start = tree.map(torch.zeros_like, tree.rows(rounds[0][1], 0))
    server = method.init_server(start, Population(size, len(rounds[0][0]), store=store))
    for ids, ups in rounds:
        server = method.aggregate(server, torch.tensor(ids), ups)
    return server


def dispatched(method, server, ids):
    down = method.dispatch(server, torch.tensor(ids), torch.Generator())
    return down.u if isinstance(method, FedAMP) else down


@BOTH
@pytest.mark.parametrize("k", [5, 9])
def test_if_all_take_part_enough_neighbours_are_all(method, k):
    rounds = [([*range(6)], models(6, seed)) for seed in (1, 2)]
    one, few = (server_of(each, rounds, 6) for each in (method, with_few(method, k)))
    torch.testing.assert_close(method.server_info(few)["collaboration"], one.xi, rtol=1e-5, atol=1e-7)
    for ids in ([0, 1, 2, 3, 4, 5], [4]):
        ours, theirs = dispatched(with_few(method, k), few, ids), dispatched(method, one, ids)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@BOTH
def test_neighbours_are_the_most_similar_that_were_met(method):
    ups = models(8)
    pairwise = neighbours.DISTANCE.pairwise(ups) if method is METHODS[0] else -neighbours.COSINE.pairwise(ups)
    first, second = [0, 1, 2, 3, 4], [0, 5, 6, 7]
    server = server_of(with_few(method, 2), [(ids, tree.rows(ups, torch.tensor(ids))) for ids in (first, second)], 8)
    for i in range(8):
        met = {j for ids in (first, second) if i in ids for j in ids} - {i}
        nearest = sorted(met, key=lambda j, i=i: float(pairwise[i, j]))[:2]
        assert server.xi.who[i].tolist() == nearest, i
    assert bool((server.xi.xi > 0).all())
    assert bool((server.xi.xi.sum(1) < 1).all())


@BOTH
def test_last_uploads_count_and_who_else_is_asked_for_does_not(method):
    few = with_few(method, 2)
    rounds = [([*range(6)], models(6)), ([1, 3], models(2, seed=9))]
    server = server_of(few, rounds, 6)
    w = tree.put(rounds[0][1], torch.tensor([1, 3]), rounds[1][1])
    together = dispatched(few, server, [5, 0, 2])
    for row, i in enumerate([5, 0, 2]):
        alone = dispatched(few, server, [i])
        who, xi = server.xi.who[i], server.xi.xi[i].float()
        expected = (1 - xi.sum()) * w["weight"][i] + sum(x * w["weight"][j] for x, j in zip(xi, who, strict=True))
        torch.testing.assert_close(alone["weight"][0], expected)
        assert torch.equal(alone["weight"][0], together["weight"][row])


@BOTH
def test_alone_in_a_round_a_client_is_compared_with_all_that_were_heard(method):
    few = with_few(method, 3)
    ups = models(5)
    one = server_of(few, [([0, 1, 2, 3], tree.rows(ups, torch.arange(4))), ([4], tree.rows(ups, torch.tensor([4])))], 7)
    everyone = server_of(few, [([0, 1, 2, 3, 4], ups)], 7)
    assert one.xi.who[4].tolist() == everyone.xi.who[4].tolist()
    first = server_of(few, [([2], tree.rows(ups, torch.tensor([2])))], 7)
    assert first.xi.who[2].tolist() == [-1, -1, -1], "nobody was heard yet"
    assert torch.equal(dispatched(few, first, [2])["weight"][0], ups["weight"][2])


@BOTH
def test_paged_models_give_the_same_bits(method):
    rounds = [([0, 1, 2], models(3)), ([2, 3, 4], models(3, seed=5)), ([0, 4], models(2, seed=6))]
    few = with_few(method, 2)
    dense, stored = (server_of(few, rounds, 6, store) for store in (None, Store(100)))
    assert isinstance(stored.w, Paged)
    assert torch.equal(dense.xi.xi, stored.xi.xi)
    assert torch.equal(dense.xi.who, stored.xi.who)
    assert torch.equal(*(dispatched(few, each, [0, 3, 5])["weight"] for each in (dense, stored)))


def test_of_very_many_clients_no_matrix_is_told():
    assert neighbours.collaboration_info(NearestClients(torch.full((201, 2), -1), torch.zeros(201, 2))) == {}
    assert neighbours.collaboration_info(NearestClients(torch.full((3, 2), -1), torch.zeros(3, 2)))[
        "collaboration"
    ].equal(torch.eye(3))


@BOTH
@pytest.mark.parametrize("law", [1, 2, 3, 6, 7, 9])
def test_laws_hold_with_few_neighbours(method, law):
    plain = testing.plain(with_few(method, 2))
    if law == 1:  # in this context alone: those of other options are checked with all neighbours
        testing.stacking_changes_nothing(plain, tolerance=testing.ROUNDING)
    else:
        testing.LAWS[law].test(plain)
