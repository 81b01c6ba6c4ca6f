"""What servers do between rounds, against what the machine can do: its matmul rate and its memory, in the same run.

    python benchmarks/server_steps.py                   about a minute on two cores; needs 4 GB of memory
    python benchmarks/server_steps.py --quick           a smoke test: small, and no target is judged
    python benchmarks/server_steps.py --json FILE       the table and the targets as JSON, too

1. FedAMP's attention for 1,000 clients with the pFedVMP network for 47 classes (601,007 parameters): all pairwise
   distances, then every client's u_i = sum_j xi_ij w_j, 100 clients at a time. The rate that is judged *credits* what
   two plain matrix products of that size need, 2 m^2 P operations each, over the time taken. Fewer are *done*: of the
   distances, which are symmetric, nearly half are mirrored; their rate is shown beside. Distances are in float64, of
   which processors do half as many; the matmul rate is float32's. The models are in memory (2.4 GB): the peak is of
   the whole process, with them, PyTorch, and all that is held at once.
2. pFedVMP's product of Gaussians for 50 clients, 47 classes, 512 features, with as many rows as the clients of
   EMNIST-balanced have under Dirichlet(0.3): 'full' (a covariance each class) and 'pooled'.
3. The weighted means of FedAvg and FedMAP over 100 such models: bytes of the models, read once, a second; a plain copy
   reads and writes, and both count.

Every result is compared with a direct computation in float64. All cores are used: these are the server's steps.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from telling import Told, by_target, parser, target, tell
from torch import Tensor

from coterie.core.method import CountedParams, Population
from coterie.core.tree import Params
from coterie.methods import FedAMP, FedAvg, FedMAP
from coterie.methods.fedamp import Server
from coterie.methods.fedmap import Up
from coterie.models import find_model
from coterie.parts import class_moments
from coterie.parts.attention import ROW_BLOCKS, add_self_weights, attention_mask, heard_pairs, squared_distances
from coterie.parts.class_moments import NOBODY, Factor

CLASSES, DIM, ALPHA = 47, 512, 1.0
SHARE, GIGABYTES, SECONDS, BANDWIDTH = 0.5, 4.0, 2.0, 0.8  # the targets; the last is a share of the copy's
TOLERANCE = 1e-5


class Found:
    """The rows of the table and the targets."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.targets: list[Told] = []

    def add(self, name: str, time: str = "", measured: str = "", *judged: Told) -> None:
        self.rows.append([name, time, measured])
        self.targets += judged


def fastest(fn: Callable[[], object], times: int = 3) -> float:
    """Seconds; other work on the machine can only make a look slower."""
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - begin)
    return best


def agree(name: str, found: Tensor, expected: Tensor) -> None:
    gap = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not gap <= TOLERANCE:
        sys.exit(f"{name}: the results differ by {gap:.1e}")


def models(clients: int, generator: torch.Generator) -> Params:
    """The parameters of so many networks that went apart from one."""
    network = find_model("cnn")((1, 28, 28), CLASSES)
    found = {}
    for name, value in network.named_parameters():
        rows = torch.randn(clients, *value.shape, generator=generator)
        found[name] = rows.mul_(0.01).add_(value.detach())  # in place: there is room for one such tensor
    return found


def attention(found: Found, clients: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    method, w = FedAMP(), models(clients, generator)
    numbers = sum(leaf[0].numel() for leaf in w.values())
    begin = time.perf_counter()
    distance = squared_distances(w)
    heard = torch.ones(clients, dtype=torch.bool)
    weights, _ = method._xi(
        torch.tensor(False), torch.tensor(2), distance, attention_mask(heard), heard_pairs(distance, heard)
    )
    xi = add_self_weights(weights)
    middle = time.perf_counter()
    server = Server(w, heard, xi, torch.tensor(False), torch.tensor(1))
    for ids in torch.split(torch.arange(clients), 100):
        u = method.dispatch(server, ids, generator).u
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    for i, j in ((0, 1), (3, clients - 1)):
        each = [((leaf[i].double() - leaf[j].double()) ** 2).sum() for leaf in w.values()]
        agree("distances", distance[i, j], torch.stack(each).sum())
    name = max(w, key=lambda n: w[n][0].numel())
    own = w[name].flatten(1)[:, :1000]  # some of the parameters
    agree("u of the last client", u[name][-1].flatten()[:1000], xi[-1] @ own.double())
    work = 2.0 * clients**2 * numbers
    done = [work * done_of_gram(clients), work]
    speed, truly = 2 * work / (end - begin) / 1e9, sum(done) / (end - begin) / 1e9
    share = speed / rate
    what = f"FedAMP, {clients:,} clients x {numbers:,} parameters"
    found.add(
        f"{what}: distances",
        f"{middle - begin:.2f} s",
        f"{done[0] / (middle - begin) / 1e9:.0f} GFLOP/s done",
    )
    found.add("every u_i", f"{end - middle:.2f} s", f"{done[1] / (end - middle) / 1e9:.0f} GFLOP/s done")
    found.add("both, operations done", f"{end - begin:.2f} s", f"{truly:.0f} GFLOP/s, {truly / rate:.0%} of matmul")
    judged = target("FedAMP: credited share of the matmul rate", share, SHARE)
    found.add("both, credited as two products", "", f"{speed:.0f} GFLOP/s, {share:.0%} of matmul", judged)
    judged = target("FedAMP: peak memory, GB", peak, GIGABYTES, at_most=True)
    found.add("peak memory of the process", "", f"{peak:.2f} GB", judged)


def done_of_gram(size: int) -> float:
    """The part of a Gram matrix that is computed: each block of rows with itself and those after it."""
    step = max(64, -(-size // ROW_BLOCKS))
    return sum(min(step, size - start) * (size - start) for start in range(0, size, step)) / size**2


def gaussians(found: Found, clients: int, examples: int, classes: int, dim: int) -> None:
    """Rows as clients would send them: of a class with Z examples, up to Z - 1."""
    draw, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    share = draw.dirichlet([0.3] * clients, classes).T  # [clients, classes], each class dealt out
    count = torch.from_numpy(np.round(share * examples * clients / classes)).float()
    ranks = (count - 1).clamp(0, dim).long()
    for pooled in (False, True):
        room = dim if pooled else int(ranks.sum(1).max())
        rows = torch.randn(clients, room, dim, generator=generator)
        owner = torch.zeros(clients, room, dtype=torch.int64)
        if not pooled:
            owner = torch.full_like(owner, NOBODY)
            for n in range(clients):
                mine = torch.arange(classes).repeat_interleave(ranks[n])
                owner[n, : len(mine)] = mine
            rows = rows * (owner != NOBODY)[..., None]
        mean = torch.randn(clients, classes, dim, generator=generator)
        factor = Factor(rows, owner)
        seconds = fastest(partial(class_moments.product_of_gaussians, count, mean, factor, ALPHA, pooled))
        centroids = class_moments.product_of_gaussians(count, mean, factor, ALPHA, pooled)
        for k in range(0, classes, max(1, classes // 4)):
            agree(f"class {k}", centroids[k], by_definition(count, mean, factor, k, pooled))
        name = "pooled" if pooled else "full"
        what = f"pFedVMP, {name}, {clients} x {classes} x {dim}, {int((owner >= 0).sum()):,} rows"
        found.add(what, f"{seconds:.2f} s", "", target(f"pFedVMP {name}: seconds", seconds, SECONDS, at_most=True))


def by_definition(count: Tensor, mean: Tensor, factor: Factor, k: int, pooled: bool) -> Tensor:
    """(sum_n Lambda_n)^-1 sum_n Lambda_n mean_n over the holders n of class k."""
    dim = mean.shape[2]
    total, pull = torch.zeros(dim, dim).double(), torch.zeros(dim).double()
    for n in (count[:, k] > 0).nonzero().flatten().tolist():
        rows = factor.rows[n][factor.owner[n] == (0 if pooled else k)].double()
        precision = rows.T @ rows + ALPHA * torch.eye(dim).double()
        total, pull = total + precision, pull + precision @ mean[n, k].double()
    centroid: Tensor = torch.linalg.solve(total, pull)
    return centroid


def means(found: Found, clients: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w = models(clients, generator)
    size = sum(leaf.nbytes for leaf in w.values())
    start = {name: leaf[0] for name, leaf in w.items()}
    ids, population = torch.arange(clients), Population(clients, clients)
    weight = torch.rand(clients, generator=generator)
    copy = copy_rate(w, size)
    found.add(f"a copy of {clients} models, {size / 1e6:.0f} MB", "", f"{copy:.1f} GB/s, both ways")
    fedavg, fedmap = FedAvg(), FedMAP()
    learned = FedMAP(prior="gaussian-learned")
    sized, up = CountedParams(w, weight), Up(w, weight.log(), {})
    at, prior, wide = start, fedmap.init_server(start, population), learned.init_server(start, population)
    name = min(w)
    expected = (weight.double() / weight.double().sum()) @ w[name].flatten(1).double()
    agree("FedAvg", fedavg.aggregate(at, ids, sized)[name].flatten(), expected)
    agree("FedMAP", fedmap.aggregate(prior, ids, up).gamma[name].flatten(), expected)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("FedAvg", lambda: fedavg.aggregate(at, ids, sized)),
        ("FedMAP", lambda: fedmap.aggregate(prior, ids, up)),
        ("FedMAP, learned variances", lambda: learned.aggregate(wide, ids, up)),
    ]
    for label, fn in cases:
        seconds = fastest(fn, 5)
        rate = size / seconds / 1e9
        measured = f"{rate:.1f} GB/s, {rate / copy:.0%} of the copy"
        judged = [target(f"{label}: share of a copy's GB/s", rate / copy, BANDWIDTH)]
        # Learned variances take many passes: shown beside, without a target.
        found.add(f"{label}: aggregation", f"{seconds * 1e3:.0f} ms", measured, *judged[: "learned" not in label])


def copy_rate(w: Params, size: int) -> float:
    """GB/s, read and written."""
    copies = {name: torch.empty_like(leaf) for name, leaf in w.items()}
    return 2 * size / fastest(lambda: [copies[name].copy_(leaf) for name, leaf in w.items()], 5) / 1e9


def matmul_rate(size: int = 2048) -> float:
    """GFLOP/s in float32 on all cores."""
    a = torch.randn(size, size)
    return 2 * size**3 / fastest(lambda: a @ a, 8) / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    asked, found = parser(__doc__).parse_args(arguments), Found()
    rate = matmul_rate(256 if asked.quick else 2048)
    found.add("matmul, float32", "", f"{rate:.0f} GFLOP/s")
    attention(found, 10 if asked.quick else 1000, rate)
    gaussians(found, *((4, 60, 5, 16) if asked.quick else (50, 1842, CLASSES, DIM)))
    means(found, 4 if asked.quick else 100)
    notes = [f"{torch.get_num_threads()} threads."]
    columns = ["", "time", "measured"]
    return tell(asked, "Server steps", columns, found.rows, found.targets, by_target(found.targets), notes=notes)


if __name__ == "__main__":
    sys.exit(main())
