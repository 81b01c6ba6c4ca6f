"""Sites and servers that die, messages lost, late, doubled: the bits are those of a run without the trouble."""

import dataclasses

import pytest

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.deploy.delivery import Delivery
from coterie.deploy.ledger import Ledger
from coterie.deploy.store import Store
from coterie.deploy.work import Workbench
from coterie.storage.run_folder import RunFolder

from .inprocess import NAMES, Killed, Rules, ServerKilled, ledger, make, private, same, simulate

RULES = Rules(sites=4, deadline=20, joining=30)


def check(setup, server, queue, book, absent=None):
    """Server and sites are where a simulation is in which those in `absent` were not sampled."""
    sim = simulate(setup, absent=absent)
    if setup.config.topology == "server":
        assert same(RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))[0].server, sim.state.server)
    for i, name in enumerate(NAMES):
        if name not in queue.gone:
            mine = private(queue, book, name)
            assert same(tree.rows(mine.client, 0), tree.rows(sim.state.clients, i)), name
            if setup.config.topology != "server":
                assert same(mine.copy, tree.rows(sim.state.server, i)), name


def killing(where, times, monkeypatch, queue_of, kill=Killed):
    """Site b dies `times` times in its second round, before or after it does `where`; it starts again from its disk."""
    cls, name, after = where
    original, left = getattr(cls, name), [times]

    def dying(self, *args, **more):
        site = self.federation.names[0] if isinstance(self, Workbench) else self.path.name
        about = args[0] if isinstance(self, Workbench) or name == "save" else 2 if len(self.states()) > 1 else 1
        if site != "b" or about != 2 or not left[0]:
            return original(self, *args, **more)
        left[0] -= 1
        if after:
            original(self, *args, **more)
        queue = queue_of()
        queue.sites["b"] = dataclasses.replace(queue.sites["b"], _workbenches={})
        raise kill

    monkeypatch.setattr(cls, name, dying)
    return left


@pytest.mark.parametrize("where", [(Workbench, "train", True), (Store, "save", True), (Store, "commit", True)])
def test_a_site_killed_in_a_round_goes_on_from_its_disk(where, tmp_path, monkeypatch):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    left = killing(where, 1, monkeypatch, lambda: queue)
    book = ledger()
    server.run(book)
    assert left == [0]
    check(setup, server, queue, book)


def test_a_peer_killed_in_a_round_goes_on_from_its_disk(tmp_path, monkeypatch):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False, topology="ring")
    left = killing((Workbench, "train", True), 1, monkeypatch, lambda: queue)
    book = ledger()
    server.run(book)
    assert left == [0]
    check(setup, server, queue, book)


def test_a_repeated_message_is_answered_from_the_store(tmp_path, monkeypatch):
    trained = []
    original = Workbench.train
    monkeypatch.setattr(
        Workbench, "train", lambda self, number, *rest: trained.append(number) or original(self, number, *rest)
    )
    setup, server, queue = make("scaffold", tmp_path, RULES, lambda *_, envelope=None: [_[3], _[3]], reference=False)
    book = ledger()
    server.run(book)
    assert sorted(trained) == [1] * 4 + [2] * 4 + [3] * 4
    assert book.sites["a"].refused["replay"] > 0
    check(setup, server, queue, book)
    for name in NAMES:
        answers = {each[3] for each in queue.seen if each[:3] == ("from", name, 2)}
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("how", "method"),
    [("request lost", "scaffold"), ("answer lost", "scaffold"), ("late", "scaffold"), ("late", "fedamp")],
)
def test_a_round_closes_without_those_who_do_not_answer(how, method, tmp_path):
    def fault(direction, name, round, envelope):
        if (name, round) != ("b", 2) or direction != ("to" if how == "request lost" else "from"):
            return [envelope]
        return 20.1 if how == "late" else []

    setup, server, queue = make(method, tmp_path, RULES, fault, reference=False)
    book = ledger()
    result = server.run(book)
    assert [len(row["participants"]) for row in result.rounds] == [4, 3, 4]
    if how == "late":
        assert book.sites["b"].refused["late"] == 1
    check(setup, server, queue, book, absent={2: {"b"}})


def test_peers_go_on_without_one_that_does_not_answer(tmp_path):
    lost = lambda direction, name, round, envelope: [] if (direction, name, round) == ("from", "b", 2) else [envelope]  # noqa: E731
    setup, server, queue = make("fedavg", tmp_path, RULES, lost, reference=False, topology="ring")
    book = ledger()
    server.run(book)
    check(setup, server, queue, book, absent={2: {"b"}})


def test_one_dead_site_never_stops_a_federation(tmp_path):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if name == "c" and round == 2:
            queue.gone.add("c")
            return []
        return [envelope]

    queue.fault = fault
    book = ledger()
    server.run(book)
    assert book.sites["c"].state == "silent"
    assert queue.time < 2 * RULES.deadline, "it is waited for once"
    check(setup, server, queue, book, absent={2: {"c"}, 3: {"c"}})


def test_a_site_that_comes_back_under_another_address_is_sent_its_message(tmp_path):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    moved = []

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("to", "b", 2) and not moved:
            moved.append(queue.time)
            queue.elsewhere["b"] = "node-b-again"
            return []
        return [envelope]

    queue.fault = fault
    book = ledger()
    server.run(book)
    assert moved
    check(setup, server, queue, book)


@pytest.mark.parametrize(
    ("where", "topology"),
    [
        *(("waiting", "server"), ("before the commit", "server"), ("after the commit", "server")),
        *(("waiting", "ring"), ("before the commit", "ring")),
    ],
)
def test_a_server_that_dies_goes_on(where, topology, tmp_path, monkeypatch):
    method = "scaffold" if topology == "server" else "fedavg"
    setup, server, queue = make(method, tmp_path, RULES, reference=False, topology=topology)
    cls, name = (Delivery, "_arrived") if where == "waiting" else (Ledger, "save")
    original = getattr(cls, name)

    def dying(self, *args):
        dies = (self.ledger.round == 1 and len(self.done) == 2) if where == "waiting" else self.round == 2
        if dies and where != "after the commit":
            raise ServerKilled
        original(self, *args)
        if dies:
            raise ServerKilled

    with monkeypatch.context() as patch:
        patch.setattr(cls, name, dying)
        with pytest.raises(ServerKilled):
            server.run(ledger())
    queue.inbox.clear()
    queue.replies.clear()
    book = Ledger.load(server.out)
    assert book.round == (2 if where == "after the commit" else 1), "at most one round is lost"
    trained = []
    train = Workbench.train
    monkeypatch.setattr(
        Workbench, "train", lambda self, number, *rest: trained.append(number) or train(self, number, *rest)
    )
    result = server.run(book)
    assert [row["round"] for row in result.rounds] == [1, 2, 3]
    assert trained.count(3) == 4
    if where == "before the commit":
        assert 2 not in trained, "the sites had done that round"
    check(setup, server, queue, book)


def test_without_a_quorum_it_stops_in_words_and_goes_on_later(tmp_path):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        return [] if round == 2 and direction == "to" and name != "a" else [envelope]

    queue.fault = fault
    with pytest.raises(CoterieError, match="round 2: 1 of 4 sites answered within 3 x 20 seconds, but 2 must"):
        server.run(ledger())
    queue.fault = lambda direction, name, round, envelope: [envelope]
    book = Ledger.load(server.out)
    server.run(book)
    check(setup, server, queue, book)


def test_a_site_whose_disk_is_lost_begins_anew_and_the_others_go_on(tmp_path):
    import shutil

    _setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("to", "d", 2):
            shutil.rmtree(queue.sites["d"].root)
        return [envelope]

    queue.fault = fault
    book = ledger()
    result = server.run(book)
    assert book.sites["d"].refused == {"state-lost": 1}
    assert [len(row["participants"]) for row in result.rounds] == [4, 3, 4]


def test_a_site_that_was_gone_for_a_while_is_waited_for(tmp_path):
    """As Flower tells it: the machine dies in round 2, every message to it fails until it is there again."""
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    back, failed = [], []
    post, addresses = queue.post, queue.addresses

    def fault(direction, name, round, envelope):
        if (direction, name, round) == ("to", "b", 2) and not back:
            back.append(queue.time + 12)
            queue.gone.add("b")
            queue.replies.append(("node-b", None))
            return []
        return [envelope]

    def posting(letters):
        if "b" in queue.gone and "node-b" in letters:
            failed.append(queue.time)
            queue.replies.append(("node-b", None))
        post(letters)

    def present():
        if back and queue.time >= back[0]:
            queue.gone.discard("b")
        return addresses()

    queue.fault, queue.post, queue.addresses = fault, posting, present
    book = ledger()
    result = server.run(book)
    assert back
    assert not failed, "nothing is sent to one that is not there"
    assert all(len(row["participants"]) == 4 for row in result.rounds)
    check(setup, server, queue, book)
