import pytest
import torch
from torch import nn
from torch.func import vmap

from coterie import heads, native
from coterie.task import Task


@pytest.mark.parametrize("bias", [True, False])
def test_a_faster_head_says_the_same_and_users_get_a_plain_one(bias):
    draw = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(heads.LONG, 10, bias=bias))
    task = Task(module, num_classes=10)
    assert any(isinstance(layer, heads.FewOutputs) for layer in task._eval.modules())
    x = torch.randn(heads.MANY, heads.LONG, generator=draw)
    for rows in (heads.MANY, 3):
        torch.testing.assert_close(task.logits(task.init(), x[:rows]), module(x[:rows]), rtol=1e-5, atol=1e-6)
        with native.own_products(True):
            own = task.logits(task.init(), x[:rows])
        torch.testing.assert_close(own, module(x[:rows]), rtol=1e-5, atol=1e-6)
    two = {name: torch.stack([value, -value]) for name, value in task.init().items()}
    torch.testing.assert_close(vmap(task.logits, (0, None))(two, x)[0], module(x), rtol=1e-5, atol=1e-6)
    assert type(task.module(task.init())[1]) is nn.Linear
    assert type(module[1]) is nn.Linear


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
def test_our_own_product_rounds_a_row_alike_in_any_company():
    draw = torch.Generator().manual_seed(0)
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(300, 10)), num_classes=10)
    x = torch.randn(150, 300, generator=draw)
    with native.own_products(True):
        whole, part = task.logits(task.init(), x), task.logits(task.init(), x[37:137])
    assert torch.equal(whole[37:137], part)
