"""A site that has joined and is hostile: it stops nobody, and what it cannot say legitimately changes nothing."""

import contextlib
import json
import random
import shutil
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.core import tree
from coterie.deploy import guard, messages, peer_mail, site_peers, site_trials, wire
from coterie.deploy.delivery import Delivery
from coterie.deploy.ledger import Ledger
from coterie.deploy.refused import Refused
from coterie.deploy.seal import Route, exchange_key_at, seal
from coterie.deploy.wire import Envelope

from .inprocess import NAMES, Queue, Rules, forged, make, private, same
from .mutations import HEADERS, HOSTILE, KINDS, mutated, mutated_body

RULES = Rules(sites=4, deadline=2, joining=30, quorum=0.5)
HONEST = NAMES[:-1]
CASES = [("fedavg", "server"), ("fedmap", "server"), ("fedavg", "ring"), ("federico", "complete")]


class Flood(Queue):
    """Site d floods the server with changed messages before each of its own, and under other addresses too."""

    def __init__(self, sites, number: int, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        super().__init__(sites)
        self.number, self.draw, self.sent, self.kinds = number, random.Random(seed), 0, kinds
        self.real: list[Envelope] = []  # messages of d, of all kinds

    def poll(self, seconds: float):
        found = []
        for address, envelope in super().poll(seconds):
            if address == self._address("d") and envelope is not None:
                self.real.append(envelope)
                for _ in range(self.number):
                    like = envelope if self.draw.random() < 0.8 else self.draw.choice(self.real)
                    moves = b'"joined"' in like.header  # to another address: then nothing would arrive there
                    other = address if moves else self.draw.choice((address,) * 8 + ("node-x",))
                    found.append((other, mutated(like, "d", self.draw, self.kinds)))
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


@contextlib.contextmanager
def accepting(monkeypatch):
    """{(kind, round): what is accepted of d in this context}."""
    accepted = {}
    original = Delivery._arrived

    def arrived(self, number, address, envelope):
        before = "d" in self.done
        original(self, number, address, envelope)
        if "d" in self.done and not before:
            header = json.loads(envelope.header)
            accepted[header["kind"], header["round"]] = envelope

    with monkeypatch.context() as patch:
        patch.setattr(Delivery, "_arrived", arrived)
        yield accepted


def flooded(method, topology, number, root, monkeypatch, seed=0):
    """(server, queue, ledger, what was accepted of d, what the server said, the result)."""
    _, server, queue = make(method, root, RULES, reference=False, topology=topology)
    queue = server.transport = Flood(queue.sites, number, seed)
    server.say = (said := []).append
    book = Ledger("test-fuzz")
    with accepting(monkeypatch) as accepted:
        result = server.run(book)
    return server, queue, book, accepted, said, result


def check_flood(method, topology, number, root, monkeypatch, seed=0):
    server, queue, book, accepted, said, result = flooded(method, topology, number, root / "flood", monkeypatch, seed)
    _, calm_server, calm = make(method, root / "calm", RULES, reference=False, topology=topology)
    calm = calm_server.transport = Again(calm.sites, accepted)
    for name in NAMES:  # so that letters that were accepted can be opened again
        (root / "calm" / name).mkdir(parents=True)
        shutil.copy(root / "flood" / name / "exchange.key", root / "calm" / name)
    calm_book = Ledger("test-fuzz")
    expected = calm_server.run(calm_book)
    for key in ("participants", "validation", "test", "info"):
        assert [row[key] for row in result.rounds] == [row[key] for row in expected.rounds], key
    assert result.selected == expected.selected
    for name in HONEST:
        ours, theirs = private(queue, book, name), private(calm, calm_book, name)
        assert same(ours, theirs), name
        assert book.sites[name].refused == calm_book.sites[name].refused, name
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
    assert check_flood(method, topology, 60, tmp_path, monkeypatch) >= 300


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("method", "topology"), CASES)
def test_a_long_flood_stops_nobody_and_changes_nothing(method, topology, seed, tmp_path, monkeypatch):
    """Three times four kinds of federations: 90,000 messages."""
    assert check_flood(method, topology, 1000, tmp_path, monkeypatch, seed + 1) >= 4000


def check_secure_flood(number, root, seed=0):
    """Bodies are not changed: under masks nobody can tell a false one, and a share that cannot be opened is d's loss.

    Masks are new in every run, and the sum of what is under them is the same to the bit.
    """
    rules, results = Rules(sites=4, deadline=2, joining=30, secure=True), []
    for name in ("flood", "calm"):
        _, server, queue = make("fedavg", root / name, rules, reference=False)
        if name == "flood":
            queue = server.transport = Flood(queue.sites, number, seed, HEADERS)
        book = Ledger("test-fuzz")
        result = server.run(book)
        assert all(row["participants"] == list(NAMES) for row in result.rounds)
        results.append(tuple(private(queue, book, each) for each in HONEST))
        if name == "flood":
            refused, sent = book.sites["d"].refused, queue.sent
            assert {json.loads(each.header)["kind"] for each in queue.real} >= {"key", "shared", "unmasked", "answer"}
    assert same(*results)
    assert sum(refused.values()) > 0.5 * sent
    assert "error" not in refused
    return sent


def test_a_flood_of_a_secure_sum_stops_nobody_and_changes_nothing(tmp_path):
    assert check_secure_flood(20, tmp_path) >= 200


@pytest.mark.slow
def test_a_long_flood_of_a_secure_sum_stops_nobody_and_changes_nothing(tmp_path):
    assert check_secure_flood(700, tmp_path, 1) >= 7000


@pytest.mark.parametrize(("average", "selected"), [("trimmed", 1), ("mean", 2)])
def test_one_site_does_not_choose_the_round(average, selected, tmp_path):
    """The others are best after round 1; d claims to be perfect after round 2, and useless after the others."""
    said = dict.fromkeys(HONEST, (0.7, 0.5, 0.5)) | {"d": (0.0, 1.0, 0.0)}

    def fault(direction, name, round, envelope):
        header = json.loads(envelope.header)
        if direction == "to" or not header.get("metrics"):
            return [envelope]
        header["metrics"]["own"]["validation"]["balanced_accuracy"] = said[name][round - 2]
        return [forged(header, envelope.body, name)]

    _, server, _ = make("fedavg", tmp_path, RULES, fault, reference=False, average=average)
    result = server.run(Ledger("test-fuzz"))
    assert result.selected == selected
    assert result.mean(split="validation") == pytest.approx(0.7 if average == "trimmed" else 0.625)


@pytest.fixture(scope="module")
def heard_by_a(tmp_path_factory):
    """{topology: (site a after a run, what the server sent it)}; of a run with secure sums, too."""
    found = {}
    for method, topology in CASES[1:]:
        root = tmp_path_factory.mktemp(topology)
        _, server, queue = make(method, root, RULES, reference=False, topology=topology)
        server.run(Ledger("test-fuzz"))
        found[topology] = queue.sites["a"], [each[3] for each in queue.seen if each[:2] == ("to", "a")]
    secure = Rules(sites=4, deadline=2, joining=30, secure=True)
    _, server, queue = make("fedavg", tmp_path_factory.mktemp("secure"), secure, reference=False)
    server.run(Ledger("test-fuzz"))
    found["secure"] = queue.sites["a"], [each[3] for each in queue.seen if each[:2] == ("to", "a")]
    return found


def check_site(heard, number: int, seed: int) -> None:
    draw = random.Random(seed)
    for site, sent in heard.values():
        codes = []
        for _ in range(number):
            real = json.loads((like := draw.choice(sent)).header)
            run = forged(
                {**real, "run": "test-other", "round": real["round"] + draw.choice((0, 3))}, like.body, "server"
            )
            answer = site.answer(mutated(draw.choice((like, run)), "server", draw))
            message = guard.read_at_server(answer)
            guard.verify(answer, message, site.identity.public)
            codes.append(message.code if isinstance(message, messages.Refusal) else message.kind)
        assert "failed" not in codes, (site.root / "site.log").read_text().rpartition("Traceback")[2][:3000]
        assert codes.count("bad-header") > number / 10


def test_a_site_outlives_a_hostile_server(heard_by_a):
    check_site(heard_by_a, 250, 0)


@pytest.mark.slow
def test_a_site_outlives_a_hostile_server_for_long(heard_by_a):
    check_site(heard_by_a, 4000, 1)


def check_mail(heard, number: int, seed: int) -> None:
    """What d writes to a, sealed as it should be: what is wrong is refused, and the rest of the mail is read."""
    draw = random.Random(seed)
    site, sent = heard["ring"]
    message = next(m for m in map(guard.read_at_site, sent) if m.kind == "round" and m.round == 3)
    envelope = next(e for e in sent if guard.read_at_site(e) == message)
    workbench = site.workbench(message.facts)
    from coterie.deploy.store import Store

    neighbourhood, _ = site_peers.neighbourhood_of(site, message, Store(site.root, message.run, "a"))
    private = site_peers.initial_of(workbench, neighbourhood)
    mail, _ = site_peers.open_mail(site, envelope, message, workbench, neighbourhood, private)
    secrets = {name: exchange_key_at(site.root.parent / name / "exchange.key") for name in "ad"}
    public = {name: each.public_key().public_bytes_raw().hex() for name, each in secrets.items()}
    real = wire.encode(peer_mail.read(neighbourhood, secrets["a"], message.run, (2, "d"), mail[2, "d"], private.up)[1])
    without = {key: data for key, data in mail.items() if key != (2, "d")}
    expected, _ = site_peers.read_mail(site, without, message, workbench, neighbourhood, 0, private)
    refusals = 0
    for _ in range(number):
        body = mutated_body(real, draw, table=draw.random() < 0.6)
        data = seal(body, secrets["d"], public["a"], Route(message.run, 2, "d", "a"))
        data = data if draw.random() < 0.9 else draw.choice((b"", data[:5], data[:-1]))
        read, refused = site_peers.read_mail(
            site, {**without, (2, "d"): data}, message, workbench, neighbourhood, 0, private
        )
        refusals += len(refused)
        if refused:
            assert [each[:2] for each in refused] == [(2, "d")]
            assert refused[0][2] != "error", refused
            assert same(read.copy, expected.copy)
        guard.check_finite(read.copy)
    assert refusals > number / 2


def test_a_peer_outlives_a_hostile_neighbour(heard_by_a):
    check_mail(heard_by_a, 300, 0)


@pytest.mark.slow
def test_a_peer_outlives_a_hostile_neighbour_for_long(heard_by_a):
    check_mail(heard_by_a, 8000, 1)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({field for kind in messages.FromSite.__subclasses__() for field in kind.model_fields})


def read_or_refused(read, data: bytes):
    try:
        return read(Envelope(data, b"", b"")), ""
    except Refused as refused:
        return None, f"{refused.code}: {refused}"


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from([*FIELDS, "from", "to"]), ANYTHING),
    st.sampled_from(
        [kind.model_fields["kind"].default for kind in (*get_args(messages.ToSite), *get_args(messages.ToServer))]
    ),
)
def test_a_header_of_anything_is_typed_or_refused(values, kind):
    data = json.dumps({"v": 2, "run": "r", "life": 1, "round": 1, "from": "a", "to": "server", **values, "kind": kind})
    for read in (guard.read_at_server, guard.read_at_site):
        message, words = read_or_refused(read, data.encode())
        assert len(words) < 300
        assert words.isprintable()
        assert message is None or read(Envelope(message.json_bytes(), b"", b"")) == message


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.randoms(use_true_random=False))
def test_a_body_of_anything_is_decoded_or_refused(noise, draw):
    like = {"w": torch.zeros(3, 2), "n": torch.tensor(1), "flags": torch.tensor([True, False])}
    real = wire.encode(like)
    for body in (noise, mutated_body(real, draw, table=True), real[: len(noise)] + noise):
        try:
            found = wire.decode(body, like)
        except Refused:
            continue
        assert [leaf.shape for leaf in tree.leaves(found)] == [leaf.shape for leaf in tree.leaves(like)]


@pytest.mark.parametrize("name", ["os:system", "tests.methods.test_named:Signs", "sgd:lr=0.1"])
def test_a_server_does_not_say_what_a_site_imports(name, tmp_path):
    """In a search, a server names a method and an optimiser: of the library's own, or the one the site has."""
    site = make("fedavg", tmp_path)[2].sites["a"]
    about = {"id": "x", "hyper": {}, "base": 0, "step": 1, "train": True, "evaluate": False}
    for trial in (
        messages.Trial(method="fedavg", optimizer={"name": name}, **about),
        messages.Trial(method="fedprox", optimizer={"name": name, "lr": 0.1}, **about),
    ):
        with pytest.raises(Refused, match=f"there is no optimizer '{name}'"):
            site_trials._workbench(site, trial, None, None)
