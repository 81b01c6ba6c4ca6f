import torch

from coterie.models import find_model


def test_shape_and_parameters():
    model = find_model("tabular")((13,), 2)
    layers = (13 * 64 + 64) + 2 * 64 + (64 * 32 + 32) + 2 * 32 + (32 * 2 + 2)
    assert sum(p.numel() for p in model.parameters()) == layers
    assert not list(model.buffers())  # nothing of a site that averaging would mix
    assert model(torch.zeros(1, 13)).shape == (1, 2)
