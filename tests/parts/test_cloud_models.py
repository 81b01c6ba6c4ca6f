from types import SimpleNamespace

import torch

from coterie.core.method import Newcomer
from coterie.parts import cloud_models


def test_a_newcomer_begins_at_the_mean_of_those_heard_and_keeps_its_statistics():
    """(1 + 3) / 2 = 2, since the third was not heard; what the server does not hold stays the newcomer's."""
    rows = torch.tensor([[1.0], [3.0], [100.0], [0.0]])
    server = SimpleNamespace(w={"weight": rows}, heard=torch.tensor([True, True, False, False]))
    newcomer = Newcomer(server, {"weight": torch.zeros(1), "running_mean": torch.tensor([7.0])})

    def aggregate(server, ids, ups):
        return ids.tolist(), ups["weight"].tolist()

    method = SimpleNamespace(aggregate=aggregate)
    found = cloud_models.onboard(method, None, newcomer, torch.tensor([3]), None)
    assert found.server == ([3], [[2.0]])
    assert {name: value.tolist() for name, value in found.params.items()} == {"weight": [2.0], "running_mean": [7.0]}
