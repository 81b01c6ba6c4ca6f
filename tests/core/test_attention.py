"""Attention in matrix products is PyTorch's, masks, groups and all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, vmap

from coterie.core.attention import AttentionInProducts
from coterie.core.dropout import KeyedDropout

torch.manual_seed(0)
Q, K, V = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 7, 6), torch.randn(2, 4, 7, 3)
LOOK = torch.rand(2, 1, 5, 7) > 0.4
LOOK[0, 0, 2] = False  # may look at nothing


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": LOOK},
        {"attn_mask": torch.randn(5, 7)},
        {"is_causal": True},
        {"scale": 0.3},
    ],
)
def test_it_is_pytorchs(options):
    expected = F.scaled_dot_product_attention(Q, K, V, **options)
    with AttentionInProducts():
        torch.testing.assert_close(F.scaled_dot_product_attention(Q, K, V, **options), expected)


def test_heads_in_groups():
    expected = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)
    with AttentionInProducts():
        found = F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention_and_its_gradients_are_pytorchs(weights):
    module, x = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True), torch.randn(3, 5, 6)
    padding = torch.tensor([5, 2, 4])[:, None] <= torch.arange(5)

    def gradients():
        out = module(x, x, x, key_padding_mask=padding, need_weights=weights)[0]
        return out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))

    expected = gradients()
    with KeyedDropout(torch.tensor(1)):
        found = gradients()
    torch.testing.assert_close(found, expected)


def test_weights_are_dropped_by_key_alone_or_stacked():
    module, x = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True), torch.randn(3, 5, 6)
    params, keys = dict(module.named_parameters()), torch.tensor([11, 12])

    def out(key):
        with KeyedDropout(key):
            return functional_call(module, params, (x, x, x), {"need_weights": False})[0]

    alone = torch.stack([out(key) for key in keys])
    assert torch.equal(alone[0], out(keys[0]))
    assert not torch.allclose(*alone)
    torch.testing.assert_close(vmap(out, randomness="error")(keys), alone)
