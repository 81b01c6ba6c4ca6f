"""Tensors come out of shared memory as they went in."""

from __future__ import annotations

import pytest
import torch

from coterie.engine.process_pool import can_fork
from coterie.engine.shared_message import SharedMessage

pytestmark = pytest.mark.skipif(not can_fork(), reason="shared memory without a name needs Linux")


def test_a_message_holds_all_kinds_of_tensors() -> None:
    message = SharedMessage()
    given = [
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(7),
        torch.arange(12.0).reshape(3, 4).T,
        torch.ones(1).expand(5, 1000).to(torch.bfloat16),
    ]
    message.write({"name": "x"}, given)
    about, got = message.read()
    assert about["name"] == "x"
    for ours, theirs in zip(got, given, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_what_is_given_twice_is_written_once_and_comes_out_alike() -> None:
    message, value, nothing = SharedMessage(), torch.randn(1000), torch.empty(0)
    given = [nothing, value, value[:500], nothing, value, value.view(10, 100), value.expand(4, -1)]
    message.write({}, given)
    _, found = message.read()
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
    assert found[1].data_ptr() == found[4].data_ptr() != found[2].data_ptr()
