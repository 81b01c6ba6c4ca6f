"""Which methods are special cases of which: one table, of which docs/methods.md is made and which is tested.

`disagreement` trains both sides of a line on the laws' federation and says how far what they deploy, or their global
models, predict differently. tests/testing/test_special_cases.py asks every line for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.optimizers import SGD
from coterie.core.task import Task
from coterie.data.federation import Federation
from coterie.data.minibatches import Plan
from coterie.experiment.simulation import Simulation
from coterie.methods import (
    APFL,
    IFCA,
    MOON,
    QLSDFT,
    ClusteredFL,
    Ditto,
    FedALA,
    FedAMP,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedBN,
    FedEM,
    FedeRiCo,
    FedMAP,
    FedPAFT,
    FedPer,
    FedProto,
    FedProx,
    FedProxFT,
    FedRep,
    FedROD,
    HeurFedAMP,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedBayes,
    PFedBreD,
    PFedMe,
    PFedVMP,
    Scaffold,
)
from coterie.methods.fields import AnyMethod, hyper_parameters, name_of
from coterie.testing import kit

ROUNDS = 2
STEP = SGD(0.1)
NEARLY_0, HUGE = 1e-9, 1e12  # stand for limits


class Setting(NamedTuple):
    """Where both sides of a line are trained."""

    words: str  # "on a model without a head"; empty: on any
    module: Callable[[], nn.Module] = kit.module
    plan: Plan = kit.PLAN
    clients: int = len(kit.SIZES)  # the last ones


def _with_seed(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


ANY = Setting("")
NO_NORM = Setting("on a model without normalisation layers", lambda: kit.module(norm=False))
NEITHER = Setting("on a model without normalisation layers and dropout", lambda: kit.module(norm=False))
NO_HEAD = Setting(
    "on a model without a head",
    lambda: _with_seed(lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten())),
)
ALL_HEAD = Setting("on a model that is nothing but its head", lambda: _with_seed(lambda: nn.Linear(6, 3)))
ALONE = Setting("with one client", clients=1)
ONE_STEP = NEITHER._replace(
    words=f"with one minibatch a round, {NEITHER.words}", plan=Plan(batch_size=max(kit.SIZES), epochs=1)
)


class SpecialCase(NamedTuple):
    """`method` is `other`, in what clients deploy, or (`shared`) in the model that all share."""

    method: AnyMethod
    other: AnyMethod
    setting: Setting = ANY
    shared: bool = False
    unsaid: tuple[str, ...] = ()  # options that are no condition: they only leave nothing else to the method
    tolerance: float = 1e-5

    @property
    def when(self) -> str:
        """The condition in words: "`mu` = 0"."""
        said = [text for name, text in _options(self.method).items() if name not in self.unsaid]
        return ", ".join([*said, *([self.setting.words] if self.setting.words else [])]) or "always"

    @property
    def what(self) -> str:
        """What the method then is, in words: "`fedavg`"."""
        options = ", ".join(_options(self.other).values())
        return f"`{name_of(self.other)}`" + (f" with {options}" if options else "")


SPECIAL_CASES = (
    SpecialCase(FedAvgFT(STEP, finetune_epochs=0), FedAvg(STEP)),
    SpecialCase(FedProx(STEP, mu=0.0), FedAvg(STEP)),
    SpecialCase(FedProxFT(STEP, mu=0.0), FedAvgFT(STEP)),
    SpecialCase(FedProxFT(STEP, finetune_epochs=0), FedProx(STEP)),
    SpecialCase(FedProxFT(STEP), FedProx(STEP), shared=True),
    SpecialCase(MOON(STEP, mu=0.0), FedAvg(STEP)),
    SpecialCase(Scaffold(STEP), FedAvg(STEP), ALONE),
    SpecialCase(FedPAFT(STEP, samples=0, burn_in=0), FedAvgFT(STEP), unsaid=("burn_in",)),
    SpecialCase(QLSDFT(STEP, temperature=0.0, levels=0), FedAvgFT(STEP)),
    SpecialCase(FedBN(STEP), FedAvg(STEP), NO_NORM),
    SpecialCase(FedPer(STEP), FedAvg(STEP), NO_HEAD),
    SpecialCase(FedPer(STEP), Local(STEP), ALL_HEAD),
    SpecialCase(FedRep(STEP), FedAvg(STEP), NO_HEAD),
    SpecialCase(FedRep(STEP), Local(STEP), ALL_HEAD),
    SpecialCase(FedBABU(STEP), FedAvgFT(STEP, finetune_epochs=5), NO_HEAD),
    SpecialCase(LGFedAvg(STEP), FedAvg(STEP), ALL_HEAD),
    SpecialCase(LGFedAvg(STEP), Local(STEP), NO_HEAD),
    SpecialCase(FedROD(STEP, balance=0.0), FedAvg(STEP), shared=True),
    SpecialCase(FedProto(STEP, lam=0.0, prediction="head"), Local(STEP)),
    SpecialCase(PFedVMP(STEP, xi1=0.0), FedPer(STEP)),
    SpecialCase(FedMAP(STEP, sigma2=HUGE), Local(STEP)),
    SpecialCase(FedAMP(STEP, sigma=NEARLY_0, lam=NEARLY_0), Local(STEP)),
    SpecialCase(HeurFedAMP(STEP, self_attention=1.0, pull=NEARLY_0), Local(STEP)),
    SpecialCase(FedeRiCo(STEP, neighbours=0), Local(STEP)),
    SpecialCase(FedEM(STEP, components=1), FedAvg(STEP)),
    SpecialCase(IFCA(STEP, clusters=1), FedAvg(STEP)),
    SpecialCase(ClusteredFL(STEP, splitting=False), FedAvg(STEP)),
    SpecialCase(PFedBreD(STEP, strategy="none"), PFedMe(STEP)),
    SpecialCase(PFedMe(STEP, prox_steps=1), FedAvg(STEP), shared=True),
    SpecialCase(PFedBayes(STEP, zeta=0.0, noise=False, learn_variance=False), Local(STEP)),
    SpecialCase(Ditto(STEP, lam=0.0), Local(STEP)),
    SpecialCase(Ditto(STEP), FedAvg(STEP), shared=True),
    SpecialCase(APFL(STEP, alpha=0.0, adaptive=False), FedAvg(STEP), NO_NORM),
    SpecialCase(APFL(STEP, alpha=1.0, adaptive=False), Local(STEP)),
    SpecialCase(APFL(STEP), FedAvg(STEP), shared=True),
    SpecialCase(FedALA(STEP, layers=0), FedAvg(STEP), shared=True),
    SpecialCase(PerFedAvg(STEP, alpha=NEARLY_0, adapt_steps=0), FedAvg(STEP), ONE_STEP),
)


def _options(method: AnyMethod) -> dict[str, str]:
    """Return the options that are not at their defaults, by name, in words."""
    plain = type(method)()
    values = {each.name: getattr(method, each.name) for each in hyper_parameters(type(method))}
    return {name: f"`{name}` {_value(value)}" for name, value in values.items() if value != getattr(plain, name)}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == NEARLY_0:
        return "→ 0"
    if value == HUGE:
        return "→ ∞"
    return f"= {value:g}" if isinstance(value, float) else f"= {value}"


@cache
def _task(setting: Setting) -> Task:
    return Task(setting.module(), num_classes=3)


def _federation(setting: Setting) -> Federation:
    whole = kit.federation()
    return dataclasses.replace(whole, clients=dict(list(whole.clients.items())[-setting.clients :]))


@cache
def _trained(method: AnyMethod, setting: Setting) -> Simulation:
    task, federation = _task(setting), _federation(setting)
    sim = Simulation.start(method.scheduled(ROUNDS), task, federation, setting.plan, setting.clients, seed=0)
    for number in range(1, ROUNDS + 1):
        sim.train(number, kit.LOOP)
    return sim


def predictions(method: AnyMethod, setting: Setting, shared: bool = False) -> Tensor:
    """Return the logarithms of what each client's deployed model, or the shared one, predicts for all examples.

    Args:
        method: trained for `ROUNDS` rounds.
        setting: where.
        shared: of the shared model, which is what everybody deploys if the method says nothing else.

    Returns:
        [clients, examples, classes].
    """
    sim = _trained(method, setting)
    model = sim.method.global_model(sim.state.server) if shared else None
    views = kit.views(sim)
    with torch.no_grad():
        x = sim.federation.x
        if model is not None:
            return torch.stack([sim.task.logits(model, x).log_softmax(-1)] * setting.clients)
        each = [sim.method.predict(sim.task, tree.rows(views, i), x) for i in range(setting.clients)]
    return torch.stack(each).log_softmax(-1)


def disagreement(case: SpecialCase) -> float:
    """Return the largest difference between what both sides of a line predict."""
    ours, theirs = (predictions(method, case.setting, case.shared) for method in (case.method, case.other))
    return float((ours.double() - theirs.double()).abs().max())
