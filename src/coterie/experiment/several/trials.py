"""What a comparison is to run: methods, seeds and settings, resolved and checked before anything trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.core.errors import ConfigError
from coterie.core.extensions import suggest
from coterie.data.federation import Federation, split_again
from coterie.experiment.building import Model
from coterie.experiment.config import OWN_AUGMENT, TABLES, Config
from coterie.experiment.federations import Data
from coterie.experiment.find_callbacks import names_of, own_to_one_run
from coterie.experiment.given import sort_settings, take_objects
from coterie.experiment.mixed import OWN_MODELS, check_method
from coterie.experiment.resolve import resolve
from coterie.experiment.setup import Setup, prepare
from coterie.methods.fields import AnyMethod, find_method, hyper_parameters, name_of
from coterie.methods.named import optimizer_fields

Methods = Sequence[str | AnyMethod] | Mapping[str, str | AnyMethod]


@dataclass(frozen=True)
class Trials:
    """Hold all that is to be run, checked before anything trains."""

    methods: dict[str, AnyMethod]  # by label
    seeds: tuple[int, ...]
    first: Setup  # for the first seed
    prepare: Callable[[int], Setup]  # makes the setup for any seed
    references: bool = False  # also show what usual models of tables reach

    def setup(self, label: str, base: Setup) -> Setup:
        """Return what one method runs with the data of a seed.

        Beside other methods, training alone does not stop by itself: it has as many rounds as the longest of them.
        """
        made = base.with_method(self.methods[label])
        return made.without_stopping() if label == "local" and len(self.methods) > 1 else made

    def config(self, label: str, seed: int) -> Config:
        """Return the configuration of one run."""
        return self.setup(label, self.first).config.model_copy(update={"seed": seed})


def prepare_trials(
    methods: Methods,
    seeds: int | Sequence[int],
    data: Data | None = None,
    *,
    model: Model | None = None,
    head: str | None = None,
    **settings: Any,
) -> Trials:
    """Resolve and check everything before anything trains; see `compare` for the arguments.

    Raises:
        ConfigError: settings are wrong; it lists every problem.
    """
    if isinstance(settings.get("hyper"), Mapping):
        settings = {**settings.pop("hyper"), **settings}
    settings = {key: value for key, value in settings.items() if value is not None and key != "reference"}
    problems: list[str] = []
    called = settings.get("callbacks")
    if alone := own_to_one_run(called or ()):
        words = "every run needs its own, so give the class, a function, or package.module:Class:option=value"
        problems.append(f"callbacks: {', '.join(alone)} is one object; {words}")
    if called is not None:
        settings["callbacks"] = names_of(called)
    chosen = _labelled(methods, problems)
    numbers = _numbers(seeds, settings.pop("seed", 0), problems)
    own = {label: _own_names(method) for label, method in chosen.items()}
    shared = _shared(settings, own, any(isinstance(method, str) for method in chosen.values()), problems)
    built: dict[str, AnyMethod] = {}
    for label, method in chosen.items():
        mine = {key: value for key, value in settings.items() if key in shared or key in own[label]}
        try:
            built[label] = _build(method, data, model, mine)
        except ConfigError as error:
            problems += error.problems
    if settings.get("take_home") == "best" and "local" not in chosen:
        problems.append("take_home = 'best' needs the models trained alone: add local to the methods")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    common = {key: value for key, value in settings.items() if key in set(Config.model_fields) - set(TABLES)}
    if called is not None:
        common["callbacks"] = called
    if "local" not in chosen or len(chosen) == 1:
        common["take_home"] = "federated"  # there is nothing to choose from, whatever the data's default is

    def setup(seed: int, given: Data | None = data) -> Setup:
        made = prepare(next(iter(built.values())), given, model=model, head=head, seed=seed, **common)
        return dataclasses.replace(
            made, config=made.config.model_copy(update={"reference": False, "references": False})
        )

    def another(seed: int) -> Setup:
        config, federation = first.config, first.federation
        plain = config.device == "cpu" and first.held_out is None and federation.weights is None
        if isinstance(data, str | Federation | None) or not plain:
            return setup(seed)
        again = seed if config.split_seed is None else config.split_seed
        return setup(seed, split_again(federation, validation=config.validation, test=config.test, seed=again))

    first = setup(numbers[0])
    if first.mixed is not None:
        for method in built.values():
            check_method(method, first.mixed.groups)
    return Trials(built, numbers, first, another, bool(common.get("references")))


def _labelled(methods: Methods, problems: list[str]) -> dict[str, str | AnyMethod]:
    if isinstance(methods, Mapping):
        labelled = dict(methods)
    else:
        names = [method if isinstance(method, str) else name_of(method) for method in methods]
        labelled = dict(zip(names, methods, strict=True))
        if twice := sorted({name for name in names if names.count(name) > 1}):
            problems.append(
                f"methods: {', '.join(twice)} more than once; give each a name of its own, {{'name': method}}"
            )
    if not labelled:
        problems.append("methods: name at least one; 'coterie methods' lists them")
    return labelled


def _numbers(seeds: int | Sequence[int], first: Any, problems: list[str]) -> tuple[int, ...]:
    try:
        numbers = tuple(range(int(first), int(first) + seeds)) if isinstance(seeds, int) else tuple(map(int, seeds))
    except (TypeError, ValueError):
        problems.append(f"seed = {first!r} and seeds = {seeds!r}: give whole numbers")
        return (0,)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        problems.append(f"seeds = {seeds!r}: give at least one; none negative, none twice")
        return (0,)
    return numbers


def _own_names(method: str | AnyMethod) -> set[str]:
    """Return the hyper-parameters that settings may give this method; none for an instance, which has its own."""
    try:
        cls = find_method(method)[0] if isinstance(method, str) else None
    except ConfigError:  # `resolve` reports it
        cls = None
    return {hyper.name for hyper in hyper_parameters(cls)} if cls else set()


def _shared(settings: Mapping[str, Any], own: Mapping[str, set[str]], named: bool, problems: list[str]) -> set[str]:
    """Return the settings that go to all methods, and add a problem for each that goes to none.

    If a method is `named`, and not an instance, the optimiser's settings are among them.
    """
    shared = set(Config.model_fields) - {"method", *TABLES}
    if named:
        shared |= {"optimizer", *(hyper.name for hyper in optimizer_fields(settings.get("optimizer")))}
    theirs = {name for names in own.values() for name in names}
    for key in settings:
        if key not in shared | theirs:
            problems.append(f"{', '.join(own)}: none has a setting '{key}'{suggest(key, [*theirs, *shared])}")
    return shared


def _build(method: str | AnyMethod, data: Data | None, model: Model | None, settings: Mapping[str, Any]) -> AnyMethod:
    if not isinstance(method, str):
        return method
    own_model = model is not None and not isinstance(model, str)
    values = sort_settings(method, take_objects(settings)[1])
    objects = {"augment": OWN_AUGMENT, "models": [OWN_MODELS]}
    values |= {key: own for key, own in objects.items() if not isinstance(values.get(key), str | list | tuple | None)}
    values |= {"method": method, "data": data if isinstance(data, str | None) else "own-data"}
    values |= {"model": model if isinstance(model, str) else None}
    return resolve(values, own_data=not isinstance(data, str | None), own_model=own_model)[1]
