"""Nothing bad gets in: what is wrong is refused with its reason, counted, and the others' result is as without it."""

import json

import pytest
import torch
from safetensors.torch import load, save

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.method import CountedParams, Population
from coterie.core.task import Task
from coterie.deploy import guard
from coterie.deploy.federation_facts import declare, gather_facts, population
from coterie.deploy.refused import Refused
from coterie.deploy.site_data import one_client
from coterie.deploy.site_roles import RemoteServer
from coterie.deploy.wire import Envelope
from coterie.deploy.work import Workbench
from coterie.experiment.setup import prepare
from coterie.methods import FedAvg
from coterie.parts.robust import robust

from .inprocess import NAMES, Rules, data, forged, ledger, make, net
from .test_faults import RULES, check


def rewritten(envelope, name, change=lambda flat: flat, **header):
    """What a site of that name could send instead, signed with its own key."""
    told = json.loads(envelope.header)
    told.pop("body")
    flat = change(load(envelope.body))
    return forged({**told, **header}, flat if isinstance(flat, bytes) else save(flat), name)


def spoiled(key, value):
    return lambda flat: {**flat, key: torch.full_like(flat[key], value)}


def lying_table(flat):
    table = json.dumps(
        {"up/params/0.weight": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}}
    )
    return len(table).to_bytes(8, "little") + table.encode()


BAD = {
    "NaN": (lambda e: rewritten(e, "b", spoiled("up/params/0.weight", float("nan"))), "not-finite"),
    "infinite": (lambda e: rewritten(e, "b", spoiled("up/params/0.bias", float("inf"))), "not-finite"),
    "a leaf missing": (
        lambda e: rewritten(e, "b", lambda flat: {k: v for k, v in flat.items() if k != "up/params/0.bias"}),
        "bad-tree",
    ),
    "a leaf more": (lambda e: rewritten(e, "b", lambda flat: {**flat, "up/extra": torch.ones(2)}), "bad-tree"),
    "a shape": (lambda e: rewritten(e, "b", lambda flat: {**flat, "up/params/0.bias": torch.ones(1)}), "bad-tree"),
    "a type": (
        lambda e: rewritten(e, "b", lambda flat: {**flat, "up/params/0.bias": flat["up/params/0.bias"].double()}),
        "bad-tree",
    ),
    "a terabyte": (lambda e: rewritten(e, "b", lying_table), "bad-tree"),
    "ten times as large": (
        lambda e: rewritten(e, "b", lambda flat: {**flat, "up/params/0.weight": torch.ones(10**4, 5)}),
        "too-large",
    ),
    "no table": (lambda e: rewritten(e, "b", lambda flat: b"\xff" * 50), "bad-tree"),
    "a count": (lambda e: rewritten(e, "b", spoiled("up/count", 1e5)), "bad-count"),
    "no count": (lambda e: rewritten(e, "b", spoiled("up/count", -1.0)), "bad-count"),
    "a norm": (lambda e: rewritten(e, "b", spoiled("up/params/0.weight", 1e12)), "norm"),
    "another round": (lambda e: rewritten(e, "b", round=7), "wrong-round"),
    "another run": (lambda e: rewritten(e, "b", run="other"), "wrong-run"),
    "another sender": (lambda e: rewritten(e, "b", **{"from": "a"}), "wrong-sender"),
    "another receiver": (lambda e: rewritten(e, "b", to="a"), "wrong-receiver"),
    "another's key": (lambda e: rewritten(e, "stranger"), "bad-signature"),
    "a changed body": (lambda e: Envelope(e.header, e.body[:-1] + b"\x01", e.signature), "bad-signature"),
    "a changed header": (
        lambda e: Envelope(e.header.replace(b'"life":1', b'"life":2'), e.body, e.signature),
        "bad-signature",
    ),
    "no header": (lambda e: Envelope(b"{", e.body, e.signature), "bad-header"),
    "metrics": (lambda e: rewritten(e, "b", metrics={"own": {"validation": {"accuracy": "100"}}}), "bad-header"),
    "another question": (lambda e: rewritten(e, "b", request="0" * 64), "wrong-round"),
    "a complaint with a list for a code": (lambda e: rewritten(e, "b", refused=[[1, "a", ["late"]]]), "bad-header"),
    "a complaint with a list for a sender": (lambda e: rewritten(e, "b", refused=[[1, ["a"], "late"]]), "bad-header"),
    "complaints of mail that it was not sent": (lambda e: rewritten(e, "b", refused=[[1, "a", "late"]]), "bad-count"),
    "150,000 complaints": (lambda e: rewritten(e, "b", refused=[[1, "a", "late"]] * 150_000), "bad-header"),
    "a metric of 400 digits": (
        lambda e: rewritten(e, "b", metrics={"own": {"validation": {"loss": 10**400}}}),
        "bad-header",
    ),
    "a metric above its range": (
        lambda e: rewritten(e, "b", metrics={"own": {"validation": {"accuracy": 1e300}}}),
        "bad-header",
    ),
    "a metric that is NaN": (
        lambda e: rewritten(e, "b", metrics={"own": {"validation": {"loss": float("nan")}}}),
        "bad-header",
    ),
    "a list for a type": (
        lambda e: rewritten(e, "b", lambda flat: save(flat).replace(b'"F32"', b'["F"]', 1)),
        "bad-tree",
    ),
    "a late joining by a name that is no text": (
        lambda e: rewritten(e, "b", lambda flat: b"", kind="joined", **{"from": "\ud800"}),
        "bad-header",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_answer_is_refused_counted_and_without_effect(what, tmp_path):
    spoil, code = BAD[what]

    def fault(direction, name, round, envelope):
        return [spoil(envelope)] if (direction, name, round) == ("from", "b", 1) else [envelope]

    rules = Rules(sites=4, deadline=2, joining=30)
    _setup, server, _queue = make("fedavg", tmp_path, rules, fault, reference=False, rounds=1)
    book = ledger()
    said = []
    server.say = said.append
    result = server.run(book)
    assert book.sites["b"].refused == {code: 1}
    assert any(f"refused a message from b ({code})" in line for line in said)
    assert json.loads((server.out / "sites.json").read_text())["sites"]["b"]["refused"] == {code: 1}
    assert result.rounds[0]["participants"] == ["a", "c", "d"]


LIES = {  # method, its settings, what of its message, the lie, the code
    "an average's count": ("fedprox", {}, "count", 16.0, "bad-count"),
    "log n": ("fedmap", {"weighting": "samples"}, "log_weight", 2.75, "bad-count"),  # log 15 is 2.71
    "omega": ("fedmap", {"likelihood": "sum", "weighting": "omega"}, "log_weight", 0.5, "bad-count"),
    "omega's count": ("fedmap", {"weighting": "omega"}, "count", 16.0, "bad-count"),
    "all alike": ("fedmap", {"weighting": "uniform"}, "log_weight", 1.0, "bad-count"),
    "a size": ("pfedvmp", {}, "size", 16.0, "bad-count"),
    "sizes of classes": ("pfedvmp", {}, "class_size", 6.0, "bad-count"),  # each of three
    "examples of a class": ("fedproto", {}, "class_size", -1.0, "bad-count"),
    "a model nobody owns": ("federico", {}, "to", 4, "bad-count"),
    "posterior weights": ("federico", {}, "parts/weight", 0.9, "bad-count"),
    "a loss": ("federico", {}, "own/tracked", -1.0, "bad-count"),
}


@pytest.mark.parametrize("what", LIES)
def test_what_a_site_says_of_its_data_is_bounded_by_what_it_declared(what):
    method, settings, key, lie, code = LIES[what]
    setup = prepare(method, data(), model=net, rounds=1, batch_size=4, seed=3, reference=False, **settings)
    own = one_client(setup.federation, "a")
    facts = gather_facts(setup.config, {name: declare(one_client(setup.federation, name)) for name in NAMES})
    workbench = Workbench.build(setup.config, setup.method, net, facts, own)
    server = setup.method.init_server(workbench.task.init(), population(facts, workbench.task, torch.arange(4)))
    down = tree.rows(setup.method.dispatch(server, torch.tensor([0]), torch.Generator()), 0)
    up = workbench.train(1, workbench.initial(), RemoteServer(down))[1]
    guard.check_message(setup.method, up, declare(own).train, 1e6)
    guard.check_combines(setup.method, server, 0, up)
    false = tree.unpack({**tree.pack(up), key: torch.full_like(tree.pack(up)[key], lie)}, up)
    with pytest.raises(Refused) as caught:
        guard.check_message(setup.method, false, declare(own).train, 1e6)
    assert caught.value.code == code


def test_a_lie_about_log_n_changes_nothing_for_the_others(tmp_path):
    lie = lambda e: rewritten(e, "b", spoiled("up/log_weight", 5.0))  # noqa: E731
    fault = lambda d, name, round, e: [lie(e)] if (d, name, round) == ("from", "b", 2) else [e]  # noqa: E731
    setup, server, queue = make("fedmap", tmp_path, RULES, fault, reference=False, weighting="samples")
    book = ledger()
    server.run(book)
    assert book.sites["b"].refused == {"bad-count": 1}
    check(setup, server, queue, book, absent={2: {"b"}})


def test_what_the_method_cannot_combine_stops_nobody(tmp_path, monkeypatch):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    original = type(setup.method).aggregate

    def aggregate(self, state, ids, ups):
        if bool((ups.count == 6).any()) and fails:  # b's
            raise RuntimeError("not positive definite")
        return original(self, state, ids, ups)

    fails = [True]
    monkeypatch.setattr(type(setup.method), "aggregate", aggregate)
    book = ledger()
    server.run(book)
    fails.clear()
    assert book.sites["b"].refused == {"unusable": 3}
    check(setup, server, queue, book, absent={1: {"b"}, 2: {"b"}, 3: {"b"}})


def test_what_cannot_be_combined_with_the_others_stops_nobody(tmp_path, monkeypatch):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    original = type(setup.method).aggregate

    def aggregate(self, state, ids, ups):
        if failing and len(ids) > 1 and 1 in ids.tolist():
            raise RuntimeError("singular together, though not alone")
        return original(self, state, ids, ups)

    failing = [True]
    monkeypatch.setattr(type(setup.method), "aggregate", aggregate)
    book = ledger()
    result = server.run(book)
    failing.clear()
    assert book.sites["b"].refused == {"unusable": 3}
    assert [row["participants"] for row in result.rounds] == [["a", "c", "d"]] * 3
    check(setup, server, queue, book, absent={1: {"b"}, 2: {"b"}, 3: {"b"}})


@pytest.mark.parametrize("rule", ["krum:1", "nnm:2+median"])
def test_with_too_few_for_a_robust_rule_the_server_says_so_and_takes_nobodys_word(rule):
    method, task = robust(FedAvg(), rule), Task(torch.nn.Linear(1, 1), "regression")
    server = method.init_server(task.init(), Population(5, 5, task))

    def combine(ids):
        ups = [CountedParams({name: leaf + i for name, leaf in task.init().items()}, torch.tensor(1.0)) for i in ids]
        return method.aggregate(server, torch.tensor(ids), tree.stack(ups))

    assert guard.combine_usable([0, 1, 2, 3, 4], combine)[0] == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="needs 5 clients in a round, and 4 were heard"):
        guard.combine_usable([0, 1, 2, 3], combine)


def test_the_others_result_is_as_without_a_bad_answer(tmp_path):
    fault = lambda d, name, round, e: [BAD["NaN"][0](e)] if (d, name, round) == ("from", "b", 2) else [e]  # noqa: E731
    setup, server, queue = make("fedavg", tmp_path, RULES, fault, reference=False)
    book = ledger()
    server.run(book)
    check(setup, server, queue, book, absent={2: {"b"}})


def test_an_old_answer_again_is_refused(tmp_path):
    setup, server, queue = make("fedavg", tmp_path, RULES, reference=False)

    def fault(direction, name, round, envelope):
        old = [e for d, who, number, e in queue.seen if (d, who, number) == ("from", "b", 1)]
        return [old[0], envelope] if (direction, name, round) == ("from", "b", 2) else [envelope]

    queue.fault = fault
    book = ledger()
    server.run(book)
    assert book.sites["b"].refused == {"late": 1}
    check(setup, server, queue, book)


@pytest.fixture
def posted(tmp_path):
    """(a site that has done two rounds, the messages it got, by round)."""
    _, server, queue = make("fedavg", tmp_path, RULES, reference=False, rounds=2)
    server.run(ledger())
    return queue.sites["b"], {each[2]: each[3] for each in queue.seen if each[:2] == ("to", "b")}


def code_of(answer):
    return json.loads(answer.header).get("code")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda e: rewritten(e, "stranger", lambda flat: b""), "bad-signature"),
        (lambda e: rewritten(e, "server", lambda flat: b"", **{"from": "a"}), "wrong-sender"),
        (lambda e: rewritten(e, "server", lambda flat: b"", to="a"), "wrong-receiver"),
        (lambda e: rewritten(e, "server", lambda flat: b"", round=1), "replay"),
        (lambda e: rewritten(e, "server", lambda flat: b"", round=9, kind="gossip"), "bad-header"),
        (lambda e: rewritten(e, "server", lambda flat: b"x" * 90, round=9), "bad-tree"),
        (lambda e: rewritten(e, "server", round=9, facts={"size": 4}), "bad-header"),
        (lambda e: Envelope(e.header, e.body + b"x", e.signature), "bad-signature"),
    ],
)
def test_a_site_refuses_too(posted, spoil, code):
    site, letters = posted
    assert code_of(site.answer(spoil(letters[2]))) == code


def test_a_site_does_not_go_back_to_an_old_message(posted):
    site, letters = posted
    assert code_of(site.answer(letters[1])) == "replay"


def test_what_went_wrong_at_a_site_stays_there(tmp_path, monkeypatch):
    def fails(self, *_):
        raise RuntimeError("row of patient Miller")

    monkeypatch.setattr(Workbench, "train", fails)
    rules = Rules(sites=4, deadline=1, patience=1)
    _, server, queue = make("fedavg", tmp_path, rules, reference=False)
    from coterie.core.errors import CoterieError

    with pytest.raises(CoterieError, match="0 of 4 sites answered"):
        server.run(ledger())
    assert not any(b"Miller" in part for _, _, _, envelope in queue.seen for part in envelope)
    assert all(code_of(each[3]) == "failed" for each in queue.seen if each[0] == "from" and each[2] == 1)
    assert "row of patient Miller" in (tmp_path / "a" / "site.log").read_text()


def test_a_header_needs_all_its_parts():
    with pytest.raises(Refused, match="values are wrong"):
        guard.read_at_server(Envelope(b'{"v": 2, "kind": "finished"}', b"", b""))
    header = {"v": 2, "run": "r", "life": 1, "round": 1, "from": "a", "to": "server", "kind": "finished"}
    guard.read_at_server(forged(header, b"", "a"))
    with pytest.raises(Refused, match="round"):
        guard.read_at_server(forged({**header, "round": True}, b"", "a"))
