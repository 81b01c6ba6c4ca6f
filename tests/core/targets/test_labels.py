"""Several labels an example."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import log_loss
from torch.func import grad

from coterie.core.targets import Labels
from coterie.core.targets.labels import log1mexp
from tests.core.targets.test_target import examples


def test_the_loss_of_labels_is_the_log_loss_of_each():
    outputs, _ = examples("multilabel")
    y = torch.randint(2, (12, 3), generator=torch.Generator().manual_seed(3)).float()
    expected = np.mean([log_loss(y[:, k], torch.sigmoid(outputs[:, k].double()), labels=[0, 1]) for k in range(3)])
    np.testing.assert_allclose(Labels(("a", "b", "c")).losses(outputs, y).mean(), expected, rtol=1e-5)


def test_a_missing_label_adds_nothing():
    target, outputs = Labels(("a", "b")), torch.tensor([[0.3, -50.0]])
    y = torch.tensor([[1.0, torch.nan]])
    torch.testing.assert_close(target.losses(outputs, y), -F.logsigmoid(outputs[:, 0]) / 2)
    gradient = grad(lambda out: target.losses(out, y).sum())(outputs)
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-8, -1e-3, -0.69, -0.7, -5.0, -40.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) if v > -0.1 else math.log1p(-math.exp(v)) for v in x.tolist()]
    np.testing.assert_allclose(log1mexp(x), expected, rtol=1e-12)
