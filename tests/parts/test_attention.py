import pytest
import torch

from coterie import attention, native, tree


def rows(size: int = 5, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (7, 3), "bias": (7,), "scale": ()}
    return {name: torch.randn(size, *shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


def flat(models: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in models.values()], 1)


def test_models_that_have_nearly_diverged_are_compared_by_our_own_code_too() -> None:
    rows = {"w": torch.tensor([[1.0e38], [1.1e38], [1.2e38], [1.3e38]])}
    with native.own_products(True):
        found = attention.squared_distances(rows)
    torch.testing.assert_close(found, attention.squared_distances(rows))
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("wide", [attention.WIDE, 4])  # all at once, and four parameters at a time
def test_pairs_are_those_of_a_loop(monkeypatch, wide):
    monkeypatch.setattr(attention, "NEAR_BYTES", 0)
    monkeypatch.setattr(attention, "WIDE", wide)
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
    """Nor on its place among them; whole lanes, what is left of them, and the few numbers of a bias."""
    draw = torch.Generator().manual_seed(2)
    numbers = (1, 3, 7, 10, 47, 300, attention.LANES * attention.LANE + 11)
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


def test_many_rows_are_combined_alike_on_all_processors(monkeypatch):
    draw = torch.Generator().manual_seed(4)
    models = {"weight": torch.randn(attention.MANY, attention.LANES * attention.LANE + 300, generator=draw)}
    xi = torch.softmax(torch.randn(9, attention.MANY, generator=draw, dtype=torch.float64), 1)
    found = []
    for maker in (True, False):
        monkeypatch.setattr(attention, "intel", lambda maker=maker: maker)
        found.append(attention.combine(xi, models)["weight"])
    torch.testing.assert_close(*found)


def test_typical_is_the_median_over_pairs_that_were_heard():
    pairwise = torch.tensor([[0, 1, 5, 50], [1, 0, 3, 60], [5, 3, 0, 70], [50, 60, 70, 0]], dtype=torch.float64)
    heard = torch.tensor([True, True, True, False])
    assert attention.middle(attention.pairs(pairwise, heard)) == 3  # of 1, 3, 5
    alone = torch.tensor([False, False, False, True])
    assert attention.middle(attention.pairs(pairwise, alone)) == 50  # of 0, 50, 60, 70
    assert attention.middle(attention.pairs(torch.zeros(4, 4), heard)) == 1
    mostly_equal = torch.zeros(3, 3)
    mostly_equal[0, 1] = mostly_equal[1, 0] = 6.0
    everyone = torch.ones(3, dtype=torch.bool)
    assert attention.middle(attention.pairs(mostly_equal, everyone)) == 2  # the mean of 6, 0, 0


def test_nobody_attends_to_itself_or_to_those_never_heard():
    expected = torch.tensor([[False, False, True], [True, False, True], [True, False, False]])
    assert torch.equal(attention.others(torch.tensor([True, False, True])), expected)


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize(("size", "numbers"), [(1, 3), (3, 1), (5, 505), (20, 1300), (31, 20_000)])
def test_few_models_by_our_own_code(size, numbers):
    """31 x 20,000 are enough for a second thread; the results are those of one."""
    draw = torch.Generator().manual_seed(0)
    models = {"w": torch.randn(size, numbers, generator=draw) + 3, "b": torch.randn(size, 2, generator=draw)}
    xi = torch.rand(size, size, generator=draw, dtype=torch.float64)
    x = flat(models)
    with native.own_products(True):
        distances, cosines, mixed = attention.squared_distances(models), attention.cosines(models), {}
        for some in (range(size), range(size // 2, size)):
            mixed[len(some)] = attention.combine(xi[list(some)], models)
    torch.testing.assert_close(distances, ((x[:, None] - x[None]) ** 2).sum(2), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(
        cosines, torch.nn.functional.cosine_similarity(x[:, None], x[None], 2), rtol=1e-12, atol=0
    )
    assert torch.equal(distances, distances.T)
    assert bool((distances.diagonal() == 0).all())
    torch.testing.assert_close(flat(mixed[size]), xi @ x, rtol=1e-5, atol=1e-4)
    late = size - size // 2
    assert torch.equal(flat(mixed[late]), flat(mixed[size])[-late:]), "whoever else is asked for"


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
def test_our_own_code_is_not_for_other_numbers():
    models = rows(4)  # float64
    with native.own_products(True):
        found = attention.combine(torch.eye(4), models)
        distances = attention.squared_distances(models)
    assert all(torch.equal(found[name], models[name]) for name in models)
    assert torch.equal(distances, attention.squared_distances(models))
