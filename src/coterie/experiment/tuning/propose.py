"""Which candidate to try next: Optuna's tree-structured Parzen estimator, as a function of what was tried before.

The first candidate is what the user, the data set or the method has set. Whatever is proposed depends on the seed, the
candidate's number and the earlier scores only, so that a search that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from coterie.core import rng
from coterie.core.errors import CoterieError
from coterie.experiment.tuning.space import Numbers, Range, Space, Values

RANDOM = 6  # so many are drawn at random before any is proposed from the scores
Tried = Sequence[tuple[Values, float]]  # values and their score, of which more is better


def require_optuna() -> ModuleType:
    """Import Optuna; raise `CoterieError` if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise CoterieError("the search needs Optuna: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Space, tried: Tried, number: int, seed: int, label: str) -> Values:
    """Return the values of candidate `number`, from 1 on (0 is what is set already).

    Args:
        space: the ranges.
        tried: the values and scores of earlier candidates.
        number: of the candidate.
        seed: the seed of the search.
        label: whose search it is.
    """
    if not space:
        return {}
    optuna = require_optuna()
    drawn = rng.seed_of(seed, "tune", label, str(number)) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls this sampler's options experimental
        sampler = optuna.samplers.TPESampler(seed=drawn, n_startup_trials=RANDOM, multivariate=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials(frozen_trials(space, tried))
        values: Values = study.ask({name: _distribution(each) for name, each in space.items()}).params
    return values


def frozen_trials(space: Space, tried: Tried) -> list[Any]:
    """Return what was tried as Optuna has it, without values that are outside the space (defaults may be)."""
    optuna = require_optuna()
    finite = [score for _, score in tried if math.isfinite(score)]
    worst = min(finite, default=0.0) - (max(finite, default=0.0) - min(finite, default=0.0)) - 1e-3
    distributions = {name: _distribution(each) for name, each in space.items()}
    return [
        optuna.trial.create_trial(
            params=values, distributions=distributions, value=score if math.isfinite(score) else worst
        )
        for values, score in tried
        if all(space[name].holds(values.get(name)) for name in space)
    ]


def importances(space: Space, tried: Tried, seed: int) -> dict[str, float]:
    """Return what share of the scores' variation each hyper-parameter explains, by fANOVA; {} if that is unknown.

    Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance", ICML 2014.
    """
    optuna = require_optuna()
    study = optuna.create_study(direction="maximize")
    study.add_trials(frozen_trials(space, tried))
    if len(study.trials) < 4 or len({trial.value for trial in study.trials}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(found[name]) for name in space if name in found}


def _distribution(found: Range) -> Any:
    optuna = require_optuna()
    if not isinstance(found, Numbers):
        return optuna.distributions.CategoricalDistribution(found.values)
    if found.whole:
        return optuna.distributions.IntDistribution(int(found.low), int(found.high), log=found.log)
    return optuna.distributions.FloatDistribution(found.low, found.high, log=found.log)
