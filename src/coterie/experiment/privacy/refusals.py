"""Which methods can be private, and what the others would leak.

A method is private example by example if everything in its messages that depends on examples comes from steps of its
private optimiser (`train`, `minimise`, `proximal_steps`, `private_gradient`), or from sums that are clipped and noised.
Somebody has to have looked: a method that is in neither list is refused. A method of your own says so with a class
attribute `leaks = ""`, or in words what it leaks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from coterie.core import tree
from coterie.core.errors import ConfigError
from coterie.core.routes import Addressed
from coterie.core.task import Task
from coterie.experiment.privacy.site_level import WEIGHTS
from coterie.methods import METHODS
from coterie.methods.fields import AnyMethod
from coterie.parts.robust import averaged_fields

PROTECTED = (
    *("local", "fedavg", "fedavg-ft", "fedprox", "fedprox-ft", "fedbn", "fedmap", "fedamp", "heurfedamp", "pfedvmp"),
    *("pfedme", "ditto", "scaffold", "fedper", "fedrep", "fedproto", "moon", "fedbabu", "lg-fedavg", "fedpac"),
    "clustered-fl",
)
# As a whole, clients can also be protected in these, whose messages are models too, and averaged.
AS_A_WHOLE = (*PROTECTED, "per-fedavg", "pfedbred", "fedrod", "fedem", "apfl", "fedala", "fedcp", "gpfl")
LEAKS = {
    "federico": "whom it writes to, and its losses on its own examples",
    "pfedbred": "gradients of single examples, in the steps from w to the mean of its prior",
    "per-fedavg": "gradients of single examples, in both halves of its steps",
    "fedpa-ft": "gradients of single examples, in the samples of its posterior",
    "fedrod": "how many examples it has of each class, through the loss that balances them",
    "fedem": "which of the models fit each of its examples, by which their steps are weighed",
    "ifca": "which cluster its examples fit",
    "pfedbayes": "gradients of single examples, in steps on means and spreads",
    "pfedgp": "the kernel between its examples, through which it learns from all of them at once",
    "apfl": "gradients of single examples, in the steps of the model that it sends",
    "fedala": "which weights of the average suit its examples, from which its training begins",
    "fedcp": "distances between its examples' features, which the loss compares in pairs",
    "gpfl": "how many examples it has of each class, on which its valve depends",
    "fedfomo": "how well other clients' models do on examples that it withholds",
    "fedep-ft": "the curvature of the loss on its examples",
    "qlsd-ft": "the gradient on all of its examples",
}
NORMALISES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def leaks(method: AnyMethod, name: str) -> str:
    """Return what a client's messages would tell of its examples in spite of privacy; empty if nothing."""
    own = getattr(type(method), "leaks", None)
    if name not in METHODS:
        return "nobody has said what (set its class attribute `leaks`)" if own is None else str(own)
    if name not in PROTECTED:
        return LEAKS[name]
    options = vars(method)
    if name == "pfedvmp" and options["precision"] in ("full", "pooled"):
        return "the covariance of its features, which cannot be noised in the form it is sent: --precision diagonal"
    if name == "scaffold" and options["control"] == "gradient":
        return "the gradient on all of its examples: leave out --control gradient"
    return ""


def of_examples(method: AnyMethod, name: str) -> list[str]:
    """Return why examples cannot be protected with this method; empty if they can."""
    found = leaks(method, name)
    return [f"privacy = 'record': in method {name}, a client's messages would still tell {found}"] if found else []


def of_model(task: Task, level: str) -> list[str]:
    """Return why this model cannot be private; empty if it can."""
    if task.joint and level == "record":
        return [
            f"privacy = 'record': in {task.target.words}, an example's loss depends on the others of its minibatch, so "
            "that it has no gradient of its own to clip: task = 'survival'"
        ]
    mixed = [key for key, module in task.module(task.init()).named_modules() if isinstance(module, NORMALISES)]
    why = {
        "record": "normalises over the examples of a minibatch, so that each enters into the others' gradients, and "
        "into the statistics that are sent"
    }.get(level, "keeps variances, which noise would make negative")
    return [f"privacy = '{level}': the model's layer '{mixed[0]}' {why}: use GroupNorm"] if mixed else []


def of_messages(name: str, level: str) -> list[str]:
    """Return why the messages of a method cannot be noised; empty if they can."""
    if name in METHODS and name not in AS_A_WHOLE:
        return [f"privacy = '{level}': in method {name}, messages are no models, and would mean nothing with noise"]
    return []


def of_sites(method: AnyMethod, name: str, level: str, up: Any) -> list[str]:
    """Return why clients cannot be protected as a whole with this method, whose messages are like `up`."""
    if isinstance(up, Addressed):
        return [f"privacy = '{level}': in method {name}, clients write to each other, which tells whose data are alike"]
    if not all(leaf.is_floating_point() for leaf in tree.leaves(up)):
        more = ": --precision diagonal or none" if name == "pfedvmp" else ""
        return [f"privacy = '{level}': in method {name}, messages have numbers that noise would turn into others{more}"]
    if level == "site-central":
        known = {*averaged_fields(method), *WEIGHTS, "buffers"}
        other = [part for part in getattr(up, "_fields", ("models",)) if part not in known]
        if other or not averaged_fields(method) or getattr(method, "weighting", "") == "omega":
            what = ", ".join(other) or "models"
            return [
                f"privacy = 'site-central': in method {name}, the server does more with {what} than to average, "
                "so that noise in the average is not enough: privacy = 'site-local'"
            ]
    return []


def of_search(level: str | None) -> None:
    """Refuse a search for settings with privacy: it looks at the data many times, which nobody would count."""
    if level is not None:
        raise ConfigError(
            [
                f"privacy = '{level}': a search looks at all examples in every trial, which no epsilon would cover: "
                "search without privacy on data that need none, and give what it finds to coterie run"
            ]
        )
