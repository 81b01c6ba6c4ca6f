"""How a message becomes words and a sum becomes the message that stands for all, by hand."""

import pytest
import torch

from coterie.core.method import CountedParams
from coterie.deploy.federation_facts import FederationFacts
from coterie.deploy.refused import Refused
from coterie.deploy.secure import masks
from coterie.deploy.secure.agreement import Form
from coterie.methods import FedAvg

FACTS = FederationFacts(size=4, audience=4, shape=(2,), y_shape=(), classes=2, largest=100)


def message(*values: float, count: float) -> CountedParams:
    return CountedParams({"w": torch.tensor(values, dtype=torch.float32)}, torch.tensor(count))


FORM = Form.of(FedAvg(), message(0.0, 0.0, count=1.0), FACTS)


def test_a_sum_is_the_weighted_mean_by_hand():
    """(1 * (1, -2) + 3 * (5, 2)) / 4 = (4, 1), and each weighs 2 of 4."""
    assert FORM.bits == 36  # floor(45 - log2(4 * 102))
    assert FORM.length == 3
    words = [FORM.encode(message(1, -2, count=1.0), 1, 10), FORM.encode(message(5, 2, count=3.0), 3, 10)]
    up = FORM.decode(masks.total(words, 3), [1, 3], 10)
    assert up.params["w"].tolist() == [4.0, 1.0]
    assert up.count == 2.0


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (message(float("nan"), 0, count=1.0), "not-finite"),
        (message(1, 1, count=2.0), "bad-count"),
        (message(1, 1, count=-1.0), "bad-count"),
        (message(30, 40, count=1.0), "norm"),
    ],
)
def test_a_site_refuses_what_a_server_would(given, code):
    with pytest.raises(Refused) as refused:
        FORM.encode(given, 1, 10)
    assert refused.value.code == code


def test_a_site_refuses_what_is_out_of_range():
    with pytest.raises(Refused, match="a value of 70000, where at most 65536 is possible") as refused:
        FORM.encode(message(70_000, 0, count=1.0), 1, 1e6)
    assert refused.value.code == "range"


def test_a_sum_that_cannot_be_is_refused():
    one = FORM.encode(message(6, 8, count=3.0), 3, 11)
    with pytest.raises(Refused, match=r"weights that add up to 3, where 0 to 2\.04 is possible"):
        FORM.decode(one, [2], 10)
    with pytest.raises(Refused, match="above the bound 9"):
        FORM.decode(one, [3], 9)
    nothing = masks.total([], 3)
    with pytest.raises(Refused, match="weights that add up to 0"):
        FORM.decode(nothing, [3], 10)
    nothing[-1] = 2**10
    with pytest.raises(Refused, match="too little for fixed point"):
        FORM.decode(nothing, [3], 10)
