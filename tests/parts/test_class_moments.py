import math

import pytest
import torch
from torch import nn
from torch.func import vmap

from coterie.core import tree
from coterie.core.batches import Batch, Batches
from coterie.core.errors import CoterieError
from coterie.core.privacy import Guard, noisy_sum
from coterie.core.task import Task
from coterie.parts import class_moments
from coterie.parts.class_moments import NOBODY, Factor

CLASSES, DIM, ROOM, RTOL = 4, 6, 40, 1e-6
# Examples of each class that each client has: absent, single, fewer and more than there are features.
HAS = torch.tensor([[5, 1, 0, 0], [3, 12, 1, 0], [0, 4, 20, 0]])


def task() -> Task:
    """Features are the inputs themselves."""
    return Task(nn.Sequential(nn.Identity(), nn.Linear(DIM, CLASSES)), num_classes=CLASSES)


def data(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(client)
    y = torch.repeat_interleave(torch.arange(CLASSES), HAS[client])
    y = y[torch.randperm(len(y), generator=draw)]
    mixing = torch.randn(DIM, DIM, generator=draw)
    return torch.randn(len(y), DIM, generator=draw) @ mixing + y[:, None], y


def batches(client: int, width: int = 4, steps: int = 8) -> Batches:
    """One epoch in minibatches of 4; what is missing is masked and filled with the first example."""
    x, y = data(client)
    place = torch.arange(steps * width)
    index = torch.where(place < len(y), place, 0).reshape(1, steps, width)
    mask = (place < len(y)).float().reshape(1, steps, width)
    key = torch.zeros(1, steps, dtype=torch.int64)
    return Batches(x, y, index, mask, key, torch.tensor(float(len(y))))


def dense(client: int, k: int) -> torch.Tensor:
    """pinv(Sigma_kn), by the textbook."""
    x, y = data(client)
    z = x[y == k].double()
    sigma = (z - z.mean(0)).T @ (z - z.mean(0)) / len(z)
    return torch.linalg.pinv(sigma, rtol=RTOL, hermitian=True)


def moments(pooled: bool = False) -> tuple[torch.Tensor, torch.Tensor, Factor]:
    """All clients' messages, as the server sees them."""
    model, params = task(), task().init()
    each = [
        (
            *class_moments.class_means(model, params, batches(n)),
            class_moments.precision_factor(model, params, batches(n), ROOM, RTOL, pooled),
        )
        for n in range(len(HAS))
    ]
    return tree.stack(each)


def test_means_count_what_is_not_masked():
    count, mean, _ = moments()
    assert torch.equal(count, HAS.float())
    for n in range(len(HAS)):
        x, y = data(n)
        for k in range(CLASSES):
            expected = x[y == k].mean(0) if HAS[n, k] else torch.zeros(DIM)
            torch.testing.assert_close(mean[n, k], expected)


def test_rows_are_a_factor_of_the_pseudo_inverse():
    _, _, factor = moments()
    for n in range(len(HAS)):
        for k in range(CLASSES):
            rows = factor.rows[n][factor.owner[n] == k].double()
            assert len(rows) == min(max(int(HAS[n, k]) - 1, 0), DIM)  # rank < Z, and never more than dim
            if HAS[n, k]:
                torch.testing.assert_close(rows.T @ rows, dense(n, k), rtol=1e-5, atol=1e-5)
        unused = factor.owner[n] == NOBODY
        assert not factor.rows[n][unused].any()


def test_low_rank_product_equals_the_dense_product():
    alpha = 0.7
    count, mean, factor = moments()
    found = class_moments.product_of_gaussians(count, mean, factor, alpha)
    for k in range(3):
        holders = [n for n in range(len(HAS)) if HAS[n, k]]
        precision = [dense(n, k) + alpha * torch.eye(DIM).double() for n in holders]
        pull = sum(p @ mean[n, k].double() for p, n in zip(precision, holders, strict=True))
        torch.testing.assert_close(found[k], torch.linalg.solve(sum(precision), pull).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1e-6])
def test_the_smaller_matrix_gives_what_the_larger_one_would(alpha):
    """Of class 0 there are 9 rows in 6 dimensions, of class 1 four, of class 2 none, and nobody has class 3."""
    draw = torch.Generator().manual_seed(0)
    owner = torch.tensor([[0, 0, 0, 0, 1, NOBODY, NOBODY], [1, 1, 0, 0, 0, 0, 0], [1, *[NOBODY] * 6]])
    rows = torch.randn(3, 7, DIM, generator=draw) * (owner != NOBODY)[..., None]
    count, mean = torch.tensor([[5, 2, 0, 0], [6, 3, 1, 0], [0, 2, 4, 0.0]]), torch.randn(3, 4, DIM, generator=draw)
    found = class_moments.product_of_gaussians(count, mean, Factor(rows, owner), alpha)
    assert bool(found.isfinite().all())
    for k in range(3):
        total, pull = torch.zeros(DIM, DIM).double(), torch.zeros(DIM).double()
        for n in (count[:, k] > 0).nonzero().flatten():
            v = rows[n][owner[n] == k].double()
            lam = v.T @ v + alpha * torch.eye(DIM).double()
            total, pull = total + lam, pull + lam @ mean[n, k].double()
        torch.testing.assert_close(found[k].double(), torch.linalg.solve(total, pull), rtol=1e-5, atol=1e-5)


def test_who_has_no_example_adds_nothing_and_who_has_one_adds_alpha():
    count, mean, factor = moments()
    base = class_moments.product_of_gaussians(count, mean, factor, 2.0)
    # Client 2 has none of class 0: whatever stands at its mean, and whether it is there at all.
    elsewhere = mean.index_put((torch.tensor(2), torch.tensor(0)), torch.full((DIM,), 99.0))
    assert torch.equal(class_moments.product_of_gaussians(count, elsewhere, factor, 2.0)[0], base[0])
    two = tree.rows((count, mean, factor), torch.tensor([0, 1]))
    torch.testing.assert_close(class_moments.product_of_gaussians(*two, 2.0)[0], base[0])
    # Of class 2, client 1 has one example: Lambda = alpha I.
    lam, eye = dense(2, 2), 2.0 * torch.eye(DIM).double()
    expected = torch.linalg.solve(lam + 2 * eye, (lam + eye) @ mean[2, 2].double() + eye @ mean[1, 2].double())
    torch.testing.assert_close(base[2], expected.float(), rtol=1e-5, atol=1e-5)


def test_pooled_is_one_covariance_within_classes(monkeypatch):
    count, mean, factor = moments(pooled=True)
    precision = []
    for n in range(len(HAS)):
        x, y = data(n)
        offset = (x - mean[n][y]).double()
        precision.append(torch.linalg.pinv(offset.T @ offset / len(y), rtol=RTOL, hermitian=True))
        rows = factor.rows[n].double()
        torch.testing.assert_close(rows.T @ rows, precision[n], rtol=1e-4, atol=1e-4)
    found = class_moments.product_of_gaussians(count, mean, factor, 1.0, pooled=True)
    monkeypatch.setattr(class_moments, "MATRIX_BYTES", 1)  # one client after the other
    torch.testing.assert_close(class_moments.product_of_gaussians(count, mean, factor, 1.0, pooled=True), found)
    lam = [precision[n] + torch.eye(DIM).double() for n in (0, 1)]  # the holders of class 0
    expected = torch.linalg.solve(sum(lam), sum(p @ mean[n, 0].double() for n, p in enumerate(lam)))
    torch.testing.assert_close(found[0], expected.float(), rtol=1e-4, atol=1e-4)


def test_diagonal_product_equals_the_dense_product_of_diagonals():
    count, mean, _ = moments()
    model, params = task(), task().init()
    variance = torch.stack(
        [class_moments.class_variances(model, params, batches(n), count[n], mean[n]) for n in range(len(HAS))]
    )
    x, y = data(1)
    torch.testing.assert_close(variance[1, 1], x[y == 1].var(0, correction=0))
    assert not class_moments.inverse_variances(variance, mean, RTOL)[1, 2].any()  # one example: pinv(0) = 0
    found = class_moments.product_of_diagonals(count, mean, class_moments.inverse_variances(variance, mean, RTOL), 0.5)
    weight = [1 / variance[n, 1] + 0.5 for n in (1, 2)] + [torch.full((DIM,), 0.5)]  # client 0 has one example
    expected = sum(w * mean[n, 1] for w, n in zip(weight, (1, 2, 0), strict=True)) / sum(weight)
    torch.testing.assert_close(found[1], expected)


def test_examples_that_do_not_differ_have_no_spread():
    """Three equal examples differ from their mean by rounding; its inverse must not become a precision."""
    same = batches(0)
    same = same._replace(x=torch.full_like(same.x, 0.1), y=torch.zeros_like(same.y))
    model, params = task(), task().init()
    factor = class_moments.precision_factor(model, params, same, ROOM, RTOL)
    assert bool((factor.owner == NOBODY).all())
    count, mean = class_moments.class_means(model, params, same)
    variance = class_moments.class_variances(model, params, same, count, mean)
    assert not class_moments.inverse_variances(variance, mean, RTOL).any()


@pytest.mark.parametrize("client", range(len(HAS)))
def test_private_moments_are_noised_sums_over_clipped_features(client):
    """Every number by hand, with the noise that it has; some draws make classes absent, some add up to too many."""
    (x, y), guard, model = data(client), Guard(8, sum_noise=1.5, clip_features=2.0), task()
    member = torch.nn.functional.one_hot(y, CLASSES).float()
    short = x * (2.0 / x.norm(dim=1, keepdim=True)).clamp_max(1)
    assert int((x.norm(dim=1) > 2.0).sum()) > 0
    absent, too_many = 0, 0
    for seed in range(12):
        key = torch.full((1, 8), seed)
        drawn = batches(client)._replace(key=key)
        noisy = noisy_sum(guard, member.sum(0), 1.0, key[0, 0], 0)
        there = (noisy >= 3.0) | (noisy == noisy.max())
        kept = torch.where(there, noisy.clamp_min(1.0), 0.0)
        number = kept * (len(y) / kept.sum()).clamp_max(1.0)
        total = noisy_sum(guard, member.T @ short, 2.0, key[0, 0], 1) * there[:, None]
        count, mean = class_moments.class_means(model, model.init(), drawn, guard)
        torch.testing.assert_close(count, number, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mean, total / number.clamp_min(1.0)[:, None], rtol=1e-4, atol=1e-4)
        squares = noisy_sum(guard, member.T @ short**2, 4.0, key[0, 0], 2)
        spread = (squares / number.clamp_min(1.0)[:, None] - mean**2).clamp_min(0) * there[:, None]
        variance = class_moments.class_variances(model, model.init(), drawn, count, mean, guard)
        torch.testing.assert_close(variance, spread, rtol=1e-4, atol=1e-3)
        absent, too_many = absent + int((~there).sum()), too_many + int(kept.sum() > len(y))
    assert absent > 0
    assert 0 < too_many < 12


def test_clipping_bounds_lengths_and_makes_nothing_of_what_is_not_finite():
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.0, 0.4], [0.0, 0.0, 0.0], [math.nan, 1.0, math.inf]])
    found = class_moments.clipped(rows, Guard(8, clip_features=2.0))
    expected = torch.tensor([[1.2, 1.6, 0.0], [0.3, 0.0, 0.4], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert class_moments.clipped(rows, None) is rows


def test_rtol_cuts_small_eigenvalues():
    model, params = task(), task().init()
    few = class_moments.precision_factor(model, params, batches(2), ROOM, 0.9)
    assert [int((few.owner == k).sum()) for k in range(CLASSES)] == [0, 1, 1, 0]  # only the largest of each


@pytest.mark.parametrize("pooled", [False, True])
def test_stacked_clients_get_the_same_rows(pooled):
    stacked = tree.stack([batches(n)._replace(x=torch.zeros(0), y=torch.zeros(0)) for n in range(3)])
    xs = torch.cat([data(n)[0] for n in range(3)])
    ys = torch.cat([data(n)[1] for n in range(3)])
    start = torch.tensor([0, *HAS.sum(1).cumsum(0)[:-1].tolist()])
    stacked = stacked._replace(x=xs, y=ys, index=stacked.index + start[:, None, None, None])
    model, params = task(), task().init()

    def one(own: Batches) -> Factor:
        return class_moments.precision_factor(model, params, own, ROOM, RTOL, pooled)

    together = vmap(one, in_dims=(Batches(None, None, 0, 0, 0, 0),))(stacked)
    for n in range(3):
        alone = one(batches(n))
        assert torch.equal(together.owner[n], alone.owner)
        torch.testing.assert_close(together.rows[n], alone.rows)


def test_a_client_with_more_examples_than_room_uses_the_last_ones():
    model, params = task(), task().init()
    x, y = data(2)
    room = 10
    factor = class_moments.precision_factor(model, params, batches(2), room, RTOL)
    z = x[-room:][y[-room:] == 2].double()
    sigma = (z - z.mean(0)).T @ (z - z.mean(0)) / len(z)
    rows = factor.rows[factor.owner == 2].double()
    torch.testing.assert_close(rows.T @ rows, torch.linalg.pinv(sigma, rtol=RTOL, hermitian=True), rtol=1e-4, atol=1e-4)


def test_used_bytes_leave_out_what_is_empty():
    count, mean, factor = moments()
    present = int((HAS > 0).sum())
    ranks = int((HAS - 1).clamp(0, DIM).sum())
    # Counts of every class, means of those present (float32), and rows with the class they belong to (int64).
    expected = 4 * HAS.numel() + 4 * DIM * present + (4 * DIM + 8) * ranks
    assert class_moments.used_bytes(count, mean, factor) == expected
    assert class_moments.used_bytes(count, mean, ()) == expected - (4 * DIM + 8) * ranks


def test_distance_is_the_mean_over_examples_and_features():
    z = torch.tensor([[1.0, 3.0], [2.0, 2.0], [9.0, 9.0]])
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor(0))
    centroid, strength = torch.tensor([[0.0, 1.0], [5.0, 5.0]]), torch.tensor(50.0)
    one = class_moments.centroid_distance(z, batch, (centroid, torch.tensor([1.0, 0.0]), strength))
    assert float(one) == 50 * ((1 + 4) / 2 + 0) / 2  # class 1 has no centroid, the third example is masked
    both = class_moments.centroid_distance(z, batch, (centroid, torch.ones(2), strength))
    assert float(both) == 50 * ((1 + 4) / 2 + (9 + 9) / 2) / 2
    none = class_moments.centroid_distance(z, batch, (centroid, torch.zeros(2), strength))
    assert float(none) == 0


def test_regression_has_no_classes():
    with pytest.raises(CoterieError, match="describes classes"):
        class_moments.dimensions(Task(nn.Linear(2, 1), "regression"))


def test_a_variance_is_compared_with_the_largest_of_its_own_class():
    """0.5 > 0.1 * 1 is kept in the second class, although the first one has a variance of 400."""
    variance = torch.tensor([[[400.0, 1.0], [1.0, 0.5]]])  # [clients, classes, dim]
    found = class_moments.inverse_variances(variance, torch.zeros_like(variance), 0.1)
    torch.testing.assert_close(found, torch.tensor([[[1 / 400, 0.0], [1.0, 2.0]]]))
