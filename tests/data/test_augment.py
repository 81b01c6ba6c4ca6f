"""Augmentations do what they are called, from a key alone, in training steps only, and in every engine."""

import pytest
import torch
from torch import nn
from torch.func import vmap

import coterie
from coterie.core.batches import Batch
from coterie.core.errors import ConfigError
from coterie.core.make_task import make_task
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data import from_clients
from coterie.data.augment import AUGMENTATIONS, Brightness, Contrast, Crop, Flip, Noise, Rotate, find_augmentation
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg
from coterie.testing.engine_laws import ROUNDING, engines
from coterie.testing.kit import LOOP, same
from tests.marks import compiles

KEY = torch.tensor(2**40 + 17)
IMAGES = torch.rand(400, 2, 5, 6, generator=torch.Generator().manual_seed(0))
ALL = "flip,crop:1,rotate:20,brightness,contrast,noise"


def test_half_of_the_images_are_flipped_and_all_of_them_where_that_is_asked_for():
    out = Flip()(IMAGES, KEY)
    flipped = (out == IMAGES.flip(3)).all(3).all(2).all(1)
    assert ((out == IMAGES).all(3).all(2).all(1) ^ flipped).all()
    assert 160 < flipped.sum() < 240  # 4 standard deviations about 200
    assert torch.equal(Flip(1.0)(IMAGES, KEY), IMAGES.flip(3))


def test_a_crop_is_a_piece_of_the_image_with_its_edges_repeated():
    padded = nn.functional.pad(IMAGES, (2, 2, 2, 2), mode="replicate")
    pieces = torch.stack([padded[:, :, i : i + 5, j : j + 6] for i in range(5) for j in range(5)])
    found = (pieces == Crop(2)(IMAGES, KEY)).flatten(2).all(2)  # [25, images]
    assert found.any(0).all()
    assert found.any(1).all()  # every shift occurs


def test_a_turn_about_the_centre():
    square = IMAGES[:, :, :, :5]
    turned = Rotate(180)(square, KEY)
    assert not torch.allclose(turned, square)
    torch.testing.assert_close(turned[:, :, 2, 2], square[:, :, 2, 2])  # the centre stays
    torch.testing.assert_close(Rotate(0)(IMAGES, KEY), IMAGES, rtol=1e-4, atol=1e-5)
    wide = torch.zeros(1, 1, 5, 9)
    wide[0, 0, 2] = 1.0  # a line, at most 30 degrees from level, is as long and as thick as it was, whatever the shape
    slope = Rotate(30)(wide, KEY)[0, 0]
    rows = (slope * torch.arange(5.0)[:, None]).sum(0) / slope.sum(0)
    steps = rows[2:7].diff()
    assert steps.std() < 0.1 * steps.abs().mean()


def test_values_change_within_their_limits():
    bright = Brightness(0.3)(IMAGES, KEY) / IMAGES
    torch.testing.assert_close(bright, bright[:, :1, :1, :1].expand_as(bright))
    assert 0.7 <= bright.min() < 0.72
    assert 1.28 < bright.max() <= 1.3
    contrast = Contrast(0.3)(IMAGES, KEY)
    torch.testing.assert_close(contrast.mean((1, 2, 3)), IMAGES.mean((1, 2, 3)))
    assert 0.7 <= (contrast.std((1, 2, 3)) / IMAGES.std((1, 2, 3))).min() < 0.72
    noise = Noise(0.5)(IMAGES, KEY) - IMAGES
    assert noise.std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_draws_belong_to_key_and_place_and_stack(name):
    change, keys = find_augmentation(name), torch.stack([KEY, KEY + 1])
    alone = torch.stack([change(IMAGES[:8], key) for key in keys])
    assert not torch.equal(*alone)
    torch.testing.assert_close(change(IMAGES[:3], KEY), alone[0, :3])  # padding changes nothing
    torch.testing.assert_close(vmap(change, in_dims=(None, 0), randomness="error")(IMAGES[:8], keys), alone)


def test_only_training_sees_it():
    def blank(x, key):
        return torch.zeros_like(x)

    plain, blanked = (Task(nn.Sequential(nn.Flatten(), nn.Linear(60, 2)), augment=each) for each in (None, blank))
    params, y = plain.init(), torch.tensor([0, 1, 1])
    batch = Batch(IMAGES[:3], y, torch.ones(3), KEY)
    assert torch.equal(plain.losses(params, batch.x, y), blanked.losses(params, batch.x, y))
    expected = plain.losses(params, torch.zeros(3, 2, 5, 6), y).mean()
    torch.testing.assert_close(blanked.loss(params, batch)[0], expected)
    assert plain != blanked


def outcome(engine, augment):
    draw = torch.Generator().manual_seed(1)
    clients = from_clients(
        [(torch.rand(n, 1, 6, 6, generator=draw), torch.arange(n) % 2) for n in (40, 25, 30, 20)], num_classes=2
    )
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    task = make_task(module, "classification", 2, clients.x, augment=find_augmentation(augment))
    sim = Simulation.start(FedAvg(SGD(lr=0.1)), task, clients, Plan(8, 1), 3, seed=0)
    for number in (1, 2):
        sim.train(number, engine)
    return sim.state, sim.views(2, engine), sim.predictions(2, engine).outputs


def test_stacked_and_shared_out_it_is_the_same():
    base = outcome(LOOP, ALL)
    same(base, outcome(Engine("stacked", chunk=2), ALL), "loop and stacked", ROUNDING)
    assert not torch.allclose(base[2], outcome(LOOP, "flip:0")[2], atol=1e-4)


@compiles
@pytest.mark.slow
def test_every_engine_draws_the_same(monkeypatch):
    monkeypatch.delenv("COTERIE_BACKEND", raising=False)
    base = outcome(LOOP, ALL)
    for name, engine in engines():
        same(base, outcome(engine, ALL), f"{name} and one client at a time", ROUNDING)


def test_a_function_of_ones_own_from_python_and_resumed(tmp_path):
    def shifted(x, key):
        return x + 1 if x.ndim == 4 else x

    how = {"model": "linear", "rounds": 2, "engine": "loop", "workers": 1, "reference": False, "report": False}
    own = coterie.run("fedavg", "digits", augment=shifted, out=tmp_path / "own", **how)
    plain = coterie.run("fedavg", "digits", **how)
    assert own.mean("accuracy") != plain.mean("accuracy")
    with pytest.raises(ConfigError, match="augment came from Python"):
        coterie.resume(tmp_path / "own")
    assert coterie.resume(tmp_path / "own", augment=shifted).mean("accuracy") == own.mean("accuracy")


def test_a_number_may_have_its_name():
    assert find_augmentation("crop:pixels=2,flip:0.3") == find_augmentation("crop:2,flip:chance=0.3")
    with pytest.raises(ConfigError, match="crop:pixels=1"):
        find_augmentation("crop:chance=2")


def test_what_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError, match=r"no augmentation 'flop' \(did you mean 'flip'\?\)(.|\n)*crop:x': give one"):
        find_augmentation("flop,crop:x")
    with pytest.raises(ConfigError, match="augmentation of images"):
        coterie.run("fedavg", "hospitals", augment="flip")
    with pytest.raises(ConfigError, match="must return inputs of the same type and shape"):
        coterie.run("fedavg", "hospitals", augment=lambda x, key: x[:1])
