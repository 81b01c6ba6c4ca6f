"""How data comes to the clients: what loading costs, and gathering minibatches by index against a DataLoader a client.

    python benchmarks/data_path.py [--quick] [--json FILE]

Part 1, in a process of its own: Fashion-MNIST in 100 clients (Dirichlet 0.3). The limits are two seconds of loading
and 400 MB of resident memory for the whole process, the interpreter and PyTorch included; what was
there before loading is printed beside it. Part 2: one epoch of minibatches of a chunk of 20 clients, by one index
operation a step, against a `torch.utils.data.DataLoader` a client over the same examples; a ratio within one run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch
from telling import by_target, parser, target, tell
from torch import Tensor

from coterie.engine.engine import one_thread

MOST_SECONDS, MOST_BYTES = 2.0, 400e6
CLIENTS, CHUNK = 100, 20

_LOAD = """
import json, resource, time
begin = time.perf_counter()
import coterie
from coterie.data import load
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
imported, before = time.perf_counter() - begin, resident()
begin, worked = time.perf_counter(), time.process_time()
federation = load("fashion-mnist", 0, partition="dirichlet:0.3", clients=%d, drop_duplicates=True)
print(json.dumps({
    "import": imported, "seconds": time.perf_counter() - begin, "cpu": time.process_time() - worked,
    "before": before, "after": resident(),
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "dtype": str(federation.x.dtype),
}))
"""


def loading(clients: int = CLIENTS) -> dict[str, float]:
    """What a fresh process measures."""
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", _LOAD % clients],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def examples(clients: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes like images, and every client's positions among them, [clients, each]."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (clients * each, 1, 28, 28), generator=draw, dtype=torch.uint8)
    y = torch.randint(10, (clients * each,), generator=draw)
    return x, y, torch.randperm(clients * each, generator=draw).reshape(clients, each)


def by_index(x: Tensor, y: Tensor, own: Tensor, batch: int) -> float:
    """All clients' minibatches of a step at once, decoded; seconds for the epoch."""
    begin = time.perf_counter()
    order = torch.stack([row[torch.randperm(len(row))] for row in own])
    for index in torch.split(order, batch, 1):
        images, _ = x[index].to(torch.float32) / 255, y[index]
    assert images.shape[:2] == (len(own), index.shape[1])
    return time.perf_counter() - begin


def by_loader(x: Tensor, y: Tensor, own: Tensor, batch: int) -> float:
    """The ordinary way: a DataLoader a client, each example decoded; seconds for the same epoch."""
    from torch.utils.data import DataLoader, Dataset, Subset

    class Images(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return x[i].to(torch.float32) / 255, y[i]

    begin = time.perf_counter()
    for row in own:
        for images, _ in DataLoader(Subset(Images(), row.tolist()), batch, shuffle=True):
            assert len(images) <= batch
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    asked = parser(__doc__).parse_args(arguments)
    told = loading()
    data = examples(CHUNK, 64 if asked.quick else 640)
    with one_thread():
        ours, theirs = (min(gather(*data, 32) for _ in range(3)) for gather in (by_index, by_loader))
    rows = [
        [f"Fashion-MNIST in {CLIENTS} clients, kept as {told['dtype']}: loading", "s", told["seconds"]],
        ["of it on a processor", "s", told["cpu"]],
        ["importing before it", "s", told["import"]],
        ["memory of the process after importing", "MB", told["before"] / 1e6],
        ["after loading", "MB", told["after"] / 1e6],
        ["at its peak", "MB", told["peak"] / 1e6],
        [f"an epoch of minibatches of {CHUNK} clients, one index operation a step", "ms", ours * 1e3],
        ["the same, a DataLoader a client", "ms", theirs * 1e3],
    ]
    targets = [
        target("loading, s", told["seconds"], MOST_SECONDS, at_most=True),
        target("memory of the whole process, MB", told["after"] / 1e6, MOST_BYTES / 1e6, at_most=True),
        target("DataLoaders over index operations", theirs / ours, 1.0),
    ]
    return tell(asked, "Loading and gathering data", ["", "", "measured"], rows, targets, by_target(targets))


if __name__ == "__main__":
    sys.exit(main())
