import ast

import numpy as np
import pytest

from coterie.core.errors import ConfigError, DataError
from coterie.data.partition import check_spec, deal
from coterie.data.partition.user import checked

from .kit import check

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 40))
OWNER = np.random.default_rng(1).integers(10, size=200)
HERE = __name__


def by_scanner(owner, scanners: int):
    return {f"site {g}": np.flatnonzero(owner % scanners == g) for g in range(scanners)}


def halves(labels, clients, seed):
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.array_split(order, clients)


def given():
    return [[0, 1], [2]]


def fails(labels):
    return labels["scanner"]


def test_a_partition_gets_what_it_asks_for():
    parts = deal(f"{HERE}:by_scanner:3", LABELS, None, 0, owner=OWNER)
    assert list(parts) == ["site 0", "site 1", "site 2"]
    assert all(np.array_equal(part, np.flatnonzero(g == OWNER % 3)) for g, part in enumerate(parts.values()))
    halved = deal(f"{HERE}:halves", LABELS, 4, 7)
    assert len(check(halved, 200, 4)) == 200
    assert all(np.array_equal(a, np.sort(b)) for a, b in zip(halved, halves(LABELS, 4, 7), strict=True))
    assert len(deal(f"{HERE}:halves", LABELS, None, 0)) == 20, "as for the library's own"


def test_a_share_of_the_examples_is_taken_before():
    parts = deal(f"{HERE}:by_scanner:3:take=90", LABELS, None, 0, owner=OWNER)
    own = np.concatenate(list(parts.values()))
    assert len(own) == len(set(own)) == 90
    assert all((OWNER[part] % 3 == g).all() for g, part in enumerate(parts.values()))
    assert len(np.concatenate(deal(f"{HERE}:halves:share=0.1", LABELS, 2, 0))) == 20


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("[[0,1],[1,2]]", "example 1 went to 'client-1' and to 'client-2'"),
        ("{'a':[0,1],'b':[3,3]}", "client 'b' got example 3 twice"),
        ("{'a':[0,1],'b':[]}", "left client 'b' without examples"),
        ("[[0,200]]", r"client 'client-1' got example 200, but there are 0..199"),
        ("[[-1,2]]", "client 'client-1' got example -1"),
        ("[[0.5]]", "client 'client-1' got float64 of shape"),
        ("[[[0],[1]]]", "not a list of positions"),
        ("None", "returned nothing: it must return"),
        ("[]", "returned no clients: it must return"),
        ("3", "it must return the positions"),
    ],
)
def test_what_it_returns_is_checked(found, words):
    with pytest.raises(DataError, match=words):
        checked("ours:parts", ast.literal_eval(found), len(LABELS), None)


def test_the_number_of_clients_is_what_was_asked_for():
    assert [part.tolist() for part in deal(f"{HERE}:given", LABELS, None, 0)] == [[0, 1], [2]]
    with pytest.raises(DataError, match="made 2 clients, not 3"):
        checked("ours:parts", given(), len(LABELS), 3)
    with pytest.raises(ConfigError, match="has no parameter `clients`; leave this out"):
        deal(f"{HERE}:given", LABELS, 3, 0)


def test_mistakes_are_said_in_words():
    for spec, words in (
        (f"{HERE}:by_scanner", "needs scanners: write .*:by_scanner:SCANNERS"),
        (f"{HERE}:by_scanner:x", "scanners = 'x'"),
        (f"{HERE}:by_scanners:3", "cannot be imported"),
        (f"{HERE}:by_scanner:3:share=2", "share = '2'"),
        (f"{HERE}:by_scanner:3:share=0.5:take=3", "give share or take, not both"),
        ("dirichle:0.3", "no partition 'dirichle'.*package.module:function"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_spec(spec)
    with pytest.raises(DataError, match=r"partition '.*:fails' failed: IndexError: .*in fails: `return labels\["):
        deal(f"{HERE}:fails", LABELS, None, 0)


def test_a_package_adds_partitions(package_of):
    package_of("partition", **{"by-scanner": f"{HERE}:by_scanner", "iid": f"{HERE}:by_scanner"})
    assert list(deal("by-scanner:2", LABELS, None, 0, owner=OWNER)) == ["site 0", "site 1"]
    assert len(deal("iid", LABELS, 4, 0)) == 4, "ours come first"
