"""A client that has no example left in a round, as when none is drawn under privacy, spoils nothing for the others."""

import pytest
import torch

from coterie import METHODS, testing
from coterie.core import tree
from coterie.core.method import Population


@pytest.mark.parametrize("name", METHODS)
def test_without_an_example_everything_stays_finite(name):
    method, task = METHODS[name](), testing.task(norm=False)
    params, batches = task.init(), testing.batches(1, METHODS[name]())
    server, client = method.init_server(params, Population(2, 2, task)), method.init_client(params)
    down = tree.rows(method.dispatch(server, torch.arange(2), torch.Generator()), 0)
    nobody = batches._replace(mask=0 * batches.mask)
    for leaf in tree.leaves(method.local_update(task, client, down, nobody)):
        assert not leaf.is_floating_point() or bool(torch.isfinite(leaf).all())
