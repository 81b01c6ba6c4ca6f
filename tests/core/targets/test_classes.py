"""Classes are as in PyTorch."""

import torch
import torch.nn.functional as F

from coterie.core.targets import Classes
from tests.core.targets.test_target import examples


def test_classes_are_left_as_they_were():
    outputs, y = examples("classification")
    torch.testing.assert_close(Classes(3).losses(outputs, y), F.cross_entropy(outputs, y, reduction="none"))
