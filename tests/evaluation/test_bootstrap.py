import numpy as np
import pytest
import torch
from torch import nn

from coterie.core.targets import Classes, Cox, Labels, Numbers, Ordered, Part, Several, Survival
from coterie.core.task import Task
from coterie.evaluation import Predictions, score
from coterie.evaluation.bootstrap import MAX_WEIGHT_CELLS, draws
from coterie.evaluation.kinds import classes as of_classes
from coterie.evaluation.kinds.classes import confidence_and_surprise, flatten_labels
from coterie.evaluation.scoring import differing, names_of, statistic


def some(kind, size=40):
    draw = torch.Generator().manual_seed(0)
    owner = torch.zeros(size, dtype=torch.long)
    if kind == "regression":
        y = 50 + torch.randn(size, generator=draw)
        return Task(nn.Linear(2, 1), "regression"), Predictions(
            y[:, None] + torch.randn(size, 1, generator=draw), y, owner
        )
    if kind in TARGETS:
        target = TARGETS[kind]
        outputs = torch.randn(size, target.num_outputs, generator=draw).mul(2).round() / 2
        y = {
            "multilabel": lambda: with_gaps(torch.randint(2, (size, 3), generator=draw).float(), draw),
            "ordinal": lambda: torch.randint(4, (size,), generator=draw),
            "survival": lambda: times(size, draw),
            "cox": lambda: times(size, draw),
            "multitask": lambda: torch.cat(
                [
                    with_gaps(torch.randint(3, (size, 1), generator=draw).float(), draw),
                    with_gaps(torch.randn(size, 1, generator=draw), draw),
                    times(size, draw),
                ],
                1,
            ),
        }[kind]()
        return Task(nn.Linear(2, target.num_outputs), target), Predictions(outputs, y, owner)
    classes = 2 if kind == "two classes" else 4
    outputs = torch.randn(size, classes, generator=draw).mul(2).round()  # with ties
    return Task(nn.Linear(2, classes), num_classes=classes), Predictions(
        outputs, torch.randint(classes, (size,), generator=draw), owner
    )


def with_gaps(y, draw):
    return torch.where(torch.rand(y.shape, generator=draw) < 0.2, torch.nan, y)


def times(size, draw):
    y = torch.rand(size, 2, generator=draw)
    return torch.stack([(4 * y[:, 0]).round(decimals=1), (y[:, 1] < 0.6).float()], 1)  # with ties


TARGETS = {
    "multilabel": Labels(("a", "b", "c")),
    "ordinal": Ordered(4),
    "survival": Survival((1.0, 2.0, 3.0)),
    "cox": Cox(),
    "multitask": Several(
        (Part("grade", Classes(3)), Part("stay", Numbers(()), 0.5), Part("death", Survival((1.0, 2.5))))
    ),
}
CASES = [
    *((kind, name) for kind in ("classification", "two classes") for name in of_classes.NAMES),
    *((target.kind, name) for target in (Numbers(()), *TARGETS.values()) for name in names_of(target)),
]


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_a_resample_scores_what_the_repeated_examples_score(kind, metric):
    task, one = some(kind)
    weights = np.concatenate([np.ones((1, 40)), next(iter(draws(40, 5, np.random.default_rng(0))))])
    found = statistic(task, metric, one)(weights)
    for row, value in zip(weights, found, strict=True):
        times = torch.from_numpy(row).long()
        repeated = [each.repeat_interleave(times, 0) for each in one]
        np.testing.assert_allclose(value, score(task, *repeated, 1)[metric][0], rtol=1e-6)


def test_a_class_that_a_resample_lacks():
    task, _ = some("classification")
    outputs = torch.tensor([[2.0, 0, 0, 0], [0, 2, 0, 0], [0, 2, 0, 0]])
    one = Predictions(outputs, torch.tensor([0, 1, 0]), torch.zeros(3, dtype=torch.long))
    weights = np.array([[3.0, 0, 0], [1, 1, 1]])
    np.testing.assert_allclose(statistic(task, "balanced_accuracy", one)(weights), [1, 0.75])
    found = statistic(task, "auroc", one)(weights)
    assert np.isnan(found[0])
    assert not np.isnan(found[1])


def test_every_resample_has_as_many_examples():
    for examples in (1, 7, MAX_WEIGHT_CELLS // 3):  # the last in several pieces
        parts = list(draws(examples, 7, np.random.default_rng(0)))
        assert sum(len(part) for part in parts) == 7
        assert all((part.sum(1) == examples).all() for part in parts)
    assert len(parts) == 3


def test_examples_that_tell_two_models_apart():
    y, owner = torch.tensor([0, 1, 2, 0]), torch.zeros(4, dtype=torch.long)
    task = Task(nn.Linear(2, 3), num_classes=3)
    ours = Predictions(torch.eye(3)[[0, 1, 1, 1]], y, owner)
    alone = Predictions(torch.eye(3)[[0, 0, 0, 1]] * 2, y, owner)
    assert differing(task, "accuracy", ours, alone) == 1  # the third is wrong in both
    assert differing(task, "macro_f1", ours, alone) == 2
    assert differing(task, "loss", ours, alone) == 4
    assert differing(task, "loss", ours, ours) == 0


def plain_auroc(scores, y, classes, weights):
    """Pair by pair, as the definition says; [resamples]."""
    found = []
    for row in weights:
        areas = []
        for c in classes:
            mine, others = np.flatnonzero(y == c), np.flatnonzero(y != c)
            pairs = [(row[i] * row[j], scores[i, c], scores[j, c]) for i in mine for j in others]
            if total := sum(weight for weight, _, _ in pairs):
                won = sum(weight * ((a < b) + (a == b) / 2) for weight, a, b in pairs)
                areas.append(won / total)
        found.append(np.mean(areas) if areas else np.nan)
    return found


@pytest.mark.parametrize("few", [-1, 4, 10_000])  # all classes by sums, some, all by pairs
@pytest.mark.parametrize(("classes", "size"), [(4, (40,)), (2, (40,)), (4, (20, 3)), (6, (9,))])
def test_auroc_counts_pairs(few, classes, size, monkeypatch):
    monkeypatch.setattr(of_classes, "MAX_PAIRS_PER_OTHER", few)
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(classes, size, generator=draw)
    outputs = torch.randn(size[0], classes, *size[1:], generator=draw).mul(2).round()  # with ties
    weights = next(iter(draws(size[0], 5, np.random.default_rng(1))))
    task, one = Task(nn.Linear(2, classes), num_classes=classes), Predictions(outputs, y, torch.zeros(size[0]).long())
    flat, labels, index = flatten_labels(outputs, y, torch.arange(size[0]))
    scores, every = confidence_and_surprise(flat)[1].numpy(), weights[:, index.numpy()]
    expected = plain_auroc(scores, labels.numpy(), [1] if classes == 2 else range(classes), every)
    np.testing.assert_allclose(statistic(task, "auroc", one)(weights), expected, rtol=1e-12)


@pytest.mark.parametrize("few", [-1, 100_000])
def test_auroc_of_more_pairs_than_float32_can_count(few, monkeypatch):
    monkeypatch.setattr(of_classes, "MAX_PAIRS_PER_OTHER", few)
    task, one = some("two classes", 12_000)
    found = statistic(task, "auroc", one)(np.ones((1, 12_000)))
    np.testing.assert_allclose(found, score(task, *one, 1)["auroc"], rtol=1e-14)
