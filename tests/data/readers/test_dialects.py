"""The villages' reports mean what the docstring says."""

import numpy as np
from sklearn.linear_model import LogisticRegression

from coterie.core import rng
from coterie.data.readers.dialects import (
    FIRST_DIALECT,
    FIRST_FILLER,
    FIRST_WORD,
    NOT,
    OPPOSITE,
    SAME_EVERYWHERE,
    SECOND_DIALECT,
    TEST,
    VALIDATION,
    VOCABULARY,
    WORDS,
    dialects,
    reports,
)


def meant(report, second):
    """Read a report as a villager does."""
    (word,) = [token for token in report if FIRST_WORD <= token < FIRST_FILLER]
    thing, number = divmod(word - FIRST_WORD, WORDS)
    turns = int(NOT in report) + int(second and number >= SAME_EVERYWHERE)
    return OPPOSITE[thing] if turns == 1 else thing


def test_a_villager_understands_every_report():
    for second in (False, True):
        x, y = reports(rng.generator("test", second), 300, second=second)
        assert [meant(report, second) for report in x] == y.tolist()
        assert x.max() < VOCABULARY
        assert {int(length) for length in (x > 0).sum(1)} == {5, 6, 7, 8, 9, 10}
        assert all((report[: (report > 0).sum()] > 0).all() for report in x)  # padding comes last


def test_sizes_and_seeds():
    one, same, other = (dialects("dialects", seed, 0.1, 0.3) for seed in (0, 0, 1))
    for client, train in {**FIRST_DIALECT, **SECOND_DIALECT}.items():
        split = one.clients[client]
        assert (len(split.train), len(split.validation), len(split.test)) == (train, VALIDATION, TEST)
    assert np.array_equal(one.x, same.x)
    assert not np.array_equal(one.x, other.x)


def test_no_sum_of_scores_for_words_tells_the_class():
    x, y = reports(rng.generator("sums"), 4000, second=False)
    words = np.stack([(x == token).sum(1) for token in range(1, VOCABULARY)], 1)
    model = LogisticRegression(max_iter=500).fit(words[:3000], y[:3000])
    assert model.score(words[3000:], y[3000:]) < 0.6
