"""Whole federations with secure sums, in this process: equal to plain ones, whoever is lost at whichever stage."""

import gc
import inspect
import json

import numpy as np
import pytest
import torch

from coterie.core import tree
from coterie.core.errors import ConfigError, CoterieError
from coterie.deploy import guard
from coterie.deploy.ledger import Ledger
from coterie.deploy.rounds import Rounds
from coterie.deploy.secure import at_server
from coterie.deploy.secure.agreement import Form
from coterie.deploy.secure.at_site import LETTER_BYTES
from coterie.deploy.work import Workbench
from coterie.storage.run_folder import RunFolder

from ..inprocess import NAMES, Rules, ServerKilled, forged, ledger, make, private, simulate

RULES = Rules(sites=4, deadline=20, joining=30, secure=True)
# Adam makes steps of one size of the rounding of a gradient that is 0, such as that of a bias before BatchNorm.
STEADY = {"optimizer": {"name": "sgd", "lr": 0.1}}
STAGES = ["keys", "shares", "round", "unmask"]


def state(server, sim):
    return RunFolder(server.out).load(3, type(sim.state)(sim.state.server, ()))[0].server


def check(setup, server, queue, book, absent=None):
    """Server and sites are where a plain simulation is without those who are absent, but for fixed point's rounding."""
    sim = simulate(setup, absent=absent)
    pairs = [(state(server, sim), sim.state.server)]
    for i, name in enumerate(NAMES):
        if name not in queue.gone:
            pairs.append((tree.rows(private(queue, book, name).client, 0), tree.rows(sim.state.clients, i)))
    for found, expected in pairs:
        for path, leaf in tree.pack(found).items():
            if path != "weight":  # of FedMAP's clients in the last round, which nobody knows
                torch.testing.assert_close(leaf, tree.pack(expected)[path], rtol=2e-5, atol=2e-6)
    assert not list(server.out.glob("secure-*")), "what was kept for a killed server is gone"
    assert not [path for path in queue.sites["a"].root.rglob("masks.json") if "a" not in queue.gone]


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("fedmap", STEADY),
        ("fedavg", {"server_optimizer": "fedavgm:momentum=0.5", "schedule": "cosine", "sampler": "round-robin"}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                *(("fedper", {}), ("ditto", {}), ("fedavg", {}), ("scaffold", {})),
                *(("fedmap", {"weighting": "omega", **STEADY}), ("pfedbred", {})),
                *(("pfedme", {"weighting": "uniform"}), ("fedcp", {}), ("pfedgp", {}), ("fedbn", {}), ("fedpa-ft", {})),
            ]
        ),
    ],
)
def test_a_secure_sum_is_the_plain_one(method, hyper, tmp_path):
    setup, server, queue = make(method, tmp_path, RULES, reference=False, clients_per_round=3, **hyper)
    book = ledger()
    result = server.run(book)
    assert not any(book.sites[name].refused for name in NAMES)
    assert all(len(row["participants"]) == 3 for row in result.rounds)
    check(setup, server, queue, book)


def kind_of(envelope) -> str:
    return json.loads(envelope.header)["kind"]


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        *(("shares", "from"), ("round", "to"), ("unmask", "from")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("keys", "from"), ("round", "from"), ("keys", "to")]
        ),
        *(pytest.param(stage, "to", marks=pytest.mark.slow) for stage in ("shares", "unmask")),
    ],
)
def test_a_site_lost_at_any_stage_does_not_stop_the_round(stage, way, tmp_path):
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        answers = {"keys": "key", "shares": "shared", "round": "answer", "unmask": "unmasked"}
        kind = stage if way == "to" else answers[stage]
        return [] if (direction, name, round, kind_of(envelope)) == (way, "b", 2, kind) else [envelope]

    queue.fault = fault
    book = ledger()
    result = server.run(book)
    lost = stage != "unmask"  # by then its message is in the sum
    assert [len(row["participants"]) for row in result.rounds] == [4, 3 if lost else 4, 4]
    check(setup, server, queue, book, absent={2: {"b"}} if lost else None)


@pytest.mark.slow
def test_a_site_that_is_gone_from_a_round_on_is_done_without(tmp_path):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, round, kind_of(envelope)) == ("to", "c", 2, "round"):
            queue.gone.add("c")
            return []
        return [envelope]

    queue.fault = fault
    book = ledger()
    server.run(book)
    check(setup, server, queue, book, absent={2: {"c"}, 3: {"c"}})


@pytest.mark.parametrize("stage", ["unmask", *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES[:3])])
def test_below_the_threshold_it_stops_in_words_and_goes_on_later(stage, tmp_path):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    gone = lambda name: name in "bcd" if stage == "keys" else name in "cd"  # noqa: E731

    def fault(direction, name, round, envelope):
        return [] if (direction, round, kind_of(envelope)) == ("to", 2, stage) and gone(name) else [envelope]

    queue.fault = fault
    with pytest.raises(CoterieError, match=r"round 2: \d of 4 sites answered within 3 x 20 seconds, but 3 must"):
        server.run(ledger())
    assert bool(list(server.out.glob("secure-00002*"))) == (stage == "unmask")
    queue.fault = lambda direction, name, round, envelope: [envelope]
    book = Ledger.load(server.out)
    assert book.round == 1
    result = server.run(book)
    assert [len(row["participants"]) for row in result.rounds] == [4, 4, 4]
    check(setup, server, queue, book)


@pytest.mark.parametrize("where", ["agreed", "summed", pytest.param("unmasked", marks=pytest.mark.slow)])
def test_a_server_that_dies_goes_on(where, tmp_path, monkeypatch):
    """With one site lost before, so that the sum of three is the only one that the sites help to recover."""
    setup, server, queue = make("scaffold", tmp_path, RULES, reference=False)
    queue.fault = lambda direction, name, round, envelope: (
        [] if (direction, name, round, kind_of(envelope)) == ("from", "b", 2, "answer") else [envelope]
    )
    name = {"agreed": "close", "summed": "unmask", "unmasked": "_without_masks"}[where]
    original = getattr(at_server.SecureSum, name)

    def dying(self, *args):
        if self.session.round == 2:
            raise ServerKilled
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(at_server.SecureSum, name, dying)
        with pytest.raises(ServerKilled):
            server.run(ledger())
    queue.inbox.clear()
    queue.replies.clear()
    queue.fault = lambda direction, name, round, envelope: [envelope]
    book = Ledger.load(server.out)
    trained = []
    train = Workbench.train
    monkeypatch.setattr(
        Workbench, "train", lambda self, number, *rest: trained.append(number) or train(self, number, *rest)
    )
    result = server.run(book)
    again = where == "agreed"  # nobody told shares yet: a new session, with all four sites
    assert trained.count(2) == (4 if again else 0)
    assert [len(row["participants"]) for row in result.rounds] == [4, 4 if again else 3, 4]
    check(setup, server, queue, book, absent=None if again else {2: {"b"}})
    heard = [len(row["participants"]) for row in result.rounds]
    words = server_form(queue)["masked"].nbytes
    assert [row["bytes_up"] for row in result.rounds] == [number * words + 4 * 3 * LETTER_BYTES for number in heard]


def updates(monkeypatch) -> list:
    """What sites train, as it would be sent otherwise: leaves of a few numbers and more."""
    found, train = [], Workbench.train

    def training(self, number, *rest):
        new = train(self, number, *rest)
        found.append(new[1])
        return new

    monkeypatch.setattr(Workbench, "train", training)
    return found


def needles(ups, form) -> list[bytes]:
    """The bytes of every update: as floats of two sizes, alone and weighted, and in fixed point."""
    every = []
    for up in ups:
        vector, weight = tree.pack(up), float(up.count)
        for path, leaf in vector.items():
            if leaf.numel() >= 4 and path != "params/0.bias":  # before BatchNorm, so that it stays as the server has it
                every += [leaf.numpy().tobytes(), leaf.double().numpy().tobytes()]
                every += [(leaf * weight).numpy().tobytes(), (leaf.double() * weight).numpy().tobytes()]
        words = form.encode(up, 100, 1e9)
        every += [words.tobytes(), words[:16].tobytes(), words[-17:-1].tobytes()]
    return every


def reachable(*roots) -> bytes:
    """All bytes, arrays and tensors that can be reached from these objects, one after another."""
    seen, found, left = set(), [], [*roots]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type) or inspect.ismodule(each):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.append(each.detach().contiguous().numpy().tobytes())
        elif isinstance(each, np.ndarray):
            found.append(np.ascontiguousarray(each).tobytes())
        elif isinstance(each, bytes | bytearray):
            found.append(bytes(each))
        elif inspect.isfunction(each):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        else:
            left += [each.__self__] if inspect.ismethod(each) else gc.get_referents(each)
    return b"|".join(found)


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_neither_memory_nor_folder_nor_wire_has_a_single_update(secure, tmp_path, monkeypatch):
    """... while the server combines; without secure sums, the same search finds them in memory and on the wire."""
    rules = Rules(sites=4, deadline=20, joining=30, secure=secure)
    setup, server, queue = make("fedavg", tmp_path, rules, reference=False)
    lost = []

    def fault(direction, name, round, envelope):
        if (direction, name, round, kind_of(envelope)) == ("from", "b", 2, "answer"):
            lost.append(envelope)  # it is seen, and its masks are recovered, but it is not in the sum
            return []
        return [envelope]

    queue.fault = fault
    sent, aggregate = updates(monkeypatch), Rounds._aggregate
    memory, forms = [], []

    def aggregating(self, number, ids, answers, down):
        forms.append(Form.of(setup.method, sent[0], self.facts))
        sites, queue.sites = queue.sites, {}  # as the server does not have them
        memory.append(reachable(self, ids, answers, down))
        queue.sites = sites
        return aggregate(self, number, ids, answers, down)

    monkeypatch.setattr(Rounds, "_aggregate", aggregating)
    server.run(Ledger.new("test"))
    assert len(sent) == 12
    assert len(lost) == 1
    wire = b"|".join(guard.wire._contents(each.body)[1].tobytes() for *_, each in queue.seen if each.body)
    disk = b"|".join(path.read_bytes() for path in server.out.rglob("*") if path.is_file())
    wanted = needles(sent, forms[0])
    assert not any(each in disk for each in wanted)
    for where in (wire, *memory):
        found = [each for each in wanted if each in where]
        assert (len(found) == 0) if secure else (len(found) > 8), len(found)


def test_a_sum_that_cannot_be_is_told(tmp_path):
    """What one site sends under its masks is not a message: nobody knows whose it was, but the sum says so."""
    _, server, queue = make("fedavg", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, round, kind_of(envelope)) != ("from", "d", 2, "answer"):
            return [envelope]
        header = json.loads(envelope.header)
        like = {"info": {"loss": torch.zeros(())}, "alone_info": {}, "up": server_form(queue)}
        content = guard.wire.decode(envelope.body, like)
        content["up"]["masked"][-1] += 2**55
        return [forged(header, guard.wire.encode(content), name)]

    queue.fault = fault
    with pytest.raises(CoterieError, match="the messages of a, b, c, d do not add up to one that can be") as error:
        server.run(ledger())
    assert "weights that add up to" in str(error.value)


def server_form(queue):
    """The form of a masked message, from one that was sent."""
    sent = [each for way, _, _, each in queue.seen if way == "from" and kind_of(each) == "answer" and each.body]
    size = next(
        entry.shape for path, entry in guard.wire._contents(sent[0].body)[0].entries.items() if "masked" in path
    )
    return {"masked": torch.zeros(size, dtype=torch.int64)}


@pytest.mark.slow
def test_one_wrong_share_is_done_without(tmp_path):
    """Of four sites with a threshold of three, one tells shares that are not its own."""
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        if (direction, name, kind_of(envelope)) != ("from", "a", "unmasked"):
            return [envelope]
        header = json.loads(envelope.header)
        header["seeds"] = dict.fromkeys(header["seeds"], "00" * 66)
        return [forged(header, envelope.body, name)]

    queue.fault = fault
    book = ledger()
    server.run(book)
    check(setup, server, queue, book)


def test_a_site_whose_values_are_too_large_is_left_out_in_words(tmp_path, monkeypatch):
    """What a server would refuse, and cannot see, the site refuses itself."""
    _, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    train = Workbench.train

    def training(self, number, *rest):
        private, up, *more = train(self, number, *rest)
        if self.federation.names[0] == "b" and number == 2:
            up = up._replace(params={name: leaf + 1e5 for name, leaf in up.params.items()})
        return private, up, *more

    monkeypatch.setattr(Workbench, "train", training)
    book = ledger()
    result = server.run(book)
    assert book.sites["b"].refused == {"range": 1}
    assert "a value of 1000" in (queue.sites["b"].root / "site.log").read_text()
    assert [len(row["participants"]) for row in result.rounds] == [4, 3, 4]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedamp", {}, "fedamp cannot be summed: its server does not only average"),
        ("fedavg", {"robust": "median"}, "robust averages need every single message"),
        ("fedavg", {"clients_per_round": 2}, "2 sites take part in a round, and 3 to 1000 are needed"),
        ("fedavg", {"clients_heard": 3}, "clients_heard chooses among messages"),
        ("fedavg", {"topology": "ring"}, "peers send nothing to a server"),
        ("local", {}, "local sends nothing"),
    ],
)
def test_what_cannot_be_summed_is_refused_in_words(method, settings, words, tmp_path):
    _, server, _ = make(method, tmp_path, RULES, reference=False, **settings)
    with pytest.raises(ConfigError, match=words):
        server.run(ledger())
