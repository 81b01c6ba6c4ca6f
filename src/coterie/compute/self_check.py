"""Does the fast path work on this machine? A tiny step is run on the plain back-end and on the compiled one."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from coterie.compute.availability import first_line, unavailable
from coterie.compute.compiled import Compiled, nothing_stored, observing, slowest
from coterie.core.backend import Backend, using
from coterie.core.batches import Batch, Batches
from coterie.core.plain import Plain
from coterie.core.scan import scan

CLIENTS, STEPS, BATCH, FEATURES = 3, 4, 5, 6
TOLERANCE = 1e-5  # relative and absolute, after a few float32 steps


class SelfCheck(NamedTuple):
    path: Literal["replayed", "compiled", "plain"]
    why: str  # in words, why it is not faster, or what went wrong; "" where all is well
    right: bool  # whether both back-ends agree
    seconds: float  # that it took, with compiling


def self_check() -> SelfCheck:
    """Run a few steps of least squares for three clients on both back-ends and compare the results."""
    cannot = unavailable()
    if cannot:
        return SelfCheck("plain", cannot, True, 0.0)
    begin = time.perf_counter()
    try:
        with observing() as seen, nothing_stored():  # compiling is what is checked
            expected, found = _train(Plain()), _train(Compiled())
    except Exception as error:  # whatever compiling raises beside what a compiled back-end catches
        return SelfCheck("plain", first_line(error), False, time.perf_counter() - begin)
    seconds, outcome = time.perf_counter() - begin, slowest(seen)
    assert outcome is not None  # there was a scan
    right = torch.allclose(expected, found, rtol=TOLERANCE, atol=TOLERANCE)
    why = outcome.why if right else "compiled steps give other results than plain ones"
    return SelfCheck(outcome.path, why, right, seconds)


def _train(backend: Backend) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * BATCH * STEPS, FEATURES, generator=draw)
    index = torch.arange(len(x)).view(CLIENTS, 1, STEPS, BATCH)
    mask = torch.ones(index.shape)
    mask[0, :, -1] = 0  # the first client has a step less
    key = torch.zeros(index.shape[:-1], dtype=torch.int64)
    y = x.sum(1)
    batches = Batches(x, y, index, mask, key, torch.full((CLIENTS,), float(BATCH * STEPS)))
    shared = Batches(None, None, 0, 0, 0, 0)  # type: ignore[arg-type]
    with using(backend), torch.no_grad():
        train = vmap(lambda w, mine: scan(_step, w, torch.tensor(0.01), mine), in_dims=(0, shared))
        return train(torch.zeros(CLIENTS, FEATURES), batches)  # type: ignore[no-any-return]


def _step(w: Any, lr: Any, batch: Batch) -> Any:
    error = (batch.x @ w - batch.y) * batch.mask
    return w - lr * error @ batch.x
