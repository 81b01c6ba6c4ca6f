"""Many rounds with many sites: the server's and the sites' memory does not grow with the rounds."""

import gc
from pathlib import Path

import pytest
import torch

from coterie.data import from_clients
from coterie.deploy.contract import Rules
from coterie.deploy.keys import make_identity
from coterie.deploy.ledger import Ledger
from coterie.deploy.rounds import Rounds
from coterie.deploy.server import Server
from coterie.deploy.site import Site
from coterie.deploy.site_data import one_client
from coterie.experiment.setup import prepare

from .inprocess import Queue


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Forgetful(Queue):
    """Keeps nothing of what passed."""

    def _through(self, direction, name, envelope):
        found = super()._through(direction, name, envelope)
        self.seen.clear()
        return found


def soak(root: Path, rounds: int, number: int, monkeypatch) -> list[int]:
    """Return the memory after each round."""
    draw = torch.Generator().manual_seed(0)
    data = from_clients(
        {f"s{i}": (torch.randn(20, 50, generator=draw), torch.randint(2, (20,), generator=draw)) for i in range(number)}
    )
    model = lambda shape, outputs: torch.nn.Linear(*shape, outputs)  # noqa: E731
    settings = {"engine": "loop", "compile": False, "workers": 1, "reference": False, "report": False}
    setup = prepare("scaffold", data, model=model, rounds=rounds, local_steps=1, evaluate_every=10, **settings)
    sites = {
        name: Site(name, setup.config, setup.method, model, one_client(data, name), make_identity(), root / name)
        for name in data.names
    }
    rules = Rules(sites=number, deadline=30, joining=30)
    server = Server(setup.config, setup.method, model, Forgetful(sites), make_identity(), root / "run", rules)
    after, play = [], Rounds.play

    def measured(self, round):
        play(self, round)
        after.append(resident_bytes())

    monkeypatch.setattr(Rounds, "play", measured)
    server.run(Ledger("test-soak"))
    return after


@pytest.mark.slow
def test_two_hundred_rounds_with_fifty_sites_take_no_more_memory(tmp_path, monkeypatch):
    after = soak(tmp_path, 200, 50, monkeypatch)
    grown = (after[-2] - after[50]) / 2**20
    assert grown < 10, f"{grown:.1f} MB from round 50 to 200"
    assert sum(1 for path in tmp_path.rglob("*") if path.is_file()) < 50 * 40
