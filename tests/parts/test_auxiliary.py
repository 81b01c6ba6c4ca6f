import pytest
import torch
from torch import nn

from coterie import CoterieError, testing
from coterie.core.make_task import make_task
from coterie.core.method import Population
from coterie.core.task import Task
from coterie.parts.auxiliary import Dense, affine, dense, embeddings, head_inputs, normalised

PARAMS = testing.task().init()


def people(seed=0):
    return Population(4, 4, seed=seed)


def test_values_are_drawn_from_the_seed_and_the_name():
    first, again = (dense(people(3), "gate", 4, 6, PARAMS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (dense(people(4), "gate", 4, 6, PARAMS), dense(people(3), "valve", 4, 6, PARAMS)):
        assert not torch.equal(first.weight, other.weight)
        assert not torch.equal(first.bias, other.bias)
    rows = [embeddings(people(seed), "classes", 5, 7, PARAMS) for seed in (3, 3, 4)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    assert rows[0].shape == (5, 7)


def test_the_draw_uses_no_other_randomness_and_takes_none():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = dense(people(0), "gate", 4, 6, PARAMS)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first.weight, dense(people(), "gate", 4, 6, PARAMS).weight)


def test_values_are_as_pytorch_draws_them():
    layer = dense(people(0), "gate", 400, 300, PARAMS)
    assert (layer.weight.shape, layer.bias.shape) == ((300, 400), (300,))
    assert float(layer.weight.abs().max()) <= 0.05
    assert float(layer.weight.mean()) == pytest.approx(0, abs=1e-3)
    assert float(layer.weight.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert torch.equal(layer.scale, torch.ones(300))
    assert not layer.shift.any()
    assert float(embeddings(people(0), "classes", 300, 40, PARAMS).std()) == pytest.approx(1, rel=0.02)
    assert dense(people(0), "gate", 2, 2, {"w": torch.zeros(1, dtype=torch.float64)}).weight.dtype == torch.float64


def test_it_is_a_linear_layer_and_a_layer_norm():
    layer = dense(people(0), "gate", 4, 6, PARAMS)
    layer = layer._replace(scale=torch.linspace(0.5, 2, 6), shift=torch.linspace(-1, 1, 6))
    linear, norm = nn.Linear(4, 6), nn.LayerNorm(6)
    linear.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    norm.load_state_dict({"weight": layer.scale, "bias": layer.shift})
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalised(layer, affine(layer, x)), norm(linear(x)).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(affine(layer, x[0]), linear(x[0]).detach(), rtol=1e-5, atol=1e-6)
    zero = Dense(*(torch.zeros_like(leaf) for leaf in layer))
    assert not normalised(zero, affine(zero, x)).any()  # where nothing differs, nothing is divided by 0


def test_a_vector_gives_the_same_bits_wherever_the_matrix_is_in_memory():
    layer = dense(people(0), "gate", 20, 20, PARAMS)
    x = torch.randn(20, generator=torch.Generator().manual_seed(0))
    for offset in range(16):
        weight = torch.empty(400 + offset)[offset:].view(20, 20).copy_(layer.weight)
        assert torch.equal(affine(layer._replace(weight=weight), x), affine(layer, x))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1)), "must be its last layer"),
        (nn.Sequential(nn.Conv1d(6, 3, 1), nn.Flatten()), "name one with --head"),
    ],
)
def test_a_model_whose_head_cannot_be_applied_alone_is_refused(module, words):
    task = make_task(module, "classification", 3, torch.randn(4, 6, 1) if "name" in words else torch.randn(4, 6))
    with pytest.raises(CoterieError, match=f"Gate .*{words}"):
        head_inputs(task, "Gate")


def test_a_head_that_is_not_linear_is_refused():
    with pytest.raises(CoterieError, match="its input width is not known"):
        head_inputs(Task(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), num_classes=3, head="1"), "Gate")


def test_the_inputs_of_a_head():
    assert head_inputs(testing.task(), "Gate") == 8
    with pytest.raises(CoterieError, match="this model has none"):
        head_inputs(None, "Gate")
