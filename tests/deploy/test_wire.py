import pytest
import torch

from coterie.core import tree
from coterie.deploy import wire
from coterie.deploy.refused import Refused


def test_bodies_are_as_small_as_what_is_new_in_them():
    model = {"w": torch.randn(50, 20), "b": torch.zeros(50)}
    one = wire.encode({"train": model})
    assert len(wire.encode({"train": model, "deploy": model})) < len(one) + 150
    rows = torch.cat([torch.randn(3, 40), torch.zeros(97, 40)])
    body = wire.encode((rows,))
    assert len(body) < 4 * 40 * 4 + 250
    assert torch.equal(wire.decode(body, (torch.empty(100, 40),))[0], rows)


CONTENTS = [
    (),
    {"a": torch.tensor(1.5)},
    (torch.tensor([True, False]), {"n": torch.arange(5)}),
    {"z": torch.zeros(0, 3)},
    {"minus": torch.cat([torch.zeros(40, 4), -torch.zeros(40, 4)])},
    {"half": torch.ones(70, 2).half()},
]


@pytest.mark.parametrize("content", CONTENTS)
def test_bodies_come_back_to_the_bit(content):
    back = wire.decode(wire.encode(content), content)
    for one, other in zip(tree.leaves(content), tree.leaves(back), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        if one.is_floating_point():
            assert torch.equal(torch.signbit(one), torch.signbit(other))


def test_rows_that_are_counted_wrong_are_refused():
    rows = torch.zeros(100, 40)
    for counts in ("[101]", "[-1,101]", "[50,50,50]", '"x"', "[1e9]", "[true]"):
        body = wire.encode((rows,)).replace(b"[100]", counts.encode())
        size = int.from_bytes(body[:8], "little") + len(counts) - 5
        with pytest.raises(Refused):
            wire.decode(size.to_bytes(8, "little") + body[8:], (rows,))
