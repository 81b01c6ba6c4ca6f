"""Reference models for tables: what scikit-learn's usual models reach on the same splits.

For each site, logistic regression (ridge regression for a number) and gradient-boosted trees are trained on the site's
own training examples, a lower reference, and on those of all sites pooled, an upper reference that only data in one
place allows. Inputs are those of the network: prepared by each site in its own way. A setting is chosen on the same
validation examples as the network's round: the strength of regularisation, and the number of trees. All are scored on
each site's test examples by the run's metrics. Without them, a network that is badly trained would pass for a
federation that does not help.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import ConfigError
from coterie.core.task import Task
from coterie.data import Federation
from coterie.engine.engine import one_thread
from coterie.evaluation import Predictions
from coterie.evaluation.metrics import mean, with_one_nan
from coterie.evaluation.scoring import metrics_of, score
from coterie.profiling import timed

Array = NDArray[Any]
Model = Callable[[Array], Tensor]  # inputs -> outputs, as a network gives them
MODELS = ("linear", "trees")
NAMES = {
    "linear, own": "linear model, own data",
    "trees, own": "trees, own data",
    "linear, pooled": "linear model, pooled",
    "trees, pooled": "trees, pooled",
}
STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # of the data against the penalty: scikit-learn's C; for ridge, 1 / alpha
TREES = 100
LEAST_PROBABILITY = 1e-4  # for classes that a site has not seen, whose log-loss would be infinite


@dataclass(frozen=True)
class Part:
    """Examples to train on, or to choose by."""

    x: Array
    y: Array
    weights: Array | None


@dataclass(frozen=True)
class References:
    """Hold the test metrics of every reference: {name: {metric: [clients]}}, with the names of `NAMES`."""

    test: dict[str, dict[str, list[float]]]

    def mean(self, name: str, metric: str) -> float:
        """Return a reference's average over the clients."""
        return mean(self.test[name][metric])

    def to_json(self) -> dict[str, Any]:
        """Return the content of references.json."""
        return {"format": 1, "names": NAMES, "test": self.test}


def check(federation: Federation) -> None:
    """Raise `ConfigError` unless the data are tables."""
    if federation.kind not in ("classification", "regression"):
        raise ConfigError([f"references: they are for one class or one number, and this is {federation.target.words}"])
    if federation.x.ndim != 2 or not federation.x.is_floating_point() or federation.y.ndim != 1:
        shape = tuple(federation.x.shape[1:])
        raise ConfigError([f"references: they are for tables of numbers, but the inputs have shape {shape}"])


@timed("references")
@one_thread()  # small models: threads would wait for each other
def references(federation: Federation, task: Task) -> References:
    """Train and score all references.

    Args:
        federation: the clients' data, all of them at hand.
        task: the task, by whose metrics references are scored.
    """
    check(federation)
    everyone = range(len(federation.names))
    own = [(_part(federation, [i], "train"), _part(federation, [i], "validation")) for i in everyone]
    pooled = _part(federation, everyone, "train"), _part(federation, everyone, "validation")
    test: dict[str, dict[str, list[float]]] = {}
    for kind in MODELS:
        shared = fit(kind, *pooled, federation.num_classes)
        for which, models in (("own", [fit(kind, *each, federation.num_classes) for each in own]), ("pooled", None)):
            of = [shared] * len(own) if models is None else models
            found = score(task, *_predict(federation, of), len(own))
            test[f"{kind}, {which}"] = {name: with_one_nan(found[name]) for name in metrics_of(task)}
    return References({name: test[name] for name in NAMES})


def fit(kind: str, train: Part, validation: Part, num_classes: int | None) -> Model:
    """Return a model of one kind, fitted to `train`; its setting is the best of several on `validation`."""
    if num_classes is not None and len(np.unique(train.y)) < 2:
        return _constant(train, num_classes)
    candidates = (_linear if kind == "linear" else _trees)(train, num_classes)
    return min(candidates, key=lambda model: _loss(model(validation.x), validation.y))


def _part(federation: Federation, clients: Sequence[int], name: Any) -> Part:
    index = torch.from_numpy(np.concatenate([federation.split(i)[name] for i in clients])).to(federation.x.device)
    x, y = federation.x[index].cpu().numpy(), federation.y[index].cpu().numpy()
    return Part(x, y, None if federation.weights is None else federation.weights[index].cpu().numpy())


def _predict(federation: Federation, models: Sequence[Model]) -> Predictions:
    parts = [_part(federation, [i], "test") for i in range(len(models))]
    outputs = torch.cat([model(part.x) for model, part in zip(models, parts, strict=True)])
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(part.y) for part in parts]))
    return Predictions(outputs, torch.from_numpy(np.concatenate([part.y for part in parts])), owner)


def _linear(train: Part, num_classes: int | None) -> list[Model]:
    from sklearn.linear_model import LogisticRegression, Ridge

    found: list[Model] = []
    for strength in STRENGTHS:
        if num_classes is None:
            model = Ridge(alpha=1 / strength)
        else:
            model = LogisticRegression(C=strength, max_iter=1000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a solver that has not converged after 1,000 steps
            model.fit(train.x, train.y, sample_weight=train.weights)
        found.append(_values(model.predict) if num_classes is None else _logarithms(model, num_classes))
    return found


def _trees(train: Part, num_classes: int | None) -> list[Model]:
    """Return the same trees cut off after 10, 20, ..., 100 of them."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    least = min(20, max(2, len(train.y) // 10))  # examples in a leaf; scikit-learn's 20 would not split a small site
    how: dict[str, Any] = {"max_iter": TREES, "min_samples_leaf": least, "early_stopping": False, "random_state": 0}
    cls = HistGradientBoostingRegressor if num_classes is None else HistGradientBoostingClassifier
    model = cls(**how).fit(train.x, train.y, sample_weight=train.weights)

    def cut(number: int) -> Model:
        def outputs(x: Array) -> Tensor:
            staged = model.staged_predict(x) if num_classes is None else model.staged_predict_proba(x)
            values = next(each for k, each in enumerate(staged, 1) if k == number)
            return _as_values(values) if num_classes is None else _as_logarithms(values, model.classes_, num_classes)

        return outputs

    return [cut(number) for number in range(10, TREES + 1, 10) if number <= model.n_iter_]


def _constant(train: Part, num_classes: int) -> Model:
    """Return the model of a site that has one class only."""
    label = int(train.y[0])
    return lambda x: _as_logarithms(np.ones((len(x), 1)), np.array([label]), num_classes)


def _values(predict: Callable[[Array], Array]) -> Model:
    return lambda x: _as_values(predict(x))


def _logarithms(model: Any, num_classes: int) -> Model:
    return lambda x: _as_logarithms(model.predict_proba(x), model.classes_, num_classes)


def _as_values(values: Array) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))[:, None]


def _as_logarithms(p: Array, classes: Array, num_classes: int) -> Tensor:
    """Return log-probabilities [examples, classes]; those of classes that were not seen are the least."""
    full = np.full((len(p), num_classes), LEAST_PROBABILITY)
    full[:, np.asarray(classes, dtype=int)] = np.maximum(p, LEAST_PROBABILITY)
    return torch.from_numpy(np.log(full / full.sum(1, keepdims=True)).astype(np.float32))


def _loss(outputs: Tensor, y: Array) -> float:
    truth = torch.from_numpy(y)
    if truth.is_floating_point():
        return float(((outputs[:, 0] - truth) ** 2).mean())
    return float(torch.nn.functional.cross_entropy(outputs, truth))
