"""docs/methods.md: a card for each method, and which methods are special cases of which.

    python -m coterie.testing.methods_page

writes the page anew, in the current folder. Equations and papers come from the methods' docstrings, messages are looked
at (`coterie.testing.messages`), and work and bytes are measured: in a round of a small federation, by counting the
floating-point operations of matrix products and convolutions that a client's update takes. What a program cannot find
out is in `coterie.testing.method_notes`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from coterie.core import rng, tree
from coterie.core.routes import Addressed
from coterie.core.task import Task
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan
from coterie.engine.engine import Results, Rows
from coterie.experiment.simulation import Simulation
from coterie.methods import METHODS
from coterie.methods.fields import AnyMethod, name_of
from coterie.models import dnn
from coterie.testing import kit
from coterie.testing.messages import describe, messages
from coterie.testing.method_notes import NOTES
from coterie.testing.special_cases import SPECIAL_CASES

COMMAND = "python -m coterie.testing.methods_page"
PAGE = Path("docs") / "methods.md"
SHAPE, CLASSES = (1, 28, 28), 10
SIZES = (128, 128, 128, 128)  # multiples of `EVALUATION_BATCH`, so that nothing is padded
PLAN = Plan(batch_size=64, epochs=1)
ROUNDS = 3  # the last of which is measured: methods may do other things in a client's first rounds


INTRODUCTION = f"""\
# The methods

Written by `{COMMAND}`, not by hand. `coterie methods NAME` shows all that is said about a method, with its options.
What the defaults are worth on different federations is [measured](defaults.md), and
[what crosses the wire](deploy.md#what-crosses-the-wire) is told in detail.

**Work** is what clients compute in a round, relative to FedAvg: 1 is a gradient for every minibatch. It is counted, as
floating-point operations of the 784-100-10 network and every method's defaults, and so is what it takes **to make** the
models that clients deploy, where that is more than taking them. **Bytes** are relative to FedAvg's in the same
direction. All depend on the model: a head has 1,010 of 79,510 parameters here, and class moments weigh less beside a
larger model.
"""


class Cost(NamedTuple):
    """What a round takes."""

    work: int  # floating-point operations of all clients' updates
    deploying: int  # of making all clients' models from what they have
    up: int  # bytes
    down: int
    different: bool  # whether clients were sent different things


class Counting:
    """A `ClientRunner` that counts the floating-point operations of what clients do, one client at a time."""

    def __init__(self) -> None:
        self.operations = 0

    def map(
        self,
        fn: Callable[..., Any],
        federation: Federation,
        ids: Sequence[int],
        rows_of: Callable[[list[int]], Rows],
        purpose: str,
    ) -> Results:
        """Apply `fn` as `Engine.map` does."""
        with FlopCounterMode(display=False) as counter:
            results = kit.LOOP.map(fn, federation, ids, rows_of, purpose=purpose)
        self.operations += counter.get_total_flops()
        return results


@cache
def _small() -> tuple[Task, Federation]:
    """Make the 784-100-10 network, and clients of a few random images each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = dnn(SHAPE, CLASSES)
    x = torch.randn(sum(SIZES), *SHAPE, generator=rng.torch_generator("methods page", "x"))
    y = torch.arange(len(x)) % CLASSES
    own = np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])
    clients = {f"site-{i}": Split(each, each[:2], each[:2]) for i, each in enumerate(own)}
    return Task(module, num_classes=CLASSES), Federation("methods page", x, y, clients, CLASSES)


@cache
def cost(method: AnyMethod) -> Cost:
    """Measure a round of `method`."""
    task, federation = _small()
    sim = Simulation.start(method.scheduled(ROUNDS), task, federation, PLAN, len(SIZES), seed=0)
    for number in range(1, ROUNDS):
        sim.train(number, kit.LOOP)
    ids = torch.arange(len(SIZES))
    down = sim.method.dispatch(sim.state.server, ids, torch.Generator().manual_seed(0))
    rows = [tree.rows(down, i) for i in range(len(SIZES))]
    different = any(
        not torch.equal(a, b) for row in rows[1:] for a, b in zip(tree.leaves(rows[0]), tree.leaves(row), strict=True)
    )
    work, deploying = Counting(), Counting()
    outcome = sim.train(ROUNDS, work)
    sim.views(ROUNDS, deploying)
    return Cost(work.operations, deploying.operations, outcome.bytes_up, outcome.bytes_down, different)


def about(method: AnyMethod) -> str:
    """Return the docstring of the method's file."""
    return inspect.cleandoc(sys.modules[type(method).__module__].__doc__ or "")


def paper(method: AnyMethod) -> str:
    """Return the docstring's first paragraph, which names the paper."""
    return " ".join(about(method).split("\n\n")[0].split())


def equations(method: AnyMethod) -> str:
    """Return the indented blocks of the docstring."""
    blocks = [block for block in about(method).split("\n\n") if all(line[:4] == "    " for line in block.splitlines())]
    return "\n\n".join(inspect.cleandoc("\n" + block) for block in blocks)


def _times(value: float, unit: float) -> str:
    """Return a ratio with two digits or so."""
    ratio = value / unit
    return "0" if not value else f"{ratio:.2f}" if ratio < 0.095 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


class Card(NamedTuple):
    """What the page says of a method, in words and numbers."""

    keeps: str
    up: str
    down: str
    work: str
    deploying: str
    bytes_up: str
    bytes_down: str


@cache
def card(name: str) -> Card:
    """Look at a method with its defaults."""
    method, one, unit = METHODS[name](), cost(METHODS[name]()), cost(METHODS["fedavg"]())
    down, up = messages(method)
    written = isinstance(up, Addressed) and bool(tree.leaves(up.parts))
    receiver = "to the owners of the models that it was sent" if written else "to the server"
    sent, received = describe(up), describe(down)
    whose = NOTES[name].sent or ("each its own" if one.different else "the same to all")
    return Card(
        NOTES[name].keeps,
        sent if sent == "nothing" else f"{sent}; {receiver}",
        received if received == "nothing" else f"{received}; {whose}",
        _times(one.work, unit.work),
        _times(one.deploying, unit.work) if one.deploying else "",
        _times(one.up, unit.up),
        _times(one.down, unit.down),
    )


def _in_full(name: str) -> list[str]:
    method, found = METHODS[name](), card(name)
    later = f", making the models another {found.deploying} times" if found.deploying else ""
    server = "" if method.peer_to_peer else " It needs a server, and does not run among peers."
    cases = [f"{case.what} ({case.when})" for case in SPECIAL_CASES if name_of(case.method) == name and not case.shared]
    return [
        f"### `{name}`",
        "",
        paper(method),
        "",
        "```text",
        equations(method),
        "```",
        "",
        f"- A client keeps {found.keeps}.",
        f"- It sends: {found.up}. It is sent: {found.down}.{server}",
        f"- A round costs {found.work} times FedAvg's work{later}, and {found.bytes_up} times its bytes up and "
        f"{found.bytes_down} times down.",
        f"- Use it when {NOTES[name].use}",
        *([f"- Special cases: {', '.join(cases)}."] if cases else []),
        "",
    ]


def page() -> str:
    """Return docs/methods.md."""
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        "| method | a client keeps | work | to make models | bytes up | bytes down |",
        "|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        found = card(name)
        cells = [found.keeps, found.work, found.deploying, found.bytes_up, found.bytes_down]
        lines.append(f"| [`{name}`](#{name}) | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Which method is a special case of which",
        "",
        "Every line is a test: both sides are trained on the same small federation, and what they deploy, or the model",
        "that all share, predicts the same (`src/coterie/testing/special_cases.py`).",
        "",
        "| method | when | is | in |",
        "|---|---|---|---|",
    ]
    for case in SPECIAL_CASES:
        where = "the shared model" if case.shared else "what clients deploy"
        lines.append(f"| `{name_of(case.method)}` | {case.when} | {case.what} | {where} |")
    lines += ["", "## A card for each", ""]
    for name in METHODS:
        lines += _in_full(name)
    return re.sub(r"\n+\Z", "\n", "\n".join(lines))


def main(folder: Path = Path()) -> None:
    """Write the page."""
    (folder / PAGE).write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{folder / PAGE} is up to date\n")


if __name__ == "__main__":
    main()
