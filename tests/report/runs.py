"""Small runs to report on."""

import json

import torch

import coterie

QUICK = {"engine": "loop", "compile": False, "workers": 1, "rounds": 3, "lr": 0.1, "batch_size": 8, "model": "linear"}


def clients(number=6, size=24, classes=3):
    """Two groups of clients that label alike within a group."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for i in range(number):
        x = torch.randn(size + i, 4, generator=draw)
        found[f"site <{i}> & co"] = (x, (x @ torch.eye(4)[:, :classes] * (1 if i % 2 else -1)).argmax(1))
    return found


def run(out, method="fedamp", data=None, **settings):
    return coterie.run(method, data or clients(), out=out, **{**QUICK, "report": False, **settings})


def add_benefit(path):
    """benefit.json as a run with intervals has it."""
    result = json.loads((path / "summary.json").read_text())
    rows = (path / "clients.csv").read_text().splitlines()
    names, metric = [row.split(",")[0] for row in rows[1:]], result["selected_by"].split()[-1]
    verdicts = ["gains", "undecided", "loses"]
    ends = {"gains": (0.01, 0.09), "undecided": (-0.02, 0.04), "loses": (-0.09, -0.01)}
    found = [
        {"client": name, "test": 7, "federated": 0.5, "local": 0.45, "gain": 0.05}
        | dict(zip(("low", "high"), ends[verdicts[i % 3]], strict=True))
        | {"verdict": verdicts[i % 3]}
        for i, name in enumerate(names)
    ]
    over = {"mean_gain": 0.021, "low": -0.01, "high": 0.05, "gains": 2, "loses": 2, "undecided": 2}
    over["wilcoxon"] = {"statistic": 3.0, "p": 0.0312, "effect": 0.5, "n": 6}
    side = {"mean": 0.5, "weighted_mean": 0.51, "std": 0.1, "cv": 0.2, "worst_decile": None}
    told = {"format": 1, "metric": metric, "level": 0.95, "resamples": 10, "clients": found, "overall": over}
    told["fairness"] = {"federated": side, "local": side, "share_worse_than_alone": 0.5}
    (path / "benefit.json").write_text(json.dumps(told))
