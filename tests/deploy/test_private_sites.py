"""Sites on their own machines with privacy: their noise is their own, and nothing else of theirs is sent."""

from __future__ import annotations

import json

import pytest
import torch

from coterie.core import tree
from coterie.core.privacy import Private
from coterie.deploy import guard, messages
from coterie.deploy.store import Store
from coterie.storage.run_folder import RunFolder
from coterie.storage.state import State

from . import inprocess
from .inprocess import NAMES, ledger, make


@pytest.fixture(autouse=True)
def _without_batch_norm(monkeypatch):
    def net(shape, outputs):
        return torch.nn.Sequential(torch.nn.Linear(shape[0], 6), torch.nn.ReLU(), torch.nn.Linear(6, outputs))

    monkeypatch.setattr(inprocess, "net", net)


def answers(queue):
    """The answers of sites, as the server reads them."""
    read = [guard.read_at_server(envelope) for way, *_, envelope in queue.seen if way == "from"]
    return [each for each in read if isinstance(each, messages.Answer)]


@pytest.mark.parametrize("method", ["fedavg", "fedmap"])
def test_metrics_and_losses_are_not_sent_and_every_site_keeps_account(method, tmp_path):
    _, server, queue = make(method, tmp_path, noise=1.0)
    book = ledger()
    result = server.run(book)
    assert result.selected == 3
    assert answers(queue)
    assert all(not each.metrics for each in answers(queue))
    records = [json.loads(line) for line in (server.out / "rounds.jsonl").read_text().splitlines()]
    assert all(not record["info"] for record in records)
    assert json.loads((server.out / "summary.json").read_text())["privacy"]["epsilon"] > 0
    for name in NAMES:
        folder = Store(queue.sites[name].root, book.run, name).path
        spent = json.loads((folder / "privacy.json").read_text())
        assert spent["trained"] == 3
        assert spent["epsilons"][name] > 0
        assert "epsilon" in (folder / f"result/clients/{name}/card.md").read_text()
        metrics = json.loads((folder / "history.json").read_text())
        assert metrics[0]["own"]["validation"]  # the site has them


def test_a_sites_noise_is_its_own_and_no_seed_repeats_it(tmp_path):
    ends = []
    for folder in ("one", "two"):
        setup, server, queue = make("fedavg", tmp_path / folder, noise=1.0, reference=False)
        book = ledger()
        server.run(book)
        state = Store(queue.sites["a"].root, book.run, "a").path
        assert list(state.glob("state-*"))
        workbench = next(iter(queue.sites["a"]._workbenches.values()))
        assert isinstance(workbench.method.optimizer, Private)
        assert workbench.method.optimizer.own_guard.entropy == "system"
        start = setup.method.init_server(setup.task.init(), None)
        ends.append(RunFolder(server.out).load(3, State(start, ()))[0].server)
    assert not any(torch.equal(a, b) for a, b in zip(tree.leaves(ends[0]), tree.leaves(ends[1]), strict=True))


def test_a_site_trains_no_more_rounds_than_its_budget(tmp_path):
    """A server that lost its place, or says so, asks for rounds again."""
    _, server, queue = make("fedavg", tmp_path, noise=1.0, reference=False)
    book = ledger()
    spent = Store(queue.sites["b"].root, book.run, "b")
    spent.path.mkdir(parents=True)
    spent.write("privacy.json", {"trained": 2})
    server.run(book)
    assert book.sites["b"].refused.get("spent", 0) >= 1, vars(book.sites["b"])
    assert json.loads((spent.path / "privacy.json").read_text())["trained"] == 3
    assert "3 rounds were trained" in (queue.sites["b"].root / "site.log").read_text()


@pytest.mark.parametrize("level", ["site-local", "site-central"])
def test_sites_as_a_whole(level, tmp_path):
    _, server, queue = make("fedmap", tmp_path, privacy=level, noise=1.0, reference=False, clip=0.5)
    book = ledger()
    result = server.run(book)
    assert result.budget.level == level
    assert result.selected == 3
    shares = next(iter(queue.sites["a"]._workbenches.values())).privacy.shares
    assert shares.entropy == "system"
    assert shares.clips_only == (level == "site-central")
