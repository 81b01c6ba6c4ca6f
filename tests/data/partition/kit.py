"""What every partition must keep to."""

import numpy as np
from hypothesis import strategies as st

from coterie.core.errors import DataError

seeds = st.integers(0, 50)


@st.composite
def labelled(draw, most=300, classes=8):
    """Labels of any balance, some classes rare or absent, in any order, not necessarily 0, 1, ..."""
    sizes = draw(st.lists(st.integers(0, most // classes), min_size=1, max_size=classes))
    labels = np.repeat(np.arange(len(sizes)) * draw(st.integers(1, 3)) + draw(st.integers(0, 2)), sizes)
    return np.random.default_rng(draw(st.integers(0, 10))).permutation(labels)


def check(parts, size, clients=None, least=1):
    """Every example at most once, no client below `least`, positions sorted or not but whole and in range."""
    together = np.concatenate(parts)
    assert together.dtype == np.int64
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < size
    assert min(map(len, parts)) >= least
    if clients is not None:
        assert len(parts) == clients
    return together


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def outcome(deal):
    """(parts, "") or (None, why it was refused)."""
    try:
        return deal(), ""
    except DataError as error:
        return None, str(error)
