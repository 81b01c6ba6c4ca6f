"""Folds: each example is held out once, in proportion to its class, and no test example is in any."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import DataError
from coterie.data.federation import Federation, Split, split_again
from coterie.deploy.site_data import one_client
from coterie.deploy.site_trials import fold_data
from coterie.experiment.tuning.folds import folds_of, pieces_of
from tests.experiment.tuning.kit import federation


def test_each_known_example_is_held_out_once_and_no_test_example_is_seen() -> None:
    given = federation("same", sites=3)
    folds = folds_of(given, 3, seed=5)
    assert len(folds) == 3
    for name, own in given.clients.items():
        known = np.sort(np.concatenate([own.train, own.validation]))
        held = np.sort(np.concatenate([fold.clients[name].test for fold in folds]))
        np.testing.assert_array_equal(held, known)
        for fold in folds:
            parts = fold.clients[name]
            everything = np.concatenate([parts.train, parts.validation, parts.test])
            np.testing.assert_array_equal(np.sort(everything), known)
            assert not np.intersect1d(everything, own.test).size
            share = given.y[torch.from_numpy(known)].float().mean()
            assert abs(given.y[torch.from_numpy(parts.test)].float().mean() - share) < 0.1
            assert len(parts.validation) == round(len(own.validation) / len(known) * (len(known) - len(parts.test)))


def test_folds_depend_on_the_seed_and_tiny_sites_have_fewer() -> None:
    given = federation("same", sites=2)
    one, again, other = (folds_of(given, 3, seed=seed)[0].clients["site-1"].test for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    tiny = coterie.from_clients([(torch.zeros(7, 1), torch.zeros(7).long())] * 2, validation=1, test=2)
    assert len(folds_of(tiny, 5, seed=0)) == 2
    less = coterie.from_clients([(torch.zeros(4, 1), torch.zeros(4).long())] * 2, validation=1, test=1)
    with pytest.raises(DataError, match="client 'client-1' has 3 examples beside those for testing"):
        folds_of(less, 3, seed=0)


def with_patients(seed: int = 0) -> Federation:
    """Two sites whose patients have one to six rows each, in any order."""
    draw = np.random.default_rng(seed)
    given = federation("same", sites=2, rows=80)
    groups = np.empty(len(given.y), np.int64)
    for own in given.clients.values():
        rows = draw.permutation(np.concatenate([own.train, own.validation, own.test]))
        groups[rows] = np.repeat(np.arange(80), draw.integers(1, 7, size=80))[:80]
    return split_again(dataclasses.replace(given, groups=groups), validation=0.2, test=0.2, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_patients_are_on_one_side_of_every_split(seed: int) -> None:
    given = with_patients(seed)
    folds = folds_of(given, 3, seed=seed)
    assert len(folds) == 3
    groups = given.groups
    assert groups is not None
    for name, own in given.clients.items():
        for split in (own, *(fold.clients[name] for fold in folds)):
            parts = [set(groups[part].tolist()) for part in (split.train, split.validation, split.test)]
            assert all(parts)
            assert sum(map(len, parts)) == len(set.union(*parts))
        known = np.sort(np.concatenate([own.train, own.validation]))
        held = [fold.clients[name].test for fold in folds]
        np.testing.assert_array_equal(np.sort(np.concatenate(held)), known)
        # A cut is at the end of a patient with at most six rows, so at most three from where it should be.
        assert all(abs(len(each) - len(known) / 3) <= 6 for each in held)
        for fold in folds:
            parts_of = fold.clients[name]
            rest = len(parts_of.train) + len(parts_of.validation)
            assert abs(len(parts_of.validation) - rest * len(own.validation) / len(known)) <= 6


def test_there_are_as_many_parts_as_patients_at_most() -> None:
    given = with_patients()
    few = dataclasses.replace(given, groups=np.minimum(given.groups, 4))  # type: ignore[type-var]
    own = few.clients["site-1"]
    number = len({*few.groups[np.concatenate([own.train, own.validation])].tolist()})  # type: ignore[index]
    assert [len(pieces_of(few, "site-1", k, 0)) for k in (1, number, number + 3)] == [1, number, number]
    one = dataclasses.replace(given, groups=np.zeros(len(given.y), np.int64))
    with pytest.raises(DataError, match="client 'site-1' has 1 groups of examples beside those for testing"):
        folds_of(one, 3, seed=0)


@pytest.mark.parametrize("seed", range(6))
def test_of_two_parts_with_a_patient_of_many_rows_each_can_be_divided(seed: int) -> None:
    groups = np.repeat(np.arange(5), [10, 1, 1, 1, 5])  # patients 0 to 3 are in two folds, the last one is for testing
    split = Split(*(np.flatnonzero(np.isin(groups, whose)) for whose in ([0, 1], [2, 3], [4])))
    given = Federation("one", torch.zeros(18, 1), torch.arange(18) % 2, {"a": split}, 2, groups=groups)
    folds = folds_of(given, 5, seed)
    assert len(folds) == 2
    for fold in folds:
        own = fold.clients["a"]
        whose = [set(groups[part].tolist()) for part in (own.train, own.validation, own.test)]
        assert [len(each) for each in whose] == [1, 1, 2]
        assert set.union(*whose) == {0, 1, 2, 3}


def test_at_a_site_folds_are_of_rows_since_the_server_knows_how_many_there_are() -> None:
    given = with_patients()
    own = one_client(given, "site-2")
    rows = given.clients["site-2"]
    here = np.sort(np.concatenate([rows.train, rows.validation, rows.test]))
    np.testing.assert_array_equal(own.groups, given.groups[here])  # type: ignore[index]
    blind = dataclasses.replace(own, groups=None)
    for fold, expected in enumerate(folds_of(blind, 3, seed=1), 1):
        found = fold_data(own, fold, 3, 1).clients["site-2"]
        for part in ("train", "validation", "test"):
            np.testing.assert_array_equal(found[part], expected.clients["site-2"][part])  # type: ignore[index]
