"""What crosses the wire: every method's messages, looked at, and the tables in the documents that tell of them.

    python -m coterie.testing.messages

writes the table of `docs/deploy.md` and the last column of `docs/methods-at-a-glance.md` anew, in the current folder.
Messages are those of a small network with everything that a model may have: a frozen layer, normalisation with
statistics, and a head. What is a part of the model in a message is told by its names, and everything else by its field
and its shape.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.method import Population
from coterie.core.routes import Addressed
from coterie.core.task import Task
from coterie.core.tree import Tree
from coterie.methods import METHODS
from coterie.methods.fields import AnyMethod
from coterie.parts import sums
from coterie.testing.kit import batches

COMMAND = "python -m coterie.testing.messages"
BEGIN, END = "<!-- messages: begin -->", "<!-- messages: end -->"
CLIENTS, CLASSES, FEATURES = 7, 3, 8
# What fields of messages are in words; a field that is not here is told by its name.
WORDS = {
    "count": "number of examples",
    "size": "number of examples",
    "log_weight": "one log-weight",
    "c": "control variate",
    "change": "change of the control variate",
    "s": "learned variances",
    "centre": "class means",
    "centroid": "class centroids",
    "class_size": "which classes there are",
    "known": "which classes there are",
    "mean": "class means",
    "spread": "class precisions",
    "losses": "its losses",
    "k": "number of the round",
    "round": "number of the round",
    "cluster": "number of its cluster",
    "h": "class means times class shares",
    "v": "their variance",
    "unit": "unit of distance",
    "rho": "spreads of the weights",
    "gate": "gate",
    "valve": "conditional valve",
    "embeddings": "class embeddings",
    "models": "models of a few clients",
    "own": "its losses",
    "to": "whose they are",
    "kernel": "two scales of the kernel",
    "parts": "weighted updates for their owners",
    "affinity": "its affinities",
    "itself": "its number",
    "precision": "precisions",
    "damping": "damping",
    "shift": "moved means times precisions",
    "code": "quantised update",
    "scale": "its scales",
    "gamma": "step size",
}


class Messages(NamedTuple):
    """One client's messages of a round in which all clients have taken part before."""

    down: Tree
    up: Tree


@cache
def model() -> Task:
    """Make a network with a frozen first layer, BatchNorm, and a head, for three classes of six features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        frozen = nn.Linear(6, 6).requires_grad_(False)
        body = [nn.Linear(6, FEATURES, bias=False), nn.BatchNorm1d(FEATURES), nn.Tanh()]
        return Task(nn.Sequential(frozen, *body, nn.Linear(FEATURES, CLASSES)), num_classes=CLASSES)


@cache
def messages(method: AnyMethod, task: Task | None = None) -> Messages:
    """Return the messages of client 0 in the method's second round (without values that mean anything)."""
    task = task or model()
    ids = torch.arange(CLIENTS)
    server = method.init_server(task.init(), Population(CLIENTS, CLIENTS, task))
    client = method.init_client(task.init())
    for _ in range(2):
        down = method.dispatch(server, ids, torch.Generator().manual_seed(0))
        one = tree.rows(down, 0)
        client, up, _ = method.local_update(task, client, one, batches(1))
        server = method.aggregate(server, ids, tree.stack([up] * CLIENTS))
    return Messages(task.sent(one), up)


def describe(message: Tree, task: Task | None = None) -> str:
    """Tell what is in a message, in words: "model, number of examples"."""
    found = [word for field, part in _parts(message) for word in _words(field, part, task or model())]
    return ", ".join(dict.fromkeys(found)) or "nothing"


def _parts(message: Any) -> list[tuple[str, Any]]:
    """Return the fields of a message with the models in them put together: parts of one model are one thing."""
    if isinstance(message, dict):
        return [("", message)] if message else []
    if isinstance(message, Addressed) and not tree.leaves(message.parts):  # nobody but the server is told anything
        return _parts(message.own)
    if hasattr(message, "_asdict"):
        fields = {name: part for name, part in message._asdict().items() if tree.leaves(part)}
        model_parts = [part for name, part in fields.items() if isinstance(part, dict) and name not in WORDS]
        joined = {name: leaf for part in model_parts for name, leaf in part.items()}
        rest = [(name, part) for name, part in fields.items() if not isinstance(part, dict) or name in WORDS]
        return [*([("", joined)] if joined else []), *rest]
    return [("", part) for part in message]


def _words(field: str, part: Any, task: Task) -> list[str]:
    if not isinstance(part, dict) or field in WORDS:
        return [WORDS.get(field, f"`{field}`")]
    return ["several models"] if _rows(part, task) else _which(set(part), task)


def _rows(part: dict[str, Tensor], task: Task) -> bool:
    return any(value.ndim > task.init()[name].ndim for name, value in part.items())


def _which(names: set[str], task: Task) -> list[str]:
    """Tell which part of a model has these names."""
    everything, trained, norm = set(task.init()), set(task.trainable), set(task.norm_names)
    body = everything - task.head_names
    known = [
        (everything - task.unsent, "model"),
        (trained, "model without statistics"),
        (everything - trained - task.unsent, "statistics"),
        (everything - norm - task.unsent, "model without normalisation layers"),
        (set(task.head_names), "head"),
        (body - task.unsent, "body"),
    ]
    return [next((words for some, words in known if names == some), f"`{'`, `'.join(sorted(names))}`")]


def table() -> str:
    """Return the Markdown table of all methods' messages; methods with the same ones share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, cls in METHODS.items():
        down, up = messages(cls())
        summed = "no" if sums.why_not(cls()) else "yes"
        rows.setdefault((describe(down), describe(up), summed), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items()]
    return "\n".join(["| method | down | up | secure sum |", "|---|---|---|---|", *lines])


def with_table(text: str) -> str:
    """Return the document with its table between the two markers written anew."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the document has no '{BEGIN}' and '{END}'")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def with_column(text: str) -> str:
    """Return the document with the last column of its table of methods written anew."""

    def line(found: re.Match[str]) -> str:
        sent = {describe(messages(METHODS[name]()).up) for name in re.findall(r"`([\w-]+)`", found[1])}
        if len(sent) > 1:
            raise ValueError(f"{found[1]} do not send the same: {sorted(sent)}")
        return f"| {found[1]} | {found[2]} | {sent.pop()} |"

    names = "|".join(map(re.escape, METHODS))
    return re.sub(rf"^\| (`(?:{names})`(?:, `[\w-]+`)*) \| (.*?) \| .* \|$", line, text, flags=re.M)


def main(folder: Path = Path()) -> None:
    """Write both documents anew."""
    for path, change in (
        (folder / "docs" / "deploy.md", with_table),
        (folder / "docs" / "methods-at-a-glance.md", with_column),
    ):
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"{path} is up to date\n")


if __name__ == "__main__":
    main()
