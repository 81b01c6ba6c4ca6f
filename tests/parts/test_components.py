import torch
from torch import nn

from coterie.core.task import Task
from coterie.parts.components import chosen, different_models


def test_only_trained_tensors_are_shuffled():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    module[1].running_mean.copy_(torch.arange(5.0))
    task = Task(module, num_classes=3)
    params = task.init()
    models = different_models(params, 3, task)
    for name, value in models.items():
        assert torch.equal(value[0], params[name])
        assert torch.equal(value[1].flatten().sort().values, params[name].flatten().sort().values)
        shuffled = name in ("2.weight", "2.bias")
        assert torch.equal(value[1], params[name]) != shuffled, name
        assert torch.equal(value[1], value[2]) != shuffled, name


def test_without_a_task_everything_is_shuffled_the_same_everywhere():
    params = {"w": torch.arange(20.0)}
    first, again = (different_models(params, 2, None)["w"] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first[1], first[0])


def test_one_is_chosen_of_each_clients_models():
    models = {"w": torch.arange(12.0).reshape(2, 3, 2)}  # [clients, K, ...]
    picked = torch.func.vmap(chosen)(models, torch.tensor([2, 0]))
    assert picked["w"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
