import numpy as np
import pytest

from coterie.report.tsne import principal_components, tsne


def groups(number=3, size=40, width=20):
    draw = np.random.default_rng(0)
    centres = 8 * draw.normal(size=(number, 1, width))
    label = np.repeat(np.arange(number), size)
    return (centres + draw.normal(size=(number, size, width))).reshape(-1, width).astype(np.float32), label


def test_groups_stay_together():
    features, label = groups()
    at = tsne(features)
    apart = ((at[:, None] - at) ** 2).sum(-1)
    np.fill_diagonal(apart, np.inf)
    assert at.shape == (120, 2)
    assert np.array_equal(label[apart.argmin(1)], label)
    assert np.array_equal(tsne(features), at)


@pytest.mark.parametrize("features", [np.arange(12.0)[:, None], np.ones((12, 3)), np.repeat(np.eye(4), 3, 0)])
def test_few_features_and_equal_ones(features):
    assert np.isfinite(tsne(features.astype(np.float32))).all()


def test_principal_components_are_those_of_largest_variance():
    features, _ = groups()
    centred = features - features.mean(0)
    found = principal_components(centred, 2)
    variances = np.linalg.eigvalsh(np.cov(centred.T))[::-1]
    assert np.allclose(found.var(0, ddof=1), variances[:2], rtol=1e-3)
