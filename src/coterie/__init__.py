"""Coterie: personalised federated learning, correct by law and closed form.

Public names are imported when they are first used (PEP 562), so that `import coterie` costs nothing: a command that
only prints help, or the process that a Flower node starts for every message, never imports PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.core import targets as targets
    from coterie.core import tree as tree
    from coterie.core.errors import ConfigError as ConfigError
    from coterie.core.errors import CoterieError as CoterieError
    from coterie.core.errors import CoterieWarning as CoterieWarning
    from coterie.core.errors import DataError as DataError
    from coterie.core.method import Method as Method
    from coterie.core.optimizers import SGD as SGD
    from coterie.core.optimizers import Adam as Adam
    from coterie.core.optimizers import AdamW as AdamW
    from coterie.core.optimizers import Optimizer as Optimizer
    from coterie.core.optimizers import RMSprop as RMSprop
    from coterie.core.schedules import Schedule as Schedule
    from coterie.core.task import Task as Task
    from coterie.data import Federation as Federation
    from coterie.data import from_clients as from_clients
    from coterie.engine.samplers import Sampler as Sampler
    from coterie.evaluation import Benefit as Benefit
    from coterie.evaluation.metrics import metric as metric
    from coterie.experiment.attack import attack as attack
    from coterie.experiment.plan import RunPlan as RunPlan
    from coterie.experiment.plan import plan as plan
    from coterie.experiment.result import Result as Result
    from coterie.experiment.run import resume as resume
    from coterie.experiment.run import run as run
    from coterie.experiment.setup import prepare as prepare
    from coterie.experiment.several.compare import compare as compare
    from coterie.experiment.several.compare_runs import compare_runs as compare_runs
    from coterie.experiment.several.comparison import Comparison as Comparison
    from coterie.experiment.take_home.export import export as export
    from coterie.experiment.take_home.load import load as load
    from coterie.experiment.take_home.onboard import onboard as onboard
    from coterie.experiment.tuning.recommend import recommend as recommend
    from coterie.experiment.tuning.recommendation import Recommendation as Recommendation
    from coterie.experiment.tuning.tune import Tuning as Tuning
    from coterie.experiment.tuning.tune import compare_tuned as compare_tuned
    from coterie.experiment.tuning.tune import tune as tune
    from coterie.methods import METHODS as METHODS
    from coterie.models.adapters import lora as lora

__version__ = "0.2.0.dev0"  # the only place: pyproject.toml reads it from here

_WHERE = {
    "METHODS": "methods",
    "SGD": "core.optimizers",
    "Adam": "core.optimizers",
    "AdamW": "core.optimizers",
    "Optimizer": "core.optimizers",
    "RMSprop": "core.optimizers",
    "Schedule": "core.schedules",
    "Sampler": "engine.samplers",
    "Benefit": "evaluation",
    "Comparison": "experiment.several.comparison",
    "ConfigError": "core.errors",
    "CoterieError": "core.errors",
    "CoterieWarning": "core.errors",
    "DataError": "core.errors",
    "Federation": "data",
    "Method": "core.method",
    "Recommendation": "experiment.tuning.recommendation",
    "Result": "experiment.result",
    "RunPlan": "experiment.plan",
    "Task": "core.task",
    "Tuning": "experiment.tuning.tune",
    "attack": "experiment.attack",
    "compare": "experiment.several.compare",
    "compare_tuned": "experiment.tuning.tune",
    "compare_runs": "experiment.several.compare_runs",
    "export": "experiment.take_home.export",
    "from_clients": "data",
    "load": "experiment.take_home.load",
    "lora": "models.adapters",
    "metric": "evaluation.metrics",
    "onboard": "experiment.take_home.onboard",
    "plan": "experiment.plan",
    "prepare": "experiment.setup",
    "recommend": "experiment.tuning.recommend",
    "resume": "experiment.run",
    "run": "experiment.run",
    "targets": "core",
    "tree": "core",
    "tune": "experiment.tuning.tune",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    if _WHERE[name] == "core":
        return import_module(f"coterie.core.{name}")
    value = getattr(import_module(f"coterie.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
