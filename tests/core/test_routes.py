from typing import NamedTuple

import torch

from coterie.core import routes, tree
from coterie.core.routes import NOBODY, Addressed, Asked

IDS = torch.tensor([0, 2])  # the senders
UPS = Addressed(
    {"mine": torch.tensor([1.0, 2.0])},
    torch.tensor([[0, 1, 2], [2, 1, NOBODY]]),
    {"w": torch.tensor([[[10.0, 10], [11, 11], [12, 12]], [[22, 22], [21, 21], [99, 99]]])},
)


class Down(NamedTuple):
    models: Asked
    note: torch.Tensor


def test_a_peer_hears_its_own_part_of_every_message_and_that_all_took_part():
    heard = routes.heard_by(1, IDS, UPS)
    assert heard.own["mine"].tolist() == [0, 0]
    assert heard.to.tolist() == [[1], [1]]
    assert heard.parts["w"].tolist() == [[[11, 11]], [[21, 21]]]
    heard = routes.heard_by(0, IDS, UPS)
    assert heard.own["mine"].tolist() == [1, 0], "nobody else gets what a client keeps"
    assert heard.to.tolist() == [[0], [NOBODY]]
    assert heard.parts["w"].tolist() == [[[10, 10]], [[0, 0]]]
    assert routes.heard_by(0, IDS, IDS) is IDS, "other messages are for all"


def test_letters_are_heard_as_the_engine_lets_peers_hear():
    for peer in (0, 1, 2, 3):
        whole = routes.heard_by(peer, IDS, UPS)
        for row, sender in enumerate(IDS.tolist()):
            up = tree.rows(UPS, row)
            if sender == peer:
                one = routes.own_part(up, sender)
            else:
                one = routes.from_letter(routes.letter(up, peer), peer, routes.own_part(up, sender))
            expected = tree.rows(whole, row)
            assert all(map(torch.equal, tree.leaves(one), tree.leaves(expected)))
    up = {"w": torch.ones(2)}
    assert routes.letter(up, 1) is up
    assert routes.from_letter(up, 1, up) is up


def test_what_is_asked_for_comes_from_its_owners():
    want = Asked(torch.tensor([[1, 0, NOBODY], [2, NOBODY, 0]]), {"w": torch.zeros(2, 3) - 1})
    downs = Down(want, torch.tensor([7.0, 8.0]))
    offers = {"w": torch.tensor([50.0, 51, 52])}
    filled = routes.fetch(downs, offers)
    assert filled.models.rows["w"].tolist() == [[51, 50, -1], [52, -1, 50]]
    assert torch.equal(filled.models.owners, want.owners)
    assert torch.equal(filled.note, downs.note)
    other = {"w": torch.ones(2)}
    assert routes.fetch(other, offers) is other
    # One peer, number 2; client 0 did not answer.
    got = routes.received(tree.rows(downs, slice(1, 2)), 2, {1: {"w": torch.tensor(51.0)}})
    assert got.models.owners.tolist() == [[2, NOBODY, NOBODY]]
    got = routes.received(tree.rows(downs, slice(1, 2)), 2, {0: {"w": torch.tensor(50.0)}})
    assert got.models.owners.tolist() == [[2, NOBODY, 0]]
    assert got.models.rows["w"].tolist() == [[-1, -1, 50]]


def test_bytes_are_those_sent():
    part, number = 8, 8  # two floats, one int64
    down = Down(Asked(torch.tensor([[0, 1], [2, NOBODY]]), {"w": torch.zeros(2, 2, 2)}), torch.zeros(2))
    assert routes.sent_bytes(UPS) == 2 * 4 + 6 * number + 5 * part
    assert routes.sent_bytes(down) == 4 * number + 3 * part + 2 * 4
    assert routes.sent_bytes({"w": torch.zeros(3)}) == 12
    # Among peers: 0 writes to 1 and 2, 2 to 1; 0 asks 1. News to three neighbours and to one, and a question.
    assert routes.peer_bytes(IDS, [3, 1], UPS, down) == (3 * part + 4 * number + number, part)
    assert routes.peer_bytes(IDS, [3, 1], UPS, ()) == (3 * part + 4 * number, 0)
