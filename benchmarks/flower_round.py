"""A trivial round on real processes: Coterie's FedAvg against Flower's own, in one run, on the same SuperNodes.

    python benchmarks/flower_round.py                   4 sites, 2 rounds of each, as a ratio: under 3 minutes
    python benchmarks/flower_round.py --sites 2 --rounds 5

Both send the same network (784-100-10, 318 kB) and train almost nothing, so that what is measured is what a round costs
beside the work: messages, processes, polling. Both train and evaluate in every round. The first round of each is left
out: Flower unpacks an app at each node then. The last lines say how many bytes Coterie sent in that run beside the
method's own messages, and what Flower's objects add to an envelope. Needs `pip install 'coterie[flower]'`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
EXAMPLES = 40
NAMES = ("site-1", "site-2", "site-3", "site-4", "site-5", "site-6", "site-7", "site-8")

PLAIN_SERVER = """
import json, time
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flower_round import network

app = ServerApp()

@app.main()
def main(grid, context):
    sites, rounds = context.run_config["sites"], context.run_config["rounds"]
    while len(list(grid.get_node_ids())) < sites:
        time.sleep(0.5)
    everybody = dict(min_train_nodes=sites, min_evaluate_nodes=sites, min_available_nodes=sites)
    strategy, first = FedAvg(**everybody), FedAvg(fraction_evaluate=0.0, **everybody | {"min_evaluate_nodes": 0})
    arrays = ArrayRecord(network((784,), 10).state_dict())
    first.start(grid=grid, initial_arrays=arrays, num_rounds=1)
    begin = time.monotonic()
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
    seconds = (time.monotonic() - begin) / rounds
    with open(context.run_config["out"], "w") as file:
        json.dump({"seconds": seconds}, file)
"""

PLAIN_CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flower_round import examples, network

app = ClientApp()

def load(message):
    model = network((784,), 10)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model, *examples()

@app.train()
def train(message, context):
    model, x, y = load(message)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    metrics = MetricRecord({"loss": loss.item(), "num-examples": len(x)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    model, x, y = load(message)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": len(x)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
"""

PLAIN_APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "plain"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "plain.server_app:app"
clientapp = "plain.client_app:app"
[tool.flwr.app.config]
sites = {sites}
rounds = {rounds}
out = "{out}"
"""


def network(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 100), nn.ReLU(), nn.Linear(100, outputs))


def examples(node: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, 784, generator=draw), torch.arange(EXAMPLES) % 10


def until(path: Path, done: Any, seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists() and done(found := json.loads(path.read_text())):
            return found
        time.sleep(0.2)
    raise SystemExit(f"{what} was not done within {seconds:g} seconds")


def flower_bytes(envelope: tuple[bytes, bytes, bytes]) -> int:
    """All objects of a message, as Flower writes them."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from coterie.deploy.client_app import to_records

    return sum(len(each.deflate()) for each in get_all_nested_objects(to_records(*envelope)).values())


def main(argv: list[str]) -> int:
    from telling import bar, parser, plot, tell  # not above: Flower's processes import this file for its network

    asking = parser(__doc__)
    asking.add_argument("--sites", type=int, default=4, choices=range(1, len(NAMES) + 1))
    asking.add_argument("--rounds", type=int, default=2)
    asking.add_argument("--limit", type=float, default=600.0, help="seconds for each side")
    asked = asking.parse_args(argv)
    if asked.quick:
        asked.sites = asked.rounds = 1
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    sys.path.append(str(HERE))

    from coterie.core import tree
    from coterie.deploy import app, settings
    from coterie.deploy.processes import call, environment, program
    from coterie.deploy.up import local_federation, local_settings
    from coterie.storage import files

    names = NAMES[: asked.sites]
    with tempfile.TemporaryDirectory(prefix="coterie-") as place:
        work, out = Path(place) / "flower", Path(place) / "run"
        flat = {"method": "fedavg", "data": "digits-like", "model": "flower_round:network", "rounds": asked.rounds + 1}
        flat |= {"reference": False, "batch_size": EXAMPLES, "optimizer.lr": 0.01}
        config, _, _ = settings.read(flat, own_data=True, own_model=False)
        app.write(work / "app", config, {**local_settings(work, names, out), "joining": 600.0})
        plain = Path(place) / "plain"
        files.write_text(
            plain / "pyproject.toml", PLAIN_APP.format(sites=len(names), rounds=asked.rounds, out=plain / "o")
        )
        for name, text in (("__init__", ""), ("server_app", PLAIN_SERVER), ("client_app", PLAIN_CLIENT)):
            files.write_text(plain / "plain" / f"{name}.py", text)
        with local_federation(work, names, data="flower_round:examples") as running:
            running.submit(resume=False)
            sites = until(out / "sites.json", lambda told: told["finished"], asked.limit, "Coterie's run")["sites"]
            call([program("flwr"), "run", str(plain), "up"], environment(running.home))
            theirs = until(plain / "o", lambda told: True, asked.limit, "Flower's run")["seconds"]
        rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        ours = sum(row["seconds"] for row in rows[1:]) / len(rows[1:])
    model, count = tree.nbytes(network((784,), 10).state_dict()), 4
    # A model goes down for each round, and one more to evaluate the last; a model and a count come up for each round.
    # What was sent has all messages of the run in it, also those that join and finish.
    traffic = []
    for way, times, size in (("down", len(rows) + 1, model), ("up", len(rows), model + count)):
        method, sent = times * size, sum(each[f"bytes_{way}"] for each in sites.values()) / len(sites)
        traffic.append([way, method, round(sent), f"{sent / method - 1:+.2%}"])
    added = flower_bytes((b"x" * 700, b"x" * model, b"x" * 100)) - model - 800
    sides = {"Flower's FedAvg": theirs, "Coterie's FedAvg": ours}
    return tell(
        asked,
        "A round over Flower",
        ["side", "s a round", "over Flower's"],
        [[name, seconds, seconds / theirs] for name, seconds in sides.items()],
        [],
        plot("seconds of a round that trains almost nothing", [bar(name, seconds) for name, seconds in sides.items()]),
        tables=[
            {
                "title": "Bytes of a site in the whole run of Coterie",
                "columns": ["way", "the method's messages", "sent", "more"],
                "rows": traffic,
            }
        ],
        notes=[
            f"{len(names)} sites, {asked.rounds} rounds of each side, train and evaluate, 784-100-10. "
            f"Flower's own objects add {added} bytes to a message, {added / model:+.2%}."
        ],
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
