"""Peers who ask each other: what they ask for, and nothing else, goes where it should, and no more."""

import json

import pytest
import torch

from coterie.core import tree
from coterie.deploy.ledger import Ledger
from coterie.deploy.store import Store
from coterie.deploy.work import Workbench

from . import inprocess
from .inprocess import NAMES, ServerKilled, ledger, make, private
from .test_faults import RULES, check, killing


def wide(shape, outputs):
    return torch.nn.Sequential(torch.nn.Linear(*shape, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, outputs))


@pytest.mark.parametrize(("topology", "neighbours"), [("complete", 1), ("complete", 2), ("ring", 3)])
def test_sealed_mail_is_2m_messages_of_a_models_size(topology, neighbours, tmp_path, monkeypatch):
    monkeypatch.setattr(inprocess, "net", wide)
    settings = {"reference": False, "evaluate_every": 3, "topology": topology, "neighbours": neighbours}
    setup, server, queue = make("federico", tmp_path, RULES, **settings)
    book = ledger()
    result = server.run(book)
    size, asks = tree.nbytes(setup.task.init()), min(neighbours, 2 if topology == "ring" else 3)
    for row in result.rounds[1:]:
        assert asks <= row["bytes_up"] / 4 / size < 1.05 * asks
        assert asks <= row["bytes_down"] / 4 / size < 1.05 * asks
    # All that passed in round 2, in which models were on offer for the first time: round 1 left no mail.
    passed = {way: sum(e.nbytes for d, _, number, e in queue.seen if (d, number) == (way, 2)) for way in ("to", "from")}
    assert passed["from"] / 4 / size < 1.1 * 2 * asks, "offers and updates"
    assert passed["to"] / 4 / size < 1.1 * asks, "offers"
    passed = sum(e.nbytes for d, _, number, e in queue.seen if (d, number) == ("to", 3))
    assert passed / 4 / size < 1.1 * 2 * asks, "the updates of round 2, once, and offers"
    for name in NAMES:
        kept = private(queue, book, name)
        assert tree.nbytes((kept.copy, kept.up)) < 2.1 * size, "its own model, and its own update of it"


def test_mail_goes_to_those_asked_and_nobody_else(tmp_path):
    _, server, queue = make("federico", tmp_path, RULES, reference=False, topology="complete", neighbours=1)
    server.run(ledger())
    asks, offers, letters = {}, {}, {}
    for direction, name, number, envelope in queue.seen:
        header = json.loads(envelope.header)
        if direction == "from" and header["kind"] == "asks":
            asks[name, number] = header["asks"]
        elif direction == "from" and header["kind"] == "offers":
            offers[name, number] = sorted(to for to, _ in header["mail"])
        elif direction == "from" and "mail" in header:
            letters[name, number] = sorted(to for to, _ in header["mail"])
        elif direction == "to" and header["kind"] == "round":
            assert sorted(sender for sender, _ in header["offers"]) == asks[name, number]
    assert all(asks[name, 1] == [] for name in NAMES), "nobody has anything to offer yet"
    for (name, number), owners in asks.items():
        assert all(name in offers[owner, number] for owner in owners)
        if number in (2, 3):
            assert len(letters[name, number]) == 1
            assert set(letters[name, number]) <= set(owners), "more may be asked for, to evaluate"


@pytest.mark.parametrize("where", [(Workbench, "asks", True), (Store, "keep_copy", True), (Workbench, "train", True)])
def test_a_peer_killed_on_an_errand_goes_on_from_its_disk(where, tmp_path, monkeypatch):
    setup, server, queue = make("federico", tmp_path, RULES, reference=False, topology="ring")
    left = killing(where, 1, monkeypatch, lambda: queue)
    book = ledger()
    server.run(book)
    assert left == [0]
    check(setup, server, queue, book)


@pytest.mark.parametrize("kind", ["ask", "offer", "round"])
def test_the_server_dies_on_an_errand_and_resumes(kind, tmp_path):
    died = []

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("from", "c", 2) and not died and json.loads(envelope.header)["kind"] == kind:
            died.append(name)
            raise ServerKilled
        return [envelope]

    kinds = {"ask": "asks", "offer": "offers", "round": "answer"}
    kind = kinds[kind]
    setup, server, queue = make("federico", tmp_path, RULES, fault, reference=False, topology="complete")
    with pytest.raises(ServerKilled):
        server.run(ledger())
    book = Ledger.load(server.out)
    server.run(book)
    assert died == ["c"]
    check(setup, server, queue, book)


@pytest.mark.parametrize("kind", ["asks", "offers"])
def test_a_peer_that_is_silent_on_an_errand_is_not_asked_or_does_not_ask(kind, tmp_path):
    def lost(direction, name, round, envelope):
        gone = direction == "from" and (name, round) == ("b", 2) and json.loads(envelope.header)["kind"] == kind
        return [] if gone else [envelope]

    _, server, queue = make("federico", tmp_path, RULES, lost, reference=False, topology="complete")
    result = server.run(ledger())
    assert [len(row["participants"]) for row in result.rounds] == [4, 4, 4]
    for direction, name, number, envelope in queue.seen:
        header = json.loads(envelope.header)
        if direction == "to" and header["kind"] == "round" and number == 2:
            senders = {sender for sender, _ in header["offers"]}
            everybody = set(NAMES) - {name}
            assert senders == ((set() if name == "b" else everybody) if kind == "asks" else everybody - {"b"})


def test_an_offer_that_the_relay_changed_is_refused_and_the_round_goes_on(tmp_path, monkeypatch):
    from coterie.deploy.errands import Errands

    original = Errands.of

    def flipped(self, receiver):
        letters = original(self, receiver)
        bad = lambda each: (each.sender, receiver, self.round) == ("b", "a", 2)  # noqa: E731
        return [
            each._replace(data=each.data[:-1] + bytes([each.data[-1] ^ 1])) if bad(each) else each for each in letters
        ]

    monkeypatch.setattr(Errands, "of", flipped)
    _, server, _queue = make("federico", tmp_path, RULES, reference=False, topology="complete")
    book = ledger()
    server.run(book)
    assert book.sites["b"].refused == {"not-sealed (by a)": 1}
