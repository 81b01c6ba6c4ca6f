import pytest

from .inprocess import ledger, make
from .test_faults import RULES


def test_sites_whose_data_does_not_fit_are_named(tmp_path):
    from coterie.core.errors import DataError

    _, server, queue = make("fedavg", tmp_path, RULES, reference=False)
    own = queue.sites["c"].data
    queue.sites["c"].data = type(own)(own.name, own.x[:, :3], own.y, own.clients, own.num_classes)
    with pytest.raises(DataError, match=r"site 'c' has inputs of shape \(3,\).*'a' has \(5,\)"):
        server.run(ledger())
