import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.partition import lognormal
from coterie.data.readers.pfedbred import authors_draws

from .kit import check, outcome, same, seeds


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=6), clients=st.integers(0, 12), slots=st.integers(0, 5),
    rule=st.sampled_from(["mnist", "cifar"]), seed=seeds,
)  # fmt: skip
@settings(deadline=None, max_examples=120)
def test_every_client_has_its_labels(sizes, clients, slots, rule, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    illegal = not (1 <= clients <= len(labels) and 1 <= slots <= len(sizes))
    parts, refusal = outcome(lambda: lognormal(labels, clients, slots, seed, rule))
    if parts is None:
        assert illegal or "this partition needs" in refusal
        return
    assert not illegal
    check(parts, len(labels), clients, 10 * slots)
    for client, part in enumerate(parts):
        own = [(client + slot) % len(sizes) for slot in range(slots)]
        assert set(labels[part]) == set(own)
        assert labels[part][: 10 * slots].tolist() == np.repeat(own, 10).tolist()
    assert same(parts, lognormal(labels, clients, slots, seed, rule))


def test_sizes_are_those_of_the_authors_generators():
    """MNIST: 59,229 of 70,000 images, 74 / 435 / 4,017 the least, median and most; CIFAR-10: 54,572, 1,150 to 4,536.
    Draws differ, so only the orders of magnitude are asked for."""
    mnist = [len(part) for part in lognormal(np.repeat(np.arange(10), 7_000), 100, 3, 0)]
    assert 30 <= min(mnist) < 200 < np.median(mnist) < 800 < max(mnist)
    assert 45_000 < sum(mnist) < 68_000
    cifar = [len(part) for part in lognormal(np.repeat(np.arange(10), 6_000), 20, 3, 0, "cifar")]
    assert 600 <= min(cifar) < 3_000 < max(cifar)
    assert 40_000 < sum(cifar) <= 60_000


def test_too_many_labels_are_refused():
    with pytest.raises(DataError, match="1 to 2 labels"):
        lognormal(np.repeat([0, 1], 500), 5, 3, 0)


MNIST_CLASSES = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)


def test_the_authors_draws_make_their_mnist_to_the_image():
    """What their generator prints: 59,229 images; 74, 435 and 4,017 of the smallest, median and largest user."""
    labels = np.repeat(np.arange(10), MNIST_CLASSES)
    parts = lognormal(labels, 100, 3, 0, draws=authors_draws("mnist", 0)[1])
    sizes = [len(part) for part in parts]
    assert (sum(sizes), min(sizes), np.median(sizes), max(sizes)) == (59_229, 74, 435, 4_017)
    check(parts, len(labels), 100, 30)
    first = np.flatnonzero(labels == 0)
    assert parts[0][:10].tolist() == first[:10].tolist()  # in the order of the files
    assert same(parts, lognormal(labels, 100, 3, 7, draws=authors_draws("mnist", 7)[1]))  # they seed everything


def test_the_authors_fashion_mnist_has_their_shares_and_draws_of_the_rest():
    labels = np.repeat(np.arange(10), 7_000)
    one, again, other = (
        [len(part) for part in lognormal(labels, 100, 2, 0, draws=authors_draws("fashion-mnist", seed)[1])]
        for seed in (0, 0, 1)
    )
    assert one == again != other
    assert np.corrcoef(np.log(one), np.log(other))[0, 1] > 0.4  # the shares are the same
    own = [len(part) for part in lognormal(labels, 100, 2, 1)]
    assert np.corrcoef(np.log(one), np.log(own))[0, 1] < 0.3
