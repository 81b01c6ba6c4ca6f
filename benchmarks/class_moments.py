"""pFedVMP's class precisions (eqs 11 and 13): thin factors against dense matrices, in bytes and in time.

    python benchmarks/class_moments.py                  50 clients, Dirichlet(0.1), 14,000 examples, 512 features
    python benchmarks/class_moments.py --quick          a smoke test: small, and no target is judged

Both sides get the same features, random, with a spectrum that decays as a network's does, and must end with the same
centroids. The dense side is what the equations say: each client inverts the [dim, dim] covariance of each class it has
and sends the inverse, and the server adds up matrices. The factor side is
`coterie.parts.class_moments`, as the method calls it.

Bytes are what a client would send of its classes' precisions, in float32: K dim^2 numbers a client for the dense side
(the paper's form), also shown for the classes that the client has only, and of these only the symmetric half; for the
factors the rows in use and, with them, the class of each. The body and the means are the same on both sides and left
out. One client after the other, on one thread; the time to compute the features themselves is left out too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from telling import bar, parser, plot, target, tell
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.task import Task
from coterie.data import partition
from coterie.data.federation import Federation, Split
from coterie.data.minibatches import Plan, draw
from coterie.parts import class_moments
from coterie.parts.class_moments import NOBODY

CLASSES, ALPHA, RTOL = 10, 1.0, 1e-6
TARGET, TOLERANCE = 10.0, 1e-5  # times fewer bytes; relative difference of the centroids


def federation(examples: int, dim: int, clients: int, concentration: float) -> Federation:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (examples,), generator=generator)
    spectrum = torch.arange(1, dim + 1) ** -0.5
    centres = torch.randn(CLASSES, dim, generator=generator)
    x = centres[y] + torch.randn(examples, dim, generator=generator) * spectrum
    parts = partition.dirichlet(y.numpy(), clients, concentration, seed=0)
    splits = {f"client-{i}": Split(own, own[:1], own[:1]) for i, own in enumerate(parts)}
    return Federation("moments", x, y, splits, CLASSES)


def main(arguments: Sequence[str] | None = None) -> int:
    asking = parser(__doc__)
    asking.add_argument("--clients", type=int, default=50)
    asking.add_argument("--examples", type=int, default=14_000)
    asking.add_argument("--dim", type=int, default=512)
    asking.add_argument("--dirichlet", type=float, default=0.1)
    asked = asking.parse_args(arguments)
    if asked.quick:
        asked.clients, asked.examples, asked.dim = 5, 500, 32
    torch.set_num_threads(1)
    data = federation(asked.examples, asked.dim, asked.clients, asked.dirichlet)
    largest = max(len(split.train) for split in data.clients.values())
    task = Task(nn.Sequential(nn.Identity(), nn.Linear(asked.dim, CLASSES)), num_classes=CLASSES)
    params = task.init()

    said, factor_client = [], 0.0
    precision = torch.zeros(CLASSES, asked.dim, asked.dim, dtype=torch.float64)
    pull = torch.zeros(CLASSES, asked.dim, dtype=torch.float64)
    dense_client = dense_server = 0.0
    for i in range(asked.clients):
        batches = draw(data, [i], Plan(batch_size=largest), seed=0, purpose="moments", round=1)
        batches = batches._replace(**{name: getattr(batches, name)[0] for name in ("index", "mask", "key", "count")})
        count, mean = class_moments.class_means(task, params, batches)
        begin = time.perf_counter()
        factor = class_moments.precision_factor(task, params, batches, largest, RTOL)
        factor_client += time.perf_counter() - begin
        said.append((count, mean, factor))

        own = torch.from_numpy(data.split(i).train)
        for k in count.nonzero().flatten().tolist():
            begin = time.perf_counter()
            sent = dense(data.x[own][data.y[own] == k])
            middle = time.perf_counter()
            precision[k] += sent
            pull[k] += sent.double() @ mean[k].double()
            dense_client, dense_server = dense_client + middle - begin, dense_server + time.perf_counter() - middle

    count, mean, factor = tree.stack(said)
    begin = time.perf_counter()
    ours = class_moments.product_of_gaussians(count, mean, factor, ALPHA)
    factor_server = time.perf_counter() - begin
    begin = time.perf_counter()
    present = count.sum(0) > 0
    theirs = torch.linalg.solve(precision[present], pull[present])
    dense_server += time.perf_counter() - begin

    held, matrix = int((count > 0).sum()), 4 * asked.dim**2
    ranks = int((factor.owner != NOBODY).sum())
    factor_bytes = ranks * (4 * asked.dim + factor.owner.element_size())
    dense_bytes = asked.clients * CLASSES * matrix
    half = held * 4 * asked.dim * (asked.dim + 1) // 2
    gap = float((ours[present].double() - theirs).norm() / theirs.norm())
    whole = (dense_client + dense_server) / (factor_client + factor_server)
    sizes = {
        "dense": dense_bytes / 1e6,
        "dense, classes held only": held * matrix / 1e6,
        "dense, their symmetric half": half / 1e6,
        "thin factors": factor_bytes / 1e6,
    }
    times = {"dense": (dense_client, dense_server), "thin factors": (factor_client, factor_server)}
    setting = (
        f"{asked.clients} clients, Dirichlet({asked.dirichlet:g}), {asked.examples:,} examples, {asked.dim} features"
    )
    return tell(
        asked,
        "pFedVMP's class precisions",
        ["sent as", "MB sent", "over thin factors", "clients, s", "server, s"],
        [[name, size, size / sizes["thin factors"], *times.get(name, ("", ""))] for name, size in sizes.items()],
        [
            target("dense over thin factors, bytes", dense_bytes / factor_bytes, TARGET),
            target("relative difference of the centroids", gap, TOLERANCE, at_most=True),
        ],
        plot(
            "MB sent by all clients",
            [
                bar(name, size, sizes["dense"] / TARGET if name == "thin factors" else None, at_most=True)
                for name, size in sizes.items()
            ],
        ),
        notes=[f"{setting}; largest client {largest}, {ranks:,} rows; {whole:.1f}x less time with thin factors."],
    )


def dense(z: Tensor) -> Tensor:
    """Lambda of eq. 11 in float64, as it would be sent (float32)."""
    offset = z.double() - z.double().mean(0)
    inverse = torch.linalg.pinv(offset.T @ offset / len(z), rtol=RTOL, hermitian=True)
    precision: Tensor = inverse + ALPHA * torch.eye(z.shape[1], dtype=torch.float64)
    return precision.float()


if __name__ == "__main__":
    sys.exit(main())
