"""Bytes in words."""

import pytest

from coterie.core.units import bytes_in_words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (12_345, "12.3 kB"), (5e6, "5 MB"), (1.5e12, "1.5e+03 GB")],
)
def test_bytes_have_three_digits_and_a_unit(number: float, words: str) -> None:
    assert bytes_in_words(number) == words
