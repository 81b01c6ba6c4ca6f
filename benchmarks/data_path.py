"""How data comes to the clients: what loading costs, and gathering minibatches by index against a DataLoader a client.

    python benchmarks/data_path.py [--quick]

Part 1, in a process of its own: Fashion-MNIST in 100 clients (Dirichlet 0.3). The limits are two seconds of loading
and 400 MB of resident memory for the whole process, the interpreter and PyTorch included; what was
there before loading is printed beside it. Part 2: one epoch of minibatches of a chunk of 20 clients, by one index
operation a step, against a `torch.utils.data.DataLoader` a client over the same examples; a ratio within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch
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
    parser = argparse.ArgumentParser(description="What loading and gathering data costs.")
    parser.add_argument("--quick", action="store_true", help="few examples, and no limit on the time of loading")
    options = parser.parse_args(arguments)
    told = loading()
    added, whole = told["after"] - told["before"], told["after"]
    print(f"Fashion-MNIST in {CLIENTS} clients, kept as {told['dtype']}:")
    print(f"  loading {told['seconds']:.2f} s (limit {MOST_SECONDS:g}), {told['cpu']:.2f} s of them on a processor;")
    print(f"  importing before it {told['import']:.2f} s")
    print(f"  memory: loading adds {added / 1e6:.0f} MB to the {told['before'] / 1e6:.0f} MB of an imported PyTorch;")
    print(f"  whole process {whole / 1e6:.0f} MB, at its peak {told['peak'] / 1e6:.0f} MB (limit {MOST_BYTES / 1e6:g})")
    data = examples(CHUNK, 64 if options.quick else 640)
    with one_thread():
        ours, theirs = ([gather(*data, 32) for _ in range(3)] for gather in (by_index, by_loader))
    ratio = min(theirs) / min(ours)
    print(f"minibatches of {CHUNK} clients: an index operation a step is {ratio:.0f} times as fast as DataLoaders")
    fits = whole < MOST_BYTES and (options.quick or told["seconds"] < MOST_SECONDS)
    return 0 if fits and ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
