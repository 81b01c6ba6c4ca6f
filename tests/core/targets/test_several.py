"""Several targets at once, with weights and missing ones."""

import torch
import torch.nn.functional as F

from coterie.core.targets import Cox, Labels, Numbers, Ordered, Part, Several, Survival
from tests.core.targets.test_target import SEVERAL, examples


def test_several_losses_are_weighed_and_those_of_what_is_missing_left_out():
    outputs, y = examples("multitask")
    parts = dict(zip([part.name for part in SEVERAL.parts], SEVERAL.outputs_of(outputs), strict=True))
    expected = torch.zeros(12)
    for i in range(12):
        if not y[i, 0].isnan():
            expected[i] += 2 * F.cross_entropy(parts["ill"][i], y[i, 0].long())
        if not y[i, 1].isnan():
            expected[i] += 0.5 * (parts["days"][i, 0] - y[i, 1]) ** 2
        if not y[i, 2:4].isnan().all():
            expected[i] += Labels(("u", "v")).losses(parts["marks"][i, None], y[i, None, 2:4])[0]
        if not y[i, 4].isnan():
            expected[i] += Ordered(4).losses(parts["grade"][i, None], y[i, 4, None].long())[0]
        if not y[i, 5:].isnan().any():
            expected[i] += Survival((1.0, 2.0)).losses(parts["death"][i, None], y[i, None, 5:])[0]
    torch.testing.assert_close(SEVERAL.losses(outputs, y), expected / 5.5)


def test_one_of_several_may_compare_examples():
    target = Several((Part("days", Numbers(())), Part("death", Cox())))
    assert target.joint
    _, y = examples("cox")
    both = torch.cat([torch.ones(12, 1), y], 1)
    both[3, 1:] = torch.nan  # in no risk set
    outputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(1))
    known = torch.arange(12) != 3
    theirs = Cox().losses(outputs[known, 1:], y[known])
    expected = ((outputs[known, 0] - 1) ** 2 + theirs) / 2
    torch.testing.assert_close(target.losses(outputs, both)[known], expected)
