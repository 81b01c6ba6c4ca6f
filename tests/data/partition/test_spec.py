import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import ConfigError, DataError
from coterie.data.partition import PARTITIONS, check_spec, classes, clusters, deal, dirichlet, iid, shards
from coterie.data.partition.spec import CLIENTS

from .kit import check, same

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))
OWNER = np.random.default_rng(1).integers(20, size=2_000)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("iid", lambda: iid(2_000, 8, 3)),
        ("dirichlet:0.3", lambda: dirichlet(LABELS, 8, 0.3, 3, 10)),
        ("dirichlet:0.3:min=40", lambda: dirichlet(LABELS, 8, 0.3, 3, 40)),
        ("dirichlet:min=40:alpha=0.3", lambda: dirichlet(LABELS, 8, 0.3, 3, 40)),
        ("dirichlet:0.3:40", lambda: dirichlet(LABELS, 8, 0.3, 3, 40)),
        ("classes:2", lambda: classes(LABELS, 8, 2, 3)),
        ("classes:3:each=10", lambda: classes(LABELS, 8, 3, 3, 10)),
        ("shards:2", lambda: shards(LABELS, 8, 2, 3)),
        ("clusters:4:0.4", lambda: clusters(LABELS, 8, 4, 0.4, 3)),
    ],
)
def test_a_specification_is_the_function(spec, expected):
    assert same(deal(spec, LABELS, 8, 3), expected())


SPECS = ["iid", "dirichlet:0.1", "clusters:3:0.4", "classes:2", "shards:2", "groups:4", "lognormal:2",
         "practical:3:sizes=90/60/30", "quantity:0.5", "natural", "merged:0.5:owners=2"]  # fmt: skip


def test_every_partition_is_tried_here():
    assert {spec.split(":")[0] for spec in SPECS} == set(PARTITIONS)


@pytest.mark.parametrize("spec", SPECS)
def test_every_partition_can_be_subsampled(spec):
    parts = deal(f"{spec}:share=0.5", LABELS, 6, 0, owner=OWNER)
    assert len(check(parts, 2_000, 6)) <= 1_000
    assert same(parts, deal(f"{spec}:take=1000", LABELS, 6, 0, owner=OWNER))


def test_a_quarter_is_a_quarter():
    """pFedVMP: 25 % of Fashion-MNIST for Dir(0.3), 50 % for Dir(0.1)."""
    for share in (0.25, 0.5, 1):
        assert len(check(deal(f"dirichlet:0.3:share={share}", LABELS, 5, 0), 2_000)) == 2_000 * share


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dirichle:0.3", "no partition 'dirichle'.*dirichlet:ALPHA.*natural"),
        ("dirichlet", "needs alpha: write dirichlet:ALPHA"),
        ("dirichlet:-1", "alpha = '-1': give a number above 0"),
        ("dirichlet:nan", "give a number above 0"),
        ("dirichlet:0.3:mni=4", "has no option 'mni' \\(did you mean 'min'\\?\\)"),
        ("dirichlet:0.3:min=4:7", "an extra value '7'"),
        ("dirichlet:0.3:alpha=1", "alpha twice"),
        ("classes:1.5", "whole number above 0"),
        ("iid:share=2", "a share above 0, up to 1"),
        ("iid:share=0.5:take=3", "share or take, not both"),
        ("practical:fedamp-svhn", "one of fedamp-emnist, fedamp-mnist"),
        ("practical:3", "needs sizes"),
        ("practical:fedamp-mnist", "has 62 clients with fixed sizes"),
        ("lognormal:2:rule=x", "give mnist or cifar"),
    ],
)
def test_a_wrong_specification_is_told(spec, words):
    with pytest.raises(ConfigError, match=words):
        deal(spec, LABELS, 8, 0)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_spec("clusters:x:y:min=0")
    assert len(caught.value.problems) == 3


def test_there_is_a_number_of_clients_where_none_is_given():
    assert len(deal("iid", LABELS, None, 0)) == CLIENTS
    assert len(deal("natural", LABELS, None, 0, owner=OWNER)) == len(np.unique(OWNER))


def test_what_the_data_cannot_do_is_told():
    with pytest.raises(DataError, match="name the owner of each example"):
        deal("natural", LABELS, None, 0)
    with pytest.raises(DataError, match="at least one client"):
        deal("iid", LABELS, 0, 0)
    with pytest.raises(DataError, match="one label per example"):
        deal("dirichlet:1", np.zeros((4, 2)), 2, 0)
    with pytest.raises(DataError, match="2000 labels but 3 owners"):
        deal("natural", LABELS, None, 0, owner=np.zeros(3))


@given(text=st.text("dirchletas:=0123456789.-/", max_size=25))
@settings(deadline=None, max_examples=150)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ConfigError):
        check_spec(text)
