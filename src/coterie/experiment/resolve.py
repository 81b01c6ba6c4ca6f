"""Build the configuration of a run from a file, flags or keywords.

The data set's defaults fill in what is not given, and everything is checked at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from coterie.core.errors import ConfigError
from coterie.core.extensions import added, suggest
from coterie.data import SOURCES
from coterie.data.augment import find_augmentation
from coterie.data.loading import is_path
from coterie.data.user_source import defaults_of, is_user_source
from coterie.evaluation import metrics
from coterie.experiment import find_callbacks, training_settings
from coterie.experiment import silos as silo_settings
from coterie.experiment.config import DEBUGGING, OWN_AUGMENT, PARTITION_SETTINGS, Config
from coterie.experiment.privacy.install import problems_of as privacy_problems
from coterie.experiment.settings import find_setting, over
from coterie.methods.fields import AnyMethod, build, find_method, hyper_parameters
from coterie.methods.named import build_optimizer, optimizer_fields
from coterie.models import find_model
from coterie.models.adapters import find_adapter
from coterie.report import user_sections


def resolve(values: Mapping[str, Any], *, own_data: bool = False, own_model: bool = False) -> tuple[Config, AnyMethod]:
    """Check settings, fill in defaults, and build the method, scheduled for the run's rounds.

    Defaults come first from the published setting, if one is named, then from the data set, then from `Config`. The
    method's and the optimiser's own defaults fill in the rest.

    Args:
        values: settings by name; those that are None count as not given.
        own_data: the data came from Python, so no data set of that name is looked up.
        own_model: the model came from Python, so no model of that name is looked up.

    Returns:
        The configuration with its defaults, and the method.

    Raises:
        ConfigError: something is wrong; it lists every problem that was found.
    """
    problems: list[str] = []
    given = {key: value for key, value in values.items() if value is not None}
    own_files = bool(given.get("silos")) and not own_data
    base: dict[str, Any] = {}
    if "setting" in given:
        try:
            base = dict(find_setting(str(given["setting"])).values)
        except ConfigError as error:
            problems += error.problems
    base = {key: value for key, value in base.items() if not ((own_data or own_files) and key in PARTITION_SETTINGS)}
    wanted = over(base, given)
    data = str(wanted.get("data", Config.model_fields["data"].default))
    source, users = SOURCES.get(data), not own_data and not own_files and is_user_source(data)
    defaults = {} if source is None or own_data else dict(source.defaults)
    if source is None and users:
        try:
            defaults = defaults_of(data)
        except ConfigError as error:
            problems += error.problems
    if own_files:
        source, defaults = None, dict(silo_settings.DEFAULTS)
    if "partition" in wanted:
        defaults.pop("clients", None)
    if wanted.get("reference") is False:
        defaults.pop("take_home", None)  # there would be nothing to choose from
    wanted = over(defaults, wanted)
    if wanted.get("epsilon") is not None or wanted.get("noise") is not None:
        wanted = {"privacy": "record", **wanted}
    try:
        config = Config(**wanted)
    except pydantic.ValidationError as error:
        problems += [_in_words(each) for each in error.errors()]
        broken = {str(each["loc"][0]) for each in error.errors()}
        config = Config(**{k: v for k, v in wanted.items() if k not in broken})
    named = {key: getattr(config, key) for key in ("silos", "task", "horizons", *silo_settings.OPTIONS)}
    named |= {key: given[key] for key in ("data", "silos") if key in given and not named.get(key)}
    problems += silo_settings.misuses({**named, **({"data": "own data"} if own_data and named["silos"] else {})})
    divisible = source.pool if source is not None and not own_data else (is_path(config.data) or users) and not own_data
    unused = [key for key in PARTITION_SETTINGS if getattr(config, key) != Config.model_fields[key].default]
    if own_files:
        config = config.model_copy(update={"data": silo_settings.DATA})
        divisible = False
    if unused and not divisible:
        problems.append(f"{', '.join(unused)}: {config.data} is already divided among clients, so leave this out")
    if source is None and not own_data and not own_files and not users and not is_path(config.data):
        known = [*SOURCES, *added("data source")]
        problems.append(
            f"there is no data set '{config.data}'{suggest(config.data, known)}; there are {', '.join(known)}, "
            "or package.module:function"
        )
    if "local_steps" in given and "local_epochs" in given:
        problems.append("give local_epochs or local_steps, not both")
    if "fraction" in given and "clients_per_round" in given:
        problems.append("give fraction or clients_per_round, not both")
    if config.validation < 1 and config.test < 1 and config.validation + config.test >= 1:
        problems.append(f"validation ({config.validation}) and test ({config.test}) leave nothing to train on")
    if config.take_home == "best" and not config.reference:
        problems.append("take_home = 'best' needs the models trained alone: leave out reference = false")
    if config.holdout and config.topology != "server":
        problems.append("holdout: a newcomer joins through a server, so it needs topology = 'server'")
    if config.debug:
        asked = {"engine": config.engine == "stacked", "compile": config.compile, "workers": (config.workers or 1) > 1}
        if against := [f"{key} = {getattr(config, key)!r}" for key, other in asked.items() if other]:
            problems.append(f"debug runs one client at a time in this process: leave out {', '.join(against)}")
        config = config.model_copy(update=DEBUGGING)
    problems += privacy_problems(config) + training_settings.problems_of(config)
    if config.early_stop is not None and config.takes_last:
        problems.append("early_stop: with privacy, stopping by validation data would tell of these; leave it out")
    problems += find_callbacks.problems_of(config.callbacks or ()) + user_sections.problems_of(config.sections or ())
    if config.device != "cpu" and config.workers is None:
        config = config.model_copy(update={"workers": 1})
    if config.device != "cpu" and config.workers != 1:
        problems.append(
            f"workers = {config.workers}: worker processes are for the CPU; with device = {config.device!r}, 1"
        )
    try:
        own_metrics = metrics.add(config.metric or ())
    except ConfigError as error:
        own_metrics, problems = (), problems + error.problems
    if config.select is not None and not metrics.is_known(config.select):
        problems.append(f"select = '{config.select}': choose from {', '.join([*metrics.KNOWN, *own_metrics])}")
    named_by_text = {find_model: None if own_model else config.model, find_adapter: config.adapter}
    named_by_text[find_augmentation] = None if config.augment == OWN_AUGMENT else config.augment
    for find, text in named_by_text.items():
        try:
            _ = None if text is None else find(text)
        except ConfigError as error:
            problems += error.problems
    method, more = _method(config)
    problems += more
    if method is not None:
        try:
            method = config.ready(method)
        except ConfigError as error:
            problems += error.problems
    if problems or method is None:
        raise ConfigError(problems)
    return config, method


def method_of(config: Config) -> AnyMethod:
    """Build the method that a configuration names, scheduled for its rounds.

    Raises:
        ConfigError: its hyper-parameters are wrong; it lists every problem.
    """
    method, problems = _method(config)
    if problems or method is None:
        raise ConfigError(problems)
    return config.ready(method)


def _method(config: Config) -> tuple[AnyMethod | None, list[str]]:
    fixed: dict[str, Any] = {}
    problems: list[str] = []
    if config.optimizer:
        optimizer, problems = build_optimizer(config.optimizer)
        fixed["optimizer"] = optimizer
    try:
        cls, more = find_method(config.method)
    except ConfigError as error:
        cls, more = None, error.problems
    if cls is None:
        return None, problems + more
    method, more = build(cls, config.hyper, f"method {config.method}", **fixed)
    return (None if problems else method), problems + more


def flags(method: str, optimizer: Any = None) -> dict[str, tuple[str, str]]:
    """Return {flag: (table, key)} for the settings that live in a table: the method's and the optimisers'.

    With an `optimizer` of the user's own, as a setting has it, those of its fields are among them.
    """
    try:
        cls, _ = find_method(method)
    except ConfigError:  # it cannot be imported: `resolve` reports that, with everything else that is wrong
        cls = None
    found: dict[str, tuple[str, str]] = {}
    for each in optimizer_fields(optimizer):
        found[each.flag] = ("optimizer", each.name)
    found["--optimizer"] = ("optimizer", "name")
    if cls is not None:
        found |= {hyper.flag: ("hyper", hyper.name) for hyper in hyper_parameters(cls)}
    return found


def _in_words(error: Any) -> str:
    """Return one of pydantic's errors as a sentence that names the setting."""
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        known = [*Config.model_fields]
        return f"there is no setting '{key}'{suggest(key, known)}; there are {', '.join(known)}"
    words = error["msg"].removeprefix("Value error, ")
    return f"{key} = {error['input']!r}: {words[0].lower()}{words[1:]}"


def default_out(config: Config) -> Path:
    """Return `runs/METHOD-DATA-seedN`, with a number at the end if that folder exists."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{config.method}-{config.data}-seed{config.seed}")
    base = Path(os.environ.get("COTERIE_RUNS", "runs")) / safe
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path
