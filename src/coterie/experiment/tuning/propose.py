"""Which candidate to try next: evenly spread ones at first, then Optuna's tree-structured Parzen estimator.

The first candidate is what the user, the data set or the method has set. The next ones lie evenly in the ranges (a
Kronecker sequence with a random shift), at the same places for every method, so that all try the same step sizes.
Whatever is proposed depends on the seed, the candidate's number, the earlier scores and the candidates that are trained
at its side, so that a search that was stopped goes on as if it had not been.
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

GOOD = 4  # one in so many counts as good. With Optuna's one in ten, most of those near the best would count as bad
MIN_FOR_IMPORTANCES = 4  # scores, below which nothing is said of what mattered
SPREAD = 6  # so many are spread evenly before any is proposed from the scores
# Multiples of these lie evenly in 0..1. Of the first, the golden ratio's fractional part, the first few do already; the
# others are the fractional parts of square roots of primes.
STEPS = ((math.sqrt(5) - 1) / 2, *(math.sqrt(prime) % 1 for prime in (2, 3, 7, 11, 13, 17, 19, 23, 29, 31, 37)))
Tried = Sequence[tuple[Values, float]]  # values and their score, of which more is better


def require_optuna() -> ModuleType:
    """Import Optuna; raise `CoterieError` if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise CoterieError("the search needs Optuna: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Space, tried: Tried, number: int, seed: int, label: str, pending: Sequence[Values] = ()) -> Values:
    """Return the values of candidate `number`, from 1 on (0 is what is set already).

    Args:
        space: the ranges.
        tried: the values and scores of earlier candidates.
        number: of the candidate.
        seed: the seed of the search.
        label: whose search it is.
        pending: the values of candidates that are trained together with this one, which should not be like them.
    """
    if not space:
        return {}
    if number <= SPREAD:
        return _spread(space, number, seed)
    optuna = require_optuna()
    drawn = rng.seed_of(seed, "tune", label, str(number)) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls this sampler's options experimental
        how = {"n_startup_trials": 1, "multivariate": True, "constant_liar": True, "gamma": lambda n: -(-n // GOOD)}
        sampler = optuna.samplers.TPESampler(seed=drawn, **how)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([*frozen_trials(space, tried), *_running_trials(space, pending)])
        values: Values = study.ask({name: _distribution(each) for name, each in space.items()}).params
    return values


def _spread(space: Space, number: int, seed: int) -> Values:
    """Return the values at one place of the sequence; the first setting of each space, the step size, has the same."""
    shift = rng.generator(seed, "tune").random(max(len(space), len(STEPS)))
    places = [(shift[k] + number * STEPS[k % len(STEPS)]) % 1 for k in range(len(space))]
    return {name: _at(each, float(place)) for (name, each), place in zip(space.items(), places, strict=True)}


def _at(found: Range, place: float) -> Any:
    """Return the value of a range at a place from 0 to 1 (not included)."""
    if not isinstance(found, Numbers):
        return found.values[int(place * len(found.values))]
    low, high = (found.low, found.high + 1) if found.whole else (found.low, found.high)
    value = low * (high / low) ** place if found.log else low + place * (high - low)
    return min(int(value), int(found.high)) if found.whole else float(value)


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


def _running_trials(space: Space, pending: Sequence[Values]) -> list[Any]:
    """Return candidates without scores as Optuna has them: the sampler stays away from where they are."""
    optuna = require_optuna()
    distributions = {name: _distribution(each) for name, each in space.items()}
    running = {"state": optuna.trial.TrialState.RUNNING, "distributions": distributions}
    held = [values for values in pending if all(space[name].holds(values.get(name)) for name in space)]
    return [optuna.trial.create_trial(params=values, **running) for values in held]


def importances(space: Space, tried: Tried, seed: int) -> dict[str, float]:
    """Return what share of the scores' variation each hyper-parameter explains, by fANOVA; {} if that is unknown.

    Hutter, Hoos and Leyton-Brown, "An Efficient Approach for Assessing Hyperparameter Importance", ICML 2014.
    """
    if len(tried) < MIN_FOR_IMPORTANCES or len({score for _, score in tried}) < 2:
        return {}
    optuna = require_optuna()
    study = optuna.create_study(direction="maximize")
    study.add_trials(frozen_trials(space, tried))
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
