import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

import coterie
from coterie.core.errors import ConfigError
from coterie.data.weights import balanced
from coterie.experiment.references import NAMES, Part, fit, references
from coterie.experiment.setup import prepare
from coterie.storage import files
from tests.experiment.conftest import QUICK


def tables(sites=3, rows=120, regression=False):
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=draw)
    found = {}
    for i in range(sites):
        x = torch.randn(rows, 5, generator=draw)
        z = x @ w + 0.5 * torch.randn(rows, generator=draw)
        found[f"site-{i + 1}"] = (x, z if regression else (z > 0.5 * i).long())
    return found


def setup(**settings):
    return prepare("fedavg", tables(**settings), **QUICK)


def test_they_are_scikit_learns_on_the_same_splits():
    made = setup()
    federation, found = made.federation, references(made.federation, made.task)
    x, y = federation.x.numpy(), federation.y.numpy()
    splits = list(federation.clients.values())
    pooled = np.concatenate([split.train for split in splits]), np.concatenate([split.validation for split in splits])
    for name, fits in (("own", [(split.train, split.validation) for split in splits]), ("pooled", [pooled] * 3)):
        for i, (train, validation) in enumerate(fits):
            tried = [LogisticRegression(C=c, max_iter=1000).fit(x[train], y[train]) for c in (0.01, 0.1, 1.0, 10.0)]
            model = min(tried, key=lambda m: log_loss(y[validation], m.predict_proba(x[validation]), labels=[0, 1]))
            test = splits[i].test
            expected = roc_auc_score(y[test], model.predict_proba(x[test])[:, 1])
            assert found.test[f"linear, {name}"]["auroc"][i] == pytest.approx(expected, abs=1e-6)
    assert set(found.test) == set(NAMES)
    for name in NAMES:
        assert found.mean(name, "auroc") > 0.75


def test_a_regression_has_ridge_and_trees():
    made = setup(regression=True)
    found = references(made.federation, made.task)
    for name in NAMES:
        spread = [float(made.federation.y[split.test].std()) for split in made.federation.clients.values()]
        assert np.mean(found.test[name]["rmse"]) < np.mean(spread)
    assert found.mean("linear, pooled", "rmse") == pytest.approx(0.5, rel=0.25)  # the noise


def test_corrupted_test_labels_change_no_model():
    x, y = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32), np.arange(80) % 2
    for kind in ("linear", "trees"):
        one, other = (
            references_of(tables_with(x, labels), kind) for labels in (y, np.where(np.arange(80) < 40, y, 1 - y))
        )
        torch.testing.assert_close(one, other)


def tables_with(x, y):
    """One site whose first 40 examples are for training and validation."""
    return Part(x[:30], y[:30], None), Part(x[30:40], y[30:40], None), x[40:]


def references_of(parts, kind):
    train, validation, x = parts
    return fit(kind, train, validation, 2)(x)


def test_a_site_with_one_class_and_classes_that_were_not_seen():
    x = np.zeros((6, 2), np.float32)
    constant = fit("linear", Part(x, np.full(6, 1), None), Part(x, np.full(6, 1), None), 3)
    assert constant(x).softmax(1)[:, 1].min() > 0.999
    y = np.array([0, 1, 0, 1, 0, 1])
    two = fit("linear", Part(x, y, None), Part(x, y, None), 3)(x).softmax(1)
    assert 0 < float(two[0, 2]) < 1e-3
    torch.testing.assert_close(two[:, :2], torch.full((6, 2), 0.5), atol=1e-3, rtol=0)


def test_class_weights_are_used():
    draw = np.random.default_rng(0)
    x = draw.standard_normal((300, 2)).astype(np.float32)
    y = (x[:, 0] + draw.standard_normal(300) > 1.5).astype(np.int64)
    federation = prepare("fedavg", [(torch.from_numpy(x), torch.from_numpy(y))], **QUICK).federation
    task = setup().task
    plain, even = (
        references(each, task).mean("linear, own", "balanced_accuracy") for each in (federation, balanced(federation))
    )
    assert even > plain + 0.02


def test_a_run_shows_and_keeps_them(tmp_path):
    result = coterie.run("fedavg", tables(), out=tmp_path / "run", references=True, **QUICK)
    told = files.read_json(tmp_path / "run" / "references.json")
    assert told["test"] == result.references.test
    assert "Usual models on the same data" in (tmp_path / "run" / "report.html").read_text()


def test_a_comparison_has_them_once_for_each_seed():
    found = coterie.compare(("local", "fedavg"), 2, tables(), references=True, **QUICK)
    assert len(found.references) == 2
    assert found.summary()["references"][0]["test"] == found.references[0].test
    assert found.references[0].test != found.references[1].test  # other splits


def test_they_are_for_tables():
    with pytest.raises(ConfigError, match="references: they are for tables of numbers"):
        prepare("fedavg", "digits", references=True)
