import pytest
import torch

from coterie.core import tree
from coterie.parts import attention


def rows(size: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (7, 3), "bias": (7,), "scale": ()}
    return {name: torch.randn(size, *shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


def flat(models: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in models.values()], 1)


@pytest.mark.parametrize("wide", [attention.MIN_PIECE_PARAMETERS, 4])  # all at once, and four parameters at a time
def test_pairs_are_those_of_a_loop(monkeypatch, wide):
    monkeypatch.setattr(attention, "PIECE_BYTES", 0)
    monkeypatch.setattr(attention, "MIN_PIECE_PARAMETERS", wide)
    models = rows()
    singles = [tree.rows(models, i) for i in range(5)]
    distances = torch.stack([torch.stack([tree.sqdist(a, b) for b in singles]) for a in singles])
    cosines = torch.stack([torch.stack([tree.cosine(a, b) for b in singles]) for a in singles])
    torch.testing.assert_close(attention.squared_distances(models), distances)
    torch.testing.assert_close(attention.cosines(models), cosines)


def test_what_is_mirrored_is_what_would_have_been_computed():
    """More rows than a block has; (i, j) and (j, i) are the same number."""
    models = rows(150, torch.float32)
    x = flat(models)
    for found in (attention.squared_distances(models), attention.cosines(models)):
        assert torch.equal(found, found.T)
    torch.testing.assert_close(attention.squared_distances(models), ((x[:, None] - x[None]) ** 2).sum(2))


def test_close_models_far_from_the_origin_keep_their_distances():
    """Without centring, ||w||^2 = 3e9 is rounded to 5e-7, which distances of 1e-2 would show in the fifth digit."""
    models = tree.map(lambda leaf: 1e4 + 0.02 * leaf, rows())
    x = flat(models)
    exact = ((x[:, None] - x[None]) ** 2).sum(2)
    assert float(exact.max()) < 0.1
    found = attention.squared_distances(models)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=0)
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(5, dtype=torch.float64))


def test_equal_models_are_at_distance_zero_and_a_zero_model_has_cosine_zero():
    models = tree.map(lambda leaf: leaf[:1].expand(4, *leaf.shape[1:]), rows(dtype=torch.float32))
    assert torch.equal(attention.squared_distances(models), torch.zeros(4, 4, dtype=torch.float64))
    models = tree.map(lambda leaf: leaf.index_fill(0, torch.tensor([2]), 0.0), rows())
    assert torch.equal(attention.cosines(models)[2], torch.zeros(5, dtype=torch.float64))


def test_combine_is_a_product_with_the_rows():
    models, xi = rows(), torch.rand(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(flat(attention.combine(xi, models)), xi @ flat(models))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [20, 130])  # few rows, and many
def test_what_a_client_gets_does_not_depend_on_whom_else_it_is_asked_for(size, dtype):
    """Nor on its place among them; for long rows and for the few numbers of a bias."""
    draw = torch.Generator().manual_seed(2)
    numbers = (1, 3, 7, 10, 47, 300, 2059)
    models = {str(n): torch.randn(size, n, generator=draw).to(dtype) for n in numbers}
    models["steps"] = torch.arange(size)
    xi = torch.softmax(torch.randn(size, size, generator=draw, dtype=torch.float64), 1)
    everyone = attention.combine(xi, models)
    for name, value in models.items():
        expected = xi @ value.reshape(size, -1).double()
        found = everyone[name].reshape(size, -1)
        if name == "steps":
            assert torch.equal(found, expected.round().long())
        else:
            torch.testing.assert_close(found, expected.to(dtype))
    for count in (1, 2, 5, 8, 13, 20):
        ids = torch.randperm(size, generator=draw)[:count]
        for name, found in attention.combine(xi[ids], models).items():
            assert torch.equal(found, everyone[name][ids]), (name, count)


def test_typical_is_the_median_over_pairs_that_were_heard():
    pairwise = torch.tensor([[0, 1, 5, 50], [1, 0, 3, 60], [5, 3, 0, 70], [50, 60, 70, 0]], dtype=torch.float64)
    heard = torch.tensor([True, True, True, False])
    assert attention.typical_value(attention.heard_pairs(pairwise, heard)) == 3  # of 1, 3, 5
    alone = torch.tensor([False, False, False, True])
    assert attention.typical_value(attention.heard_pairs(pairwise, alone)) == 50  # of 0, 50, 60, 70
    assert attention.typical_value(attention.heard_pairs(torch.zeros(4, 4), heard)) == 1
    mostly_equal = torch.zeros(3, 3)
    mostly_equal[0, 1] = mostly_equal[1, 0] = 6.0
    everyone = torch.ones(3, dtype=torch.bool)
    assert attention.typical_value(attention.heard_pairs(mostly_equal, everyone)) == 2  # the mean of 6, 0, 0


def test_nobody_attends_to_itself_or_to_those_never_heard():
    expected = torch.tensor([[False, False, True], [True, False, True], [True, False, False]])
    assert torch.equal(attention.attention_mask(torch.tensor([True, False, True])), expected)
