"""The relay holds what it cannot read."""

import json

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.core import tree
from coterie.deploy import seal
from coterie.deploy.refused import Refused
from coterie.deploy.relay import Mailbox
from coterie.deploy.seal import Route

from .inprocess import IDENTITIES, NAMES, Rules, ledger, make, private
from .test_faults import RULES


def held_by_the_server(server, queue) -> bytes:
    """All that the server ever had in its hands, and all that it wrote."""
    carried = b"".join(part for _, _, _, envelope in queue.seen for part in envelope)
    return carried + b"".join(path.read_bytes() for path in server.out.rglob("*") if path.is_file())


@pytest.mark.parametrize("sealed", [True, False])
def test_what_the_relay_holds_cannot_be_read_by_it(sealed, tmp_path):
    rules = Rules(sites=4, deadline=20, sealed=sealed)
    _setup, server, queue = make("fedavg", tmp_path, rules, reference=False, topology="ring", rounds=2)
    book = ledger()
    server.run(book)
    held = held_by_the_server(server, queue)
    assert Rules().sealed, "by default"
    for name in NAMES:
        mine = private(queue, book, name)
        for leaf in tree.leaves(mine.up.params):
            if leaf.nbytes >= 24 and leaf.count_nonzero() > leaf.numel() / 2:
                assert (leaf.numpy().tobytes()[:24] in held) is not sealed
    assert not any(b"node-" in part for _, _, _, envelope in queue.seen for part in envelope)


def test_a_client_receives_only_what_it_asked_for(tmp_path):
    _, server, queue = make("fedavg", tmp_path, RULES, reference=False, topology="star")
    server.run(ledger())
    for direction, name, _, envelope in queue.seen:
        header = json.loads(envelope.header)
        if direction == "to" and header["kind"] == "round":
            senders = {sender for _, sender, _ in header["mail"]}
            assert senders <= ({"b", "c", "d"} if name == "a" else {"a"})
            assert set(header["peers"]["near"]) == ({"b", "c", "d"} if name == "a" else {"a"})


def test_mail_that_the_relay_changed_is_refused_by_its_receiver(tmp_path, monkeypatch):
    original = Mailbox.of

    def flipped(self, receiver, since):
        letters = original(self, receiver, since)
        bad = {("b", "a", 2)}
        return [
            each._replace(data=each.data[:-1] + bytes([each.data[-1] ^ 1]))
            if (each.sender, receiver, each.round) in bad
            else each
            for each in letters
        ]

    monkeypatch.setattr(Mailbox, "of", flipped)
    _, server, _queue = make("fedavg", tmp_path, RULES, reference=False, topology="complete")
    book = ledger()
    server.run(book)
    assert book.sites["b"].refused == {"not-sealed (by a)": 1}


def test_a_bad_message_of_a_peer_is_refused_by_its_neighbours_and_the_rest_goes_on(tmp_path, monkeypatch):
    from coterie.deploy.work import Workbench

    original = Workbench.train

    def train(self, number, *rest):
        new, up, *more = original(self, number, *rest)
        if number == 2 and self.federation.names == ("b",):
            up = up._replace(count=torch.tensor(1e6))
        return new, up, *more

    monkeypatch.setattr(Workbench, "train", train)
    _setup, server, _queue = make("fedavg", tmp_path, RULES, reference=False, topology="ring")
    book = ledger()
    server.run(book)
    assert book.sites["b"].refused == {"bad-count (by a)": 1, "bad-count (by c)": 1}


def test_only_the_receiver_of_a_letter_can_open_it_and_only_as_what_it_is():
    one, two, three = (X25519PrivateKey.generate() for _ in range(3))
    public = [each.public_key().public_bytes_raw().hex() for each in (one, two, three)]
    route = Route("run", 3, "a", "b")
    letter = seal.seal(b"weights", one, public[1], route)
    assert seal.unseal(letter, two, public[0], route) == b"weights"
    for key, other, way in [
        (three, public[0], route),
        (two, public[2], route),
        (two, public[0], Route("run", 4, "a", "b")),
        (two, public[0], Route("run", 3, "b", "a")),
        (two, public[0], Route("other", 3, "a", "b")),
    ]:
        with pytest.raises(Refused):
            seal.unseal(letter, key, other, way)
    assert letter != seal.seal(b"weights", one, public[1], route)


def test_exchange_keys_belong_to_the_sites_own_key():
    secret = X25519PrivateKey.generate()
    card = seal.make_card("a", secret, IDENTITIES["a"])
    seal.check_card("a", card, {"a": IDENTITIES["a"].public}, {})
    with pytest.raises(Refused):
        seal.check_card("a", card, {"a": IDENTITIES["b"].public}, {})
    with pytest.raises(Refused):
        seal.check_card("a", card, {}, {"a": card.model_copy(update={"key": IDENTITIES["b"].public})})
    with pytest.raises(Refused):
        seal.check_card("b", card, {}, {})
    other = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    with pytest.raises(Refused):
        seal.check_card("a", card.model_copy(update={"exchange": other}), {}, {})


def test_an_exchange_key_with_which_nothing_can_be_agreed_is_no_key():
    card = seal.make_card("a", X25519PrivateKey.generate(), IDENTITIES["a"]).model_dump()
    with pytest.raises(ValueError, match="exchange"):
        seal.Card(**card | {"exchange": "00" * 32})
