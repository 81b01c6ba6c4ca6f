"""The stacked engine calls a function once, for all clients."""

import pytest
import torch

from coterie.engine.loop import loop
from coterie.engine.stacked import stacked

from .test_loop import batches


def test_one_call_does_what_a_loop_does():
    calls = []

    def fn(state, batches):
        calls.append(1)
        return {"sum": state["w"] + batches.x[batches.index].sum()}

    rows = ({"w": torch.tensor([1.0, 2.0, 3.0])},)
    together = stacked(fn, rows, batches())
    assert len(calls) == 1
    assert torch.equal(together["sum"], loop(fn, rows, batches())["sum"])


def test_a_model_that_draws_random_numbers_of_its_own_is_refused():
    with pytest.raises(RuntimeError, match="random"):
        stacked(lambda _: torch.rand(4), (), batches())
