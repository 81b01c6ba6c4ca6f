import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.data import duplicates
from coterie.data.duplicates import first_equal


@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=0, max_size=12), st.booleans())
def test_agrees_with_looking_at_every_pair(rows, floats):
    x = torch.tensor(rows, dtype=torch.float32 if floats else torch.uint8).reshape(len(rows), 3)
    assert first_equal(x).tolist() == [rows.index(row) for row in rows]


def test_equal_hashes_are_no_proof(monkeypatch):
    monkeypatch.setattr(duplicates, "_hashes", lambda rows: np.zeros(len(rows), np.uint64))
    assert first_equal(torch.tensor([[1], [2], [1], [3], [2]])).tolist() == [0, 1, 0, 3, 1]


def test_more_examples_than_are_hashed_at_once():
    x = torch.arange(10_000, dtype=torch.int64)[:, None].repeat(1, 5)
    x[9_999] = x[3]
    first = first_equal(x)
    assert first[9_999] == 3
    assert np.array_equal(first[:-1], np.arange(9_999))
