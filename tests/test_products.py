import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from coterie.products import FEW, rearrange

aten = torch.ops.aten


def traced(function, *inputs):
    graph = make_fx(function)(*inputs)
    rearrange(graph)
    return graph


def turned_over(graph):
    """Products whose second factor is a transpose of something: what `rearrange` removes."""
    products = [n for n in graph.graph.nodes if n.target in (aten.mm.default, aten.bmm.default, aten.addmm.default)]
    return [n for n in products if n.args[-1].target in (aten.t.default, aten.transpose.int)]


def layer(weight, bias, x):
    return torch.nn.functional.linear(x, weight, bias)


def test_a_linear_layer_is_the_same_numbers_in_another_layout():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(7, 5), torch.randn(7), torch.randn(3, 5)
    graph = traced(layer, weight, bias, x)
    assert not turned_over(graph)
    assert sum(node.target is aten.clone.default for node in graph.graph.nodes) == 1
    torch.testing.assert_close(graph(weight, bias, x), layer(weight, bias, x))


def test_stacked_clients_and_their_gradients_too():
    torch.manual_seed(1)
    weight, bias, x = torch.randn(4, 7, 5), torch.randn(4, 7), torch.randn(4, 3, 5)
    gradient = vmap(grad(lambda w, b, x: layer(w, b, x).square().sum(), argnums=(0, 1)))
    graph = traced(gradient, weight, bias, x)
    for ours, theirs in zip(graph(weight, bias, x), gradient(weight, bias, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    # The forward product is rearranged; the gradient's, whose first factor is the one turned over, is left alone.
    assert sum(node.target is aten.clone.default for node in graph.graph.nodes) == 1


def test_what_is_turned_over_twice_and_what_has_many_rows_is_left_alone():
    torch.manual_seed(2)
    x, weight = torch.randn(3, 5), torch.randn(5, 7)
    assert not [n for n in traced(lambda x, w: x @ w.t().t(), x, weight).graph.nodes if n.target is aten.clone.default]
    many, weight = torch.randn(FEW + 1, 5), torch.randn(7, 5)
    graph = traced(lambda x, w: x @ w.t(), many, weight)
    assert len(turned_over(graph)) == 1
    torch.testing.assert_close(graph(many, weight), many @ weight.t())


def test_products_in_a_row_are_all_rearranged():
    torch.manual_seed(3)
    x, first, second = torch.randn(3, 5), torch.randn(6, 5), torch.randn(2, 6)
    graph = traced(lambda x, a, b: torch.relu(x @ a.t()) @ b.t(), x, first, second)
    assert not turned_over(graph)
    torch.testing.assert_close(graph(x, first, second), torch.relu(x @ first.t()) @ second.t())
