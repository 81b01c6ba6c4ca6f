import pytest
import torch

import coterie

QUICK = {"engine": "loop", "compile": False, "workers": 1, "model": "mlp", "rounds": 2, "local_steps": 2, "lr": 0.05}


def two_kinds(clients=5, rows=60):
    """Clients by turns of two kinds, with opposite labels: those of one kind can learn from each other only."""
    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(rows, 4, generator=draw) for _ in range(clients)]
    return {f"site-{i + 1}": (x, (x[:, 0] > 0).long() ^ (i % 2)) for i, x in enumerate(xs)}


@pytest.fixture(scope="session")
def joined(tmp_path_factory):
    """joined(method): a finished run in a folder, with one of five clients held out and onboarded."""
    runs = {}

    def make(method):
        if method not in runs:
            out = tmp_path_factory.mktemp(method) / "run"
            how = {"holdout": 0.2, "reference": False, "report": False, "select": "balanced_accuracy"}
            runs[method] = coterie.run(method, two_kinds(), out=out, **how, **QUICK)
        return runs[method]

    return make
