"""Which part of a model a newcomer trains, of all methods that say so: what is its own, as far as it can be trained."""

import pytest
import torch

from coterie import METHODS, testing
from coterie.core import tree
from coterie.core.method import Newcomer, Population
from coterie.core.task import Task

HEAD, BODY = {"2.weight", "2.bias"}, {"0.weight", "0.bias"}
OWN = {**dict.fromkeys(("fedper", "fedrep", "fedcp", "fedpac", "gpfl", "pfedvmp"), HEAD), "lg-fedavg": BODY}


def trains(name, module):
    method, task = METHODS[name](), Task(module, num_classes=3)
    params = task.init()
    server = method.init_server(params, Population(3, 3, task))
    down = method.dispatch(server, torch.tensor([2]), torch.Generator())
    client = method.init_client(params)
    _, up, _ = method.local_update(task, client, tree.rows(down, 0), testing.batches(2, method))
    ups = tree.map(lambda leaf: leaf[None], up)
    return method.onboard(task, Newcomer(server, params), torch.tensor([2]), ups).only


@pytest.mark.parametrize("name", OWN)
def test_a_newcomer_trains_what_can_be_trained_of_its_own_part(name):
    module = testing.module(norm=False)
    weight, bias = sorted(OWN[name], reverse=True)
    assert trains(name, module) == {weight, bias}
    module.get_parameter(bias).requires_grad_(False)
    assert trains(name, module) == {weight}
    module.get_parameter(weight).requires_grad_(False)
    assert trains(name, module) is None  # whatever everybody trains
