"""A site that has joined and is hostile: it stops nobody, and what it cannot say legitimately changes nothing."""

import json
import random
import time
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.core import tree
from coterie.deploy import guard, messages, peer_mail, wire
from coterie.deploy.delivery import Delivery
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import CODES, Refused
from coterie.deploy.seal import Route, seal, exchange_key_at
from coterie.deploy.wire import Envelope

from .inprocess import IDENTITIES, NAMES, Queue, Rules, forged, make, private, same
from .mutations import HOSTILE, changed, mutated, mutated_body

RULES = Rules(sites=4, deadline=2, joining=30, quorum=0.5)
HONEST = NAMES[:-1]
CASES = [("fedavg", "server"), ("fedmap", "server"), ("fedavg", "ring"), ("federico", "complete")]


class Flood(Queue):
    """Site d floods the server with changed messages before each of its own, and under other addresses too."""

    def __init__(self, sites, number: int, seed: int) -> None:
        super().__init__(sites)
        self.number, self.draw, self.sent = number, random.Random(seed), 0
        self.real: list[Envelope] = []  # messages of d, of all kinds

    def poll(self, seconds: float):
        found = []
        for address, envelope in super().poll(seconds):
            if address == self._address("d") and envelope is not None:
                self.real.append(envelope)
                for _ in range(self.number):
                    like = envelope if self.draw.random() < 0.8 else self.draw.choice(self.real)
                    other = self.draw.choice((address,) * 8 + ("node-x", "node-a"))
                    found.append((other, mutated(like, "d", self.draw)))
                    self.sent += 1
            found.append((address, envelope))
        return found


class Again(Queue):
    """Site d says what was accepted of the flood, and nothing else."""

    def __init__(self, sites, accepted: dict[tuple[str, int], Envelope]) -> None:
        super().__init__(sites, self._fault)
        self.accepted, self.asked = accepted, {}

    def _fault(self, direction, name, round, envelope):
        if name != "d":
            return [envelope]
        if direction == "to":
            self.asked[round] = guard.read_at_site(envelope)
            return [envelope]
        kind = json.loads(envelope.header)["kind"]
        said = self.accepted.get((kind, round))
        if said is None:
            return []
        header = json.loads(said.header)
        if "request" in header:
            header["request"] = self.asked[round].digest
        return [forged(header, said.body, "d")]


def flooded(method, topology, number, root, monkeypatch, seed=0):
    """(server, queue, ledger, what was accepted of d, what the server said)."""
    _, server, queue = make(method, root, RULES, reference=False, topology=topology)
    queue = server.transport = Flood(queue.sites, number, seed)
    accepted, said = {}, []
    original = Delivery._arrived

    def arrived(self, number, address, envelope):
        before = "d" in self.done
        original(self, number, address, envelope)
        if "d" in self.done and not before:
            header = json.loads(envelope.header)
            accepted[header["kind"], header["round"]] = envelope

    server.say = said.append
    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "_arrived", arrived)
        book = Ledger("test-fuzz")
        result = server.run(book)
    return server, queue, book, accepted, said, result


def check_flood(method, topology, number, root, monkeypatch, seed=0):
    server, queue, book, accepted, said, result = flooded(method, topology, number, root / "flood", monkeypatch, seed)
    _, calm_server, calm = make(method, root / "calm", RULES, reference=False, topology=topology)
    calm = calm_server.transport = Again(calm.sites, accepted)
    calm_book = Ledger("test-fuzz")
    expected = calm_server.run(calm_book)
    for key in ("participants", "validation", "test", "info"):
        assert [row[key] for row in result.rounds] == [row[key] for row in expected.rounds], key
    assert result.selected == expected.selected
    for name in HONEST:
        ours, theirs = private(queue, book, name), private(calm, calm_book, name)
        assert same(ours, theirs), name
        assert book.sites[name].refused == calm_book.sites[name].refused or method == "federico", name
        model = queue.sites[name].root / book.run / name / "result" / "clients" / name / "model.safetensors"
        assert (
            model.read_bytes()
            == (
                calm.sites[name].root / book.run / name / "result" / "clients" / name / "model.safetensors"
            ).read_bytes()
        )
    refused = book.sites["d"].refused
    assert sum(refused.values()) > 0.5 * queue.sent
    assert "error" not in refused, [line for line in said if "(error)" in line]
    assert (server.out / "sites.json").stat().st_size < 20_000
    assert len(said) < 1000
    return queue.sent


@pytest.mark.parametrize(("method", "topology"), CASES)
def test_a_flood_stops_nobody_and_changes_nothing(method, topology, tmp_path, monkeypatch):
    assert check_flood(method, topology, 110, tmp_path, monkeypatch) >= 400
