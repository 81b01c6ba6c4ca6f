"""The data sets by name, with the default model and training settings of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from coterie.data.download.locations import DatasetFiles
from coterie.data.federation import Federation
from coterie.data.pool import Pool
from coterie.data.readers import cifar, embedded, folders, idx, leaf, npz, wards
from coterie.data.readers.dialects import VOCABULARY, dialects
from coterie.data.readers.hospitals import hospitals
from coterie.data.readers.pfedbred import pfedbred
from coterie.data.readers.synthetic import synthetic


@dataclass(frozen=True)
class DatasetFacts:
    """What `coterie data` shows about a data set."""

    size: str = ""  # examples
    classes: str = ""
    licence: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Source:
    """A data set with a name.

    Attributes:
        load: `load(name, seed, validation, test)` returns a federation; None if the data must be partitioned.
        about: One line of description.
        defaults: Default settings of a run with this data.
        facts: What the list of data sets shows.
        pool: `pool(name)` returns examples to be split among clients; None if `load` is the only way.
        files: The files it is read from. Their folder is then one more argument of `load` and `pool`.
    """

    load: Callable[..., Federation] | None
    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: DatasetFacts = field(default_factory=DatasetFacts)
    pool: Callable[..., Pool] | None = None
    files: DatasetFiles | None = None


def _adam(rounds: int, lr: float, **others: Any) -> dict[str, Any]:
    return {"rounds": rounds, **others, "optimizer": {"name": "adam", "lr": lr}}


def _sgd(rounds: int, lr: float, **others: Any) -> dict[str, Any]:
    return {"rounds": rounds, **others, "optimizer": {"name": "sgd", "lr": lr}}


# FedMAP's schedule, optimiser and metric, from the authors' configuration and code.
_FEDMAP = _adam(20, 1e-4, model="mlp", local_epochs=50, batch_size=64, select="balanced_accuracy")
# pFedBreD's schedule, from the authors' scripts.
_PFEDBRED = _sgd(200, 0.01, model="linear", local_steps=20, batch_size=20, clients_heard=20, test=0.25)
_IMAGES = _sgd(50, 0.01, model="cnn", local_epochs=1, batch_size=32, partition="dirichlet:0.3", clients=20)

_HALF_SMALL = {"sizes": (2000,) * 5 + (500,) * 5}
_HALF_SKEWED = {"share_of_0": (0.5,) * 5 + (0.85,) * 5}
_SMALL_AND_SKEWED = {
    "sizes": (2000, 500) * 5,
    **_HALF_SKEWED,
}  # crossed: both kinds of client have large and small ones
_SAME_FEATURES = {"feature_skew": False}


def _skewed(options: Mapping[str, Any], name: str, seed: int, validation: float, test: float) -> Federation:
    return synthetic(name, seed, validation=validation, test=test, **options)


def _synthetic(about: str, size: str, **options: Any) -> Source:
    facts = DatasetFacts(size, "2", "none", "generated (FedMAP's recipe)")
    return Source(partial(_skewed, options), about, _FEDMAP, facts)


def _pfedbred(
    source: str, slots: int, *, slot_labels: bool = False, authors: bool = False
) -> Callable[..., Federation]:
    def load(name: str, seed: int, validation: float, test: float, folder: Path) -> Federation:
        how = {"slot_labels": slot_labels, "authors": authors}
        return pfedbred(name, source, slots, seed, validation, test, folder, **how)

    return load


def _femnist(name: str, folder: Path) -> Pool:
    kept = sorted(folder.glob("*.npz"))
    return npz.read_pool(name, kept[0], leaf.FEMNIST_CLASSES) if kept else leaf.femnist(name, folder)


_MNIST = DatasetFacts("70,000", "10", "CC BY-SA 3.0", "the authors, or npm")
_FMNIST = DatasetFacts("70,000", "10", "MIT", "the authors, or Debian")
_NIST = "public domain (NIST SD19)"
_UCI = "CC BY 4.0 (UCI)"
_UNSTATED_LICENCE = "not stated; cite the authors"
_ON_REQUEST = "for research, from the authors"
_NATURAL = {**_sgd(50, 0.01, model="cnn", local_epochs=1, batch_size=32), "partition": "natural"}
_OFFICE = {**_NATURAL, "model": "alexnet-bn", "scaling": "imagenet", "optimizer": {"name": "sgd", "lr": 0.001}}


def _embedded(pool: Callable[[], Pool]) -> Callable[[str], Pool]:
    return lambda name: pool()


def _files(name: str, about: str, facts: DatasetFacts, module: Any, defaults: Mapping[str, Any] = _IMAGES) -> Source:
    return Source(None, about, defaults, facts, module.read_pool, module.FILES[name])


def _wards(load: Callable[..., Federation], about: str, target: str) -> Source:
    facts = DatasetFacts("2,970", target, "none", "generated (docs/tasks.md)")
    return Source(
        load, f"six small wards: {about}", _adam(20, 0.01, model="linear", local_epochs=2, batch_size=16), facts
    )


SOURCES: dict[str, Source] = {
    "hospitals": Source(
        hospitals,
        "eight small hospitals: six share an illness, two do not; what is true is known",
        _sgd(20, 0.1, model="mlp", local_epochs=3, take_home="best"),
        DatasetFacts("8,950", "2", "none", "generated"),
    ),
    "dialects": Source(
        dialects,
        "weather reports as tokens: eight villages with two dialects that have false friends",
        _adam(40, 3e-3, model=f"transformer:dim=32:layers=1:hidden=64:vocabulary={VOCABULARY}", local_epochs=2),
        DatasetFacts("4,240", "4", "none", "generated"),
    ),
    "synthetic-feature-skew": _synthetic("FedMAP's feature skew: 10 clients x 2,000, 30 features", "20,000"),
    "synthetic-quantity-skew": _synthetic(
        "FedMAP's quantity skew: 5 x 2,000 and 5 x 500 examples, with feature skew", "12,500", **_HALF_SMALL
    ),
    "synthetic-label-skew": _synthetic(
        "FedMAP's label skew: 5 clients balanced, 5 with 85 % of class 0, with feature skew", "20,000", **_HALF_SKEWED
    ),
    "synthetic-only-quantity-skew": _synthetic(
        "quantity skew in one feature space", "12,500", **_HALF_SMALL, **_SAME_FEATURES
    ),
    "synthetic-only-label-skew": _synthetic(
        "label skew in one feature space", "20,000", **_HALF_SKEWED, **_SAME_FEATURES
    ),
    "synthetic-quantity-label-skew": _synthetic(
        "quantity and label skew, crossed, in one feature space", "12,500", **_SMALL_AND_SKEWED, **_SAME_FEATURES
    ),
    "synthetic-feature-quantity-label-skew": _synthetic(
        "all three, quantity and label skew crossed", "12,500", **_SMALL_AND_SKEWED
    ),
    "linear-regression-a4": Source(
        embedded.linear_regression_a4,
        "FedMAP's appendix A.4: five lines of slope -1, with 60, 1, 2, 3 and 50 training points",
        _sgd(30, 0.05, model="linear", local_epochs=20, batch_size=64),
        DatasetFacts("416", "regression", "none", "generated (FedMAP's recipe)"),
    ),
    "sine": Source(
        embedded.sine,
        "FedeRiCo's sine curve: 10 clients, each with 24 noisy points of one piece",
        _sgd(10, 0.3, model="linear", local_epochs=40, batch_size=24, validation=0.2, test=0.5),
        DatasetFacts("240", "regression", "none", "generated (FedeRiCo's recipe)"),
    ),
    "complications": _wards(
        wards.complications, "three complications of a patient, each of which happens or not", "labels"
    ),
    "severity": _wards(wards.severity, "how severe an illness is, in four ordered levels", "4 levels"),
    "survival-times": _wards(wards.survival_times, "times until an event, some of which were not seen", "times"),
    "wards": _wards(wards.wards, "death, days in hospital and severity at once, often not recorded", "3 targets"),
    "digits": Source(
        embedded.digits,
        "scikit-learn's 8x8 digits, 10 clients by Dirichlet(0.3) over the classes",
        _sgd(30, 0.05, model="mlp", local_epochs=1, batch_size=10),
        DatasetFacts("1,797", "10", _UCI, "scikit-learn"),
        _embedded(embedded.digits_pool),
    ),
    "breast-cancer": Source(
        None,
        "scikit-learn's breast cancer (Wisconsin): 30 measurements of a tumour",
        _adam(30, 1e-3, model="mlp", local_epochs=5, batch_size=16, partition="dirichlet:0.5", clients=5),
        DatasetFacts("569", "2", _UCI, "scikit-learn"),
        _embedded(embedded.breast_cancer_pool),
    ),
    "mnist": _files("mnist", "handwritten digits, 28x28", _MNIST, idx),
    "fashion-mnist": _files("fashion-mnist", "clothes, 28x28", _FMNIST, idx),
    "emnist-byclass": _files(
        "emnist-byclass", "digits and letters in both cases, 28x28", DatasetFacts("814,255", "62", _NIST, "NIST"), idx
    ),
    "emnist-balanced": _files(
        "emnist-balanced",
        "digits and letters, classes of equal size, look-alikes merged",
        DatasetFacts("131,600", "47", _NIST, "NIST"),
        idx,
    ),
    "cifar10": _files(
        "cifar10", "photographs, 32x32", DatasetFacts("60,000", "10", _UNSTATED_LICENCE, "the authors, or npm"), cifar
    ),
    "cifar100": _files(
        "cifar100", "photographs, 32x32", DatasetFacts("60,000", "100", _UNSTATED_LICENCE, "the authors"), cifar
    ),
    "femnist": Source(
        None,
        "LEAF's FEMNIST: characters by writer, 28x28",
        {**_NATURAL, "drop_duplicates": True},
        DatasetFacts("as made", "62", _NIST, "LEAF"),
        _femnist,
        leaf.FILES["femnist"],
    ),
    "sent140": Source(
        None,
        "LEAF's Sent140: sentiment of tweets by author, 25 tokens",
        {**_sgd(50, 0.1, model="lstm", local_epochs=1, batch_size=10), "partition": "natural"},
        DatasetFacts("as made", "2", "research use", "LEAF"),
        leaf.sent140,
        leaf.FILES["sent140"],
    ),
    "office-31": _files(
        "office-31",
        "office objects in 3 domains",
        DatasetFacts("4,110", "31", _ON_REQUEST, "the authors"),
        folders,
        _OFFICE,
    ),
    "office-home": _files(
        "office-home",
        "everyday objects in 4 domains",
        DatasetFacts("15,588", "65", _ON_REQUEST, "the authors"),
        folders,
        _OFFICE,
    ),
    "pfedbred-mnist": Source(
        _pfedbred("mnist", 3, slot_labels=True),
        "pFedBreD's MNIST: 100 users with 3 digits each, with the wrong labels of the authors' data",
        _PFEDBRED,
        _MNIST,
        files=idx.FILES["mnist"],
    ),
    "pfedbred-mnist-clean": Source(
        _pfedbred("mnist", 3),
        "pFedBreD's MNIST with right labels",
        _PFEDBRED,
        _MNIST,
        files=idx.FILES["mnist"],
    ),
    "pfedbred-fmnist": Source(
        _pfedbred("fashion-mnist", 2),
        "pFedBreD's Fashion-MNIST: 100 users with 2 classes each",
        _PFEDBRED,
        _FMNIST,
        files=idx.FILES["fashion-mnist"],
    ),
    "pfedbred-mnist-authors": Source(
        _pfedbred("mnist", 3, slot_labels=True, authors=True),
        "pFedBreD's MNIST as the authors' generator makes it, to the image; a seed changes nothing",
        _PFEDBRED,
        _MNIST,
        files=idx.FILES["mnist"],
    ),
    "pfedbred-fmnist-authors": Source(
        _pfedbred("fashion-mnist", 2, authors=True),
        "pFedBreD's Fashion-MNIST with the log-normal shares of the authors' generator",
        _PFEDBRED,
        _FMNIST,
        files=idx.FILES["fashion-mnist"],
    ),
}
