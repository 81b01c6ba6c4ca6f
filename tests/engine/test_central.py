"""One server: what it sends, counts and tells."""

import torch

from coterie.core import tree
from coterie.core.method import Population
from coterie.engine import Central
from coterie.methods import Ditto, FedAvg

PARAMS = {"w": torch.arange(3.0)}


def test_everybody_is_sent_the_servers_model_and_bytes_count_both_ways():
    place, method, ids = Central(), FedAvg(), torch.tensor([0, 2])
    server = place.start(method, PARAMS, Population(3, 2))
    down = place.send(method, method.dispatch, server, ids, lambda: torch.Generator().manual_seed(0))
    assert all(len(leaf) == 2 for leaf in tree.leaves(down))
    # Clients send a message of another size: the model and something more.
    assert place.traffic(method, ids, (down, torch.zeros(2)), down) == (2 * (3 * 4 + 4), 2 * 3 * 4)


def test_a_model_for_everybody_beside_the_clients_own_is_a_row_for_each():
    place = Central()
    rows = place.models(Ditto(), place.start(Ditto(), PARAMS, Population(4, 4)), 4)
    assert rows["w"].tolist() == [[0.0, 1.0, 2.0]] * 4
    assert place.models(FedAvg(), place.start(FedAvg(), PARAMS, Population(4, 4)), 4) is None
