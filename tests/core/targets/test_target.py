"""What every kind of target keeps."""

import json

import pytest
import torch
from torch.func import grad, vmap

from coterie.core.errors import ConfigError
from coterie.core.targets import Classes, Cox, Labels, Numbers, Ordered, Part, Several, Survival, from_json

SEVERAL = Several(
    (
        Part("ill", Classes(3), 2.0, ("no", "a", "b")),
        Part("days", Numbers(()), 0.5),
        Part("marks", Labels(("u", "v"))),
        Part("grade", Ordered(4)),
        Part("death", Survival((1.0, 2.0))),
    )
)
TARGETS = {
    each.kind: each
    for each in (
        Classes(3),
        Numbers((2,)),
        Labels(("a", "b", "c")),
        Ordered(4),
        Survival((0.5, 1.0, 2.0)),
        Cox(),
        SEVERAL,
    )
}


def examples(kind, size=12, seed=0):
    """Outputs, and targets that fit."""
    draw = torch.Generator().manual_seed(seed)
    outputs = 2 * torch.randn(size, TARGETS[kind].num_outputs, generator=draw)
    time = torch.stack([3 * torch.rand(size, generator=draw), (torch.rand(size, generator=draw) < 0.6).float()], 1)
    gaps = torch.rand(size, 6, generator=draw) < 0.3
    label = torch.randint(2, (size, 3), generator=draw).float()
    y = {
        "classification": torch.randint(3, (size,), generator=draw),
        "regression": torch.randn(size, 2, generator=draw),
        "multilabel": torch.where(gaps[:, :3], torch.nan, label),
        "ordinal": torch.randint(4, (size,), generator=draw),
        "survival": time,
        "cox": time,
        "multitask": torch.cat(
            [
                torch.where(gaps[:, :1], torch.nan, torch.randint(3, (size, 1), generator=draw).float()),
                torch.where(gaps[:, 1:2], torch.nan, torch.randn(size, 1, generator=draw)),
                torch.where(gaps[:, 2:4], torch.nan, label[:, :2]),
                torch.where(gaps[:, 4:5], torch.nan, torch.randint(4, (size, 1), generator=draw).float()),
                torch.where(gaps[:, 5:], torch.nan, time),
            ],
            1,
        ),
    }[kind]
    return outputs, y


@pytest.mark.parametrize("kind", TARGETS)
def test_a_loss_an_example_with_finite_gradients_alone_and_stacked(kind):
    target = TARGETS[kind]
    two = [torch.stack(part) for part in zip(examples(kind), examples(kind, seed=1), strict=True)]

    def total(outputs, y):
        return target.losses(outputs, y, torch.ones(len(y))).sum()

    stacked = vmap(grad(total))(*two)
    assert bool(stacked.isfinite().all())
    assert bool((stacked != 0).any())
    for i in range(2):
        outputs, y = (part[i] for part in two)
        assert target.losses(outputs, y).shape == (12,)
        torch.testing.assert_close(stacked[i], grad(total)(outputs, y))


@pytest.mark.parametrize("kind", TARGETS)
def test_a_mixture_predicts_the_weighted_mean(kind):
    target, weight = TARGETS[kind], torch.tensor([0.2, 0.5, 0.3])
    models = torch.stack([examples(kind, seed=seed)[0] for seed in range(3)])
    mixed = target.predictions(target.mix(models, weight))
    expected = sum(w * target.predictions(model) for w, model in zip(weight, models, strict=True))
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_survives_json_and_equals_itself(kind):
    target = TARGETS[kind]
    again = from_json(json.loads(json.dumps(target.to_json())))
    assert again == target
    assert hash(again) == hash(target)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_table_has_a_row_an_example_and_a_cell_a_column(kind):
    target = TARGETS[kind]
    outputs, _ = examples(kind)
    header, rows = target.table(outputs, ["p", "q", "r", "s"][: target.num_values or 0])
    assert len(rows) == 12
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize("kind", TARGETS)
def test_blank_targets_have_the_shape_of_real_ones_and_are_no_misfits(kind):
    target = TARGETS[kind]
    _, y = examples(kind)
    blank = target.blank(4)
    assert (blank.shape[1:], blank.dtype) == (y.shape[1:], y.dtype)
    assert not bool(target.misfits(blank)[0].any())


BAD = [
    (Labels(("a", "b")), torch.tensor([[0.0, 1.0], [2.0, 0.0]])),
    (Labels(("a", "b")), torch.tensor([[0.0, 1.0], [torch.nan, torch.nan]])),
    (Ordered(3), torch.tensor([0, 3])),
    (Survival((1.0,)), torch.tensor([[1.0, 0.0], [-1.0, 1.0]])),
    (Cox(), torch.tensor([[1.0, 0.0], [1.0, 0.5]])),
    (Cox(), torch.tensor([[1.0, 0.0], [torch.nan, 1.0]])),
    (Several((Part("a", Classes(2)),)), torch.tensor([[1.0], [0.5]])),
    (Several((Part("a", Classes(2)), Part("b", Numbers(())))), torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
    (Several((Part("a", Classes(2)),)), torch.tensor([[1.0], [torch.nan]])),
]


@pytest.mark.parametrize(("target", "y"), BAD)
def test_what_cannot_be_a_target_is_found(target, y):
    bad, words = target.misfits(y)
    assert bool(bad[1])
    assert words


@pytest.mark.parametrize(
    "made",
    [
        lambda: Labels(()),
        lambda: Labels(("a", "a")),
        lambda: Ordered(1),
        lambda: Survival((2.0, 1.0)),
        lambda: Survival((0.0, 1.0)),
        lambda: Survival(()),
        lambda: Several((Part("a", Cox(), 0.0),)),
        lambda: Several((Part("a", SEVERAL),)),
        lambda: from_json({"kind": "magic"}),
        lambda: from_json({"kind": "survival", "times": "soon"}),
        lambda: from_json({"kind": "ordinal"}),
    ],
)
def test_targets_that_make_no_sense_are_refused(made):
    with pytest.raises(ConfigError):
        made()
