"""Losses by name, against their definitions and references, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_pinball_loss
from torch import nn
from torch.func import grad

from coterie.core.errors import ConfigError
from coterie.core.losses import LOSSES, check_name, find_loss
from coterie.core.make_task import make_task
from coterie.core.targets import Classes, Labels, Numbers, Ordered
from coterie.core.task import Task

CLASSES, NUMBERS, LABELS = Classes(3), Numbers(()), Labels(("a", "b"))


def some(size=30):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, generator=draw), torch.randint(3, (size,), generator=draw)


def test_label_smoothing_is_torchs():
    outputs, y = some()
    expected = F.cross_entropy(outputs, y, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(find_loss("cross-entropy:smoothing=0.1", CLASSES)(outputs, y), expected)


def test_focal_is_its_definition_and_without_gamma_the_cross_entropy():
    outputs, y = some()
    p = outputs.softmax(1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(find_loss("focal:gamma=1.5", CLASSES)(outputs, y), -((1 - p) ** 1.5) * p.log())
    torch.testing.assert_close(
        find_loss("focal:gamma=0", CLASSES)(outputs, y), F.cross_entropy(outputs, y, reduction="none")
    )


def test_focal_of_labels_leaves_missing_ones_out():
    outputs = torch.tensor([[1.0, 2.0], [0.5, -3.0]])
    y = torch.tensor([[1.0, torch.nan], [0.0, 1.0]])
    p = torch.sigmoid(outputs)
    expected = [-((1 - p[0, 0]) ** 2) * p[0, 0].log() / 2]
    expected += [(-(p[1, 0] ** 2) * (1 - p[1, 0]).log() - (1 - p[1, 1]) ** 2 * p[1, 1].log()) / 2]
    torch.testing.assert_close(find_loss("focal", LABELS)(outputs, y), torch.stack(expected))


@pytest.mark.parametrize(("name", "target"), [("focal:gamma=0.5", CLASSES), ("focal:gamma=0.5", LABELS)])
def test_gradients_stay_finite_where_predictions_are_certain(name, target):
    outputs = torch.tensor([[200.0, -200.0, -200.0][: target.num_outputs]])
    y = torch.tensor([0]) if target is CLASSES else torch.tensor([[1.0, 0.0]])
    assert bool(grad(lambda out: find_loss(name, target)(out, y).sum())(outputs).isfinite().all())


def test_losses_of_numbers_are_their_definitions():
    outputs, y = torch.tensor([[0.0], [0.5], [3.0], [-4.0]]), torch.zeros(4)
    expected = {
        "squared-error": [0, 0.25, 9, 16],
        "absolute-error": [0, 0.5, 3, 4],
        "huber": [0, 0.125, 2.5, 3.5],
        "huber:delta=2": [0, 0.125, 4, 6],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(find_loss(name, NUMBERS)(outputs, y), values, rtol=1e-6)
    for q in (0.1, 0.5, 0.9):
        ours = find_loss(f"pinball:q={q}", NUMBERS)(outputs, y).mean()
        np.testing.assert_allclose(ours, mean_pinball_loss(y, outputs[:, 0], alpha=q), rtol=1e-6)


def test_every_loss_gives_one_number_an_example():
    outputs, y = some()
    given = {"classification": (CLASSES, outputs, y), "regression": (NUMBERS, outputs[:, :1], outputs[:, 1])}
    given["multilabel"] = (LABELS, outputs[:, :2], (outputs[:, 1:] > 0).float())
    for name, kinds in LOSSES.items():
        for kind in kinds:
            target, out, truth = given[kind]
            assert find_loss(name, target)(out, truth).shape == (30,)


def test_equal_options_are_equal_losses():
    assert find_loss("huber:delta=2", NUMBERS) == find_loss("huber:delta=2.0", NUMBERS)
    assert find_loss("huber:delta=2", NUMBERS) != find_loss("huber", NUMBERS)
    mine = "tests.core.test_losses:cubed:scale=2"
    assert find_loss(mine, NUMBERS) == find_loss(mine, NUMBERS)
    same = [Task(nn.Linear(2, 1), NUMBERS, loss=find_loss(mine, NUMBERS)) for _ in range(2)]
    assert same[0] == same[1]


def cubed(outputs, y, scale=1.0):
    return scale * (outputs[:, 0] - y).abs() ** 3


def summed(outputs, y):
    return ((outputs[:, 0] - y) ** 2).sum()


def test_a_loss_of_ones_own_is_found_by_its_path_with_options():
    outputs, y = torch.tensor([[2.0]]), torch.zeros(1)
    assert find_loss("tests.core.test_losses:cubed", NUMBERS)(outputs, y) == 8
    assert find_loss("tests.core.test_losses:cubed:scale=0.5", NUMBERS)(outputs, y) == 4
    assert find_loss("tests.core.test_losses:cubed:0.5", NUMBERS)(outputs, y) == 4


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("fokal", CLASSES, "did you mean 'focal'"),
        ("focal", NUMBERS, "there are squared-error, absolute-error, huber, pinball"),
        ("huber", CLASSES, "this is a classification"),
        ("focal", Ordered(3), "it has only its own"),
        ("focal:gamma=much", CLASSES, "valid number"),
        ("focal:gamma=-1", CLASSES, "greater than or equal to 0"),
        ("focal:delta=1", CLASSES, "no option 'delta'; write focal\\[:gamma=2.0\\]"),
        ("focal:2:3", CLASSES, "an extra value '3'"),
        ("tests.core.test_losses:cubed:scal=2", NUMBERS, r"no option 'scal' \(did you mean 'scale'\?\)"),
        ("tests.core.test_losses:cubed:scale=much", NUMBERS, "scale = 'much': .*valid number"),
        ("tests.core.test_losses:nothing", CLASSES, "cannot be imported"),
        ("tests.core.test_losses:CLASSES", CLASSES, "not a function"),
    ],
)
def test_what_is_no_loss_is_refused_in_words(name, target, words):
    if words == "not a function":
        name = "tests.core.test_losses:NOTHING"
    with pytest.raises(ConfigError, match=words):
        find_loss(name, target)


NOTHING = 3


def test_a_loss_that_is_not_one_number_an_example_is_found_before_training():
    with pytest.raises(ValueError, match="one number an example"):
        make_task(nn.Linear(2, 1), NUMBERS, None, torch.zeros(2, 2), loss=summed)


def test_options_of_ones_own_are_checked_with_everything_else():
    with pytest.raises(ConfigError, match="no option 'scal'"):
        check_name("tests.core.test_losses:cubed:scal=2")
    check_name("tests.core.test_losses:cubed:scale=2")
