import dataclasses
from collections import Counter

import numpy as np
import pytest

from coterie.core import rng
from coterie.core.errors import ConfigError
from coterie.engine.samplers import SAMPLERS, BySize, RoundRobin, Sampler, Turnout, Uniform

NAMES = ("north", "east", "south", "west", "middle")
SIZES = (10, 20, 30, 40, 100)


def rounds(sampler, number, names=NAMES, sizes=SIZES, seed=3, times=40) -> list[set[str]]:
    turnout = Turnout(sampler, names, sizes, number, seed)
    return [{names[i] for i in turnout.of(round)} for round in range(1, times + 1)]


@pytest.mark.parametrize("sampler", SAMPLERS.values())
@pytest.mark.parametrize("number", [1, 3, 5])
def test_so_many_take_part_by_name_whatever_their_order(sampler, number):
    found = rounds(sampler(), number)
    assert {len(each) for each in found} == {number}
    order = [3, 1, 4, 0, 2]
    assert found == rounds(sampler(), number, [NAMES[i] for i in order], [SIZES[i] for i in order])
    assert number == 5 or found != rounds(sampler(), number, seed=4)


def test_uniform_is_as_it_always_was():
    """Each draws a hash of (seed, "participation", round, name); the smallest take part."""
    for round, who in enumerate(rounds(Uniform(), 2), 1):
        tickets = {name: rng.seed_of(3, "participation", round, name) for name in NAMES}
        assert who == set(sorted(NAMES, key=tickets.__getitem__)[:2])


def test_by_size_draws_in_proportion_to_the_examples():
    """One of 5, in 4000 rounds: shares n_i / n, with deviations of sqrt(p (1 - p) / 4000) < 0.008."""
    counts = Counter(name for who in rounds(BySize(), 1, times=4000) for name in who)
    shares = [counts[name] / 4000 for name in NAMES]
    np.testing.assert_allclose(shares, np.array(SIZES) / sum(SIZES), atol=0.03)


def test_by_size_without_the_first_is_by_size_among_the_others():
    """Two of the sizes 1, 1 and 2: the pair of the small ones has the chance 2 * 1/4 * 1/3 = 1/6."""
    both = rounds(BySize(), 2, ("a", "b", "c"), (1, 1, 2), times=4000)
    assert sum(who == {"a", "b"} for who in both) / 4000 == pytest.approx(1 / 6, abs=0.03)


def test_in_turns_nobody_is_two_rounds_ahead():
    counts: Counter = Counter()
    for round, who in enumerate(rounds(RoundRobin(), 2), 1):
        counts.update(who)
        assert max(counts.values()) - min(counts[name] for name in NAMES) <= 1, round


def test_a_function_or_a_class_of_ones_own_may_ask_fewer():
    def largest(clients, number, round, seed):
        assert list(clients) == sorted(NAMES)
        return sorted(clients, key=clients.__getitem__)[-number:]

    assert rounds(largest, 2, times=1) == [{"middle", "west"}]

    @dataclasses.dataclass(frozen=True)
    class Awake(Sampler):
        at: int = 2

        def __call__(self, clients, number, round, seed):
            return [name for i, name in enumerate(clients) if (i + round) % self.at == 0][:number]

    assert [len(each) for each in rounds(Awake(), 5, times=2)] == [2, 3]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda clients, number, round, seed: [0], r"returns 0: return names of clients, such as 'east'"),
        (lambda clients, number, round, seed: ["nobody"], r"in round 1 it returns 'nobody'"),
        (lambda clients, number, round, seed: [], r"returns 0 names"),
        (lambda clients, number, round, seed: ["east", "east"], r"returns 2 names, 1 of them different"),
        (lambda clients, number, round, seed: list(clients), r"at least one and at most 2"),
        (lambda clients: [], r"it fails in round 1: TypeError"),
    ],
)
def test_what_is_no_sample_is_said_in_words(sampler, words):
    with pytest.raises(ConfigError, match=words):
        Turnout(sampler, NAMES, SIZES, 2, 0).of(1)
