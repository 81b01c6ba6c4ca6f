"""Every network: its number of parameters against the paper's layer table, and the same result in every engine."""

import numpy as np
import pytest
import torch

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data import from_clients
from coterie.data.minibatches import Plan
from coterie.engine import Engine
from coterie.experiment.simulation import Simulation
from coterie.methods import FedAvg
from coterie.models import MODELS, find_model, options_of


def count(name, shape, outputs):
    return sum(p.numel() for p in find_model(name)(shape, outputs).parameters())


def conv(before, after, side, bias=True):
    return before * after * side * side + after * bias


def full(before, after):
    return before * after + after


def bn(*channels):
    return sum(2 * each for each in channels)


MNIST, CIFAR, OFFICE, TWEET = (1, 28, 28), (3, 32, 32), (3, 224, 224), (25, 50)


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "expected"),
    [
        ("linear", MNIST, 10, 784 * 10 + 10),  # pFedBreD's MCLR: 784-10
        ("linear", MNIST, 62, 784 * 62 + 62),
        ("dnn", MNIST, 10, full(784, 100) + full(100, 10)),  # pFedBreD's DNN: 784-100-10
        ("dnn", MNIST, 62, full(784, 100) + full(100, 62)),
        # FedMAP's Table 3: in-32-16-1 with a sigmoid; here two logits, so one more column of 17.
        ("mlp", (30,), 2, full(30, 32) + full(32, 16) + full(16, 1) + 17),
        # FedeRiCo's appendix D for Office-Home: two hidden layers, 1000 and 200, on ResNet-18's 512 features.
        ("mlp:hidden=1000/200", (512,), 65, full(512, 1000) + full(1000, 200) + full(200, 65)),
        # pFedVMP's Table 4: 28 -> 24 -> 12 -> 8 -> 4 gives 64 x 4 x 4 = 1024; 32 -> 28 -> 14 -> 10 -> 5 gives 1600.
        ("cnn", MNIST, 10, conv(1, 32, 5) + conv(32, 64, 5) + full(1024, 512) + full(512, 10)),
        ("cnn", MNIST, 47, conv(1, 32, 5) + conv(32, 64, 5) + full(1024, 512) + full(512, 47)),
        ("cnn", CIFAR, 100, conv(3, 32, 5) + conv(32, 64, 5) + full(1600, 512) + full(512, 100)),
        # Its Table 6: other feature widths.
        ("cnn:features=640", CIFAR, 100, conv(3, 32, 5) + conv(32, 64, 5) + full(1600, 640) + full(640, 100)),
        # FedMAP's Table 7.
        (
            *("cnn-bn", MNIST, 62),
            conv(1, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + conv(64, 128, 3) + bn(32, 64, 64, 128)
            + full(128 * 7 * 7, 512) + bn(512) + full(512, 62),
        ),
        # FedeRiCo's CNN2: 32 -> 30 -> 15 -> 13 -> 6 -> 4 -> 2 without padding, 32 -> 16 -> 8 -> 4 with.
        ("cnn2", CIFAR, 10, conv(3, 128, 3) + 2 * conv(128, 128, 3) + full(128 * 2 * 2, 10)),
        ("cnn2:padding=1", CIFAR, 10, conv(3, 128, 3) + 2 * conv(128, 128, 3) + full(128 * 4 * 4, 10)),
        # pFedBreD's CNN: conv(3,6,5)-pool-conv(6,16,5)-pool-120-84-10; 32 -> 28 -> 14 -> 10 -> 5.
        ("lenet", CIFAR, 10, conv(3, 6, 5) + conv(6, 16, 5) + full(16 * 5 * 5, 120) + full(120, 84) + full(84, 10)),
        ("lenet", CIFAR, 10, 62_006),
        # FedMAP's Table 4, FedBN's AlexNet.
        (
            *("alexnet-bn", OFFICE, 31),
            conv(3, 64, 11) + conv(64, 192, 5) + conv(192, 384, 3) + conv(384, 256, 3) + conv(256, 256, 3)
            + bn(64, 192, 384, 256, 256) + full(256 * 6 * 6, 4096) + full(4096, 4096) + bn(4096, 4096) + full(4096, 31),
        ),
        # ResNet-18 without its 7x7 stem: the stage of c channels has two blocks of two c x c x 3 x 3 convolutions, of
        # which the first of stages 2 to 4 comes from c / 2 channels, beside a 1x1 projection; BatchNorm after each.
        (
            *("resnet18", CIFAR, 100),
            conv(3, 64, 3, False) + bn(64) + 4 * conv(64, 64, 3, False) + 4 * bn(64)
            + sum(conv(c // 2, c, 3, False) + 3 * conv(c, c, 3, False) + conv(c // 2, c, 1, False) + 5 * bn(c)
                  for c in (128, 256, 512))
            + full(512, 100),
        ),
        ("resnet18", CIFAR, 10, 11_173_962),  # the number that is commonly given
        # pFedBreD's LSTM: 4 gates of (inputs + states + 2 biases), both ways; 200 features, 5000 units.
        (
            *("lstm", TWEET, 2),
            2 * 4 * 50 * (50 + 50 + 2) + 2 * 4 * 50 * (100 + 50 + 2) + full(200, 5000) + full(5000, 2),
        ),
        ("lstm:vocabulary=30:dim=8:hidden=4:layers=1:wide=6", (25,), 2,
         30 * 8 + 2 * 4 * 4 * (8 + 4 + 2) + full(16, 6) + full(6, 2)),
        # Embeddings; four projections, two norms of a weight and a bias, two layers; a norm and the head.
        ("transformer:vocabulary=30:dim=8:heads=2:layers=3:hidden=10", (25,), 4,
         30 * 8 + 3 * (4 * full(8, 8) + 2 * 16 + full(8, 10) + full(10, 8)) + 16 + full(8, 4)),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_papers_layer_table(name, shape, outputs, expected):
    with torch.device("meta"):
        assert count(name, shape, outputs) == expected


TINY = {
    "linear": ("linear", (1, 4, 4)),
    "dnn": ("dnn:hidden=5", (1, 4, 4)),
    "mlp": ("mlp:hidden=5/4", (6,)),
    "cnn": ("cnn:features=6", (1, 16, 16)),
    "cnn-bn": ("cnn-bn:features=6", (1, 4, 4)),
    "cnn2": ("cnn2:channels=4", (1, 22, 22)),
    "lenet": ("lenet", (1, 16, 16)),
    "alexnet-bn": ("alexnet-bn:width=4", (1, 63, 63)),
    "resnet18": ("resnet18:width=2", (1, 8, 8)),
    "lstm": ("lstm:hidden=3:wide=5", (4, 3)),
    "transformer": ("transformer:dim=4:heads=1:layers=1:hidden=3", (4, 3)),
}


def after_two_rounds(name, shape, engine):
    """In double precision: BatchNorm over three examples makes much of a rounding error."""
    draw = np.random.default_rng(0)
    clients = [(torch.from_numpy(draw.standard_normal((size, *shape))), torch.arange(size) % 3) for size in (9, 6, 7)]
    torch.manual_seed(0)
    task = Task(find_model(name)(shape, 3).double(), num_classes=3)
    sim = Simulation.start(FedAvg(SGD(0.01)), task, from_clients(clients, num_classes=3), Plan(3, 1), 3, seed=0)
    for number in (1, 2):
        sim.train(number, engine)
    return tree.leaves(sim.views(2, engine))


@pytest.mark.parametrize("name", list(TINY))
def test_clients_stacked_give_what_they_give_one_at_a_time(name):
    loop, stacked = (after_two_rounds(*TINY[name], Engine(kind, False, 3, 1)) for kind in ("loop", "stacked"))
    for one, other in zip(loop, stacked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TINY))
def test_compiled_clients_give_the_same(name):
    loop, stacked = (
        after_two_rounds(*TINY[name], Engine(kind, compiled, 3, 1))
        for kind, compiled in (("loop", False), ("stacked", True))
    )
    for one, other in zip(loop, stacked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


def test_every_model_of_this_file_is_tried_and_has_words():
    assert set(TINY) <= set(MODELS)
    for factory in MODELS.values():
        assert factory.__doc__


@pytest.mark.parametrize("name", ["cnn", "cnn-bn", "cnn2", "lenet", "alexnet-bn", "resnet18"])
def test_networks_for_images_say_so(name):
    with pytest.raises(ValueError, match="needs images of at least"):
        find_model(name)((30,), 2)
    with pytest.raises(ValueError, match="needs images of at least"):
        find_model(name)((1, 3, 3), 2)


@pytest.mark.parametrize("name", ["cnn", "cnn-bn", "cnn2", "cnn2:padding=1", "lenet", "alexnet-bn:width=4", "resnet18"])
def test_the_smallest_image_that_is_accepted_works(name):
    for side in range(2, 64):
        try:
            model = find_model(name)((1, side, side), 2)
        except ValueError:
            continue
        assert model.eval()(torch.zeros(2, 1, side, side)).shape == (2, 2)
        return
    raise AssertionError("no size is accepted")


def test_options_are_checked():
    assert options_of("mlp") == {"hidden": (32, 16)}
    for name, words in (
        ("cnn:featurs=4", "has no option 'featurs' \\(did you mean 'features'\\?\\); write cnn\\[:features=512\\]"),
        ("cnn:features=many", "features = 'many': give it as in 512"),
        ("cnn:features=-4", "features = '-4'"),
        ("cnn:128", "has an extra value '128'; write cnn"),
        ("linear:hidden=3", "has no option 'hidden'; write linear$"),
        ("mlp:hidden=3/x", "give it as in 32/16"),
        ("nope", "there is no model 'nope'"),
        ("json:nope", "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_model(name)
