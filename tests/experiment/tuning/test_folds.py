"""Folds: each example is held out once, in proportion to its class, and no test example is in any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import coterie
from coterie.core.errors import DataError
from coterie.experiment.tuning.folds import folds_of
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
