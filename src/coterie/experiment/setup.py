"""Resolve, check and build everything that a run needs before anything trains."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from coterie.core import device, rng
from coterie.core.errors import ConfigError
from coterie.core.losses import find_loss
from coterie.core.optimizers import Optimizer
from coterie.core.targets import Classes, Survival, Target
from coterie.core.task import Augment, Task, make_task
from coterie.core.user_code import in_user_code
from coterie.core.wrapped import plain
from coterie.data import Federation, from_clients, load
from coterie.data.augment import find_augmentation
from coterie.data.datasets import gather
from coterie.data.tables.silos import load_silos
from coterie.data.tasks import make_target, stacked, with_task
from coterie.data.weights import balanced
from coterie.engine import Place, make_peers
from coterie.engine.samplers import Turnout
from coterie.evaluation.metrics import Metric, add
from coterie.evaluation.scoring import default_metric, names_of
from coterie.experiment import find_callbacks, training_settings
from coterie.experiment.building import completed
from coterie.experiment.config import OWN_AUGMENT, PARTITION_SETTINGS, TABLES, Config
from coterie.experiment.mixed import OWN_MODELS, Mixed, Models, check_method, grouped, of_clients, spelled
from coterie.experiment.privacy.budget import Budget
from coterie.experiment.privacy.install import install, rounds_of_each
from coterie.experiment.privacy.site_level import Shares
from coterie.experiment.references import check as check_table
from coterie.experiment.resolve import flags, resolve
from coterie.experiment.settings import named_by
from coterie.experiment.silos import options
from coterie.experiment.training_settings import clipping_of
from coterie.methods.fields import AnyMethod, name_of, values_of
from coterie.methods.named import optimizer_values
from coterie.models import find_model
from coterie.profiling import timed

OWN_LOSS = "own-loss"  # in place of the path of a loss that has none
Client = tuple[Any, Any] | Dataset[Any]  # a pair (x, y), or a map-style dataset of such pairs
Data = str | Federation | Sequence[Client] | Mapping[str, Client]
Model = str | nn.Module | Callable[[tuple[int, ...], int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Hold all that a run needs, checked and built."""

    config: Config
    method: AnyMethod
    federation: Federation
    task: Task
    metric: str
    peers: Place | None = None  # None: a server
    held_out: Federation | None = None  # clients that take no part
    shares: Shares | None = None  # how messages are clipped and noised; None: they are sent as they are
    budget: Budget | None = None  # what the run's privacy costs; None: it has none
    callbacks: tuple[Any, ...] = ()  # names, classes, functions or objects; each run makes its own of them
    mixed: Mixed | None = None  # who has which model; None: all have the same

    def with_method(self, method: AnyMethod) -> Setup:
        """Return the same splits, model and schedule with another method."""
        method = method.scheduled(self.config.rounds)
        settings: dict[str, Any] = {"method": name_of(method), "hyper": values_of(method), **clipping_of(method)}
        settings["optimizer"] = optimizer_of(method) or self.config.optimizer
        if self.config.epsilon is not None:
            settings["noise"] = None  # to be found anew
        config = self.config.model_copy(update=settings)
        return make_private(dataclasses.replace(self, config=config, method=config.ready(method)))

    def without_stopping(self) -> Setup:
        """Return the same without callbacks and early stopping, as for a run that ends when another one does."""
        config = self.config.model_copy(update={"early_stop": None, "callbacks": None})
        return dataclasses.replace(self, config=config, callbacks=())

    def one_task(self) -> Task:
        """Return the task of all clients; raise `ConfigError` if they have different models."""
        if self.mixed is not None:
            raise ConfigError(
                ["models: clients with different models are for a run alone (coterie run): use one model"]
            )
        return self.task

    def with_model(self, model: str) -> Setup:
        """Return the same splits, method and schedule with another model, by its name."""
        config = self.config.model_copy(update={"model": model})
        own = Objects(None, self.task.own_loss, self.task.metrics)
        task = _task_and_metric(config, self.federation, model, self.task.augment, own)[0]
        return make_private(dataclasses.replace(self, config=config, task=task))


@timed("prepare")
def prepare(
    method: str | AnyMethod | None = None,
    data: Data | None = None,
    *,
    model: Model | None = None,
    models: Any = None,  # Models | None
    **settings: Any,
) -> Setup:
    """Resolve settings, load the data, and build the method, model and topology; see `coterie.run` for the arguments.

    Returns:
        All that `run_setup` needs.

    Raises:
        ConfigError: settings are wrong, or do not suit the data; it lists every problem.
        DataError: the data are missing or malformed.
    """
    if method is None:
        method = named_by(settings.get("setting"), "method", Config.model_fields["method"].default)
    own, settings = take_objects(settings)
    values = sort_settings(name_of(method) if not isinstance(method, str) else method, settings)
    own_data, own_model = not isinstance(data, str | None), model is not None and not isinstance(model, str)
    values["data"] = data if isinstance(data, str | None) else getattr(data, "name", "own-data")
    if isinstance(models, str):
        models = models.split(",")
    if models is not None:
        if model is not None:
            raise ConfigError(["give model or models, not both"])
        values["models"] = list(models) if isinstance(models, Sequence) else [OWN_MODELS]
    values["model"] = model if isinstance(model, str) else "own-model" if own_model else None
    augment = values.get("augment")
    if callable(augment):
        values["augment"] = OWN_AUGMENT
    values["method"] = method if isinstance(method, str) else "fedavg"
    called = values.get("callbacks") or ()
    values["callbacks"] = find_callbacks.names_of(values.get("callbacks"))
    if not isinstance(method, str) and any(values.get(table) for table in TABLES):
        given = [key for table in TABLES for key in values.get(table, {})]
        raise ConfigError([f"{', '.join(given)}: the method is given as an object, so set its hyper-parameters there"])
    absent = device.unavailable_reason(values["device"]) if device.is_known(values.get("device")) else None
    try:
        config, built = resolve(values, own_data=own_data, own_model=own_model)
    except ConfigError as error:
        raise ConfigError([*error.problems, *([absent] if absent else [])]) from None
    if absent:
        raise ConfigError([absent])
    if not isinstance(method, str):
        config = config.model_copy(update={"method": name_of(method), **clipping_of(method)})
        if problems := training_settings.problems_of(config):
            raise ConfigError(problems)
        built = config.ready(method)
        config = config.model_copy(update={"hyper": values_of(built)})
    federation, held_out = hold_out(_federation(config, data, own.target), config.holdout, config.data_seed)
    if config.references:
        check_table(federation)
    if config.augment is not None and not callable(augment):
        augment = find_augmentation(config.augment)
    mixed, models = None, config.models if models is None or isinstance(models, Sequence) else models
    if models is None:
        task, metric = _task_and_metric(config, federation, config.model if model is None else model, augment, own)
    else:
        mixed, metric = _mixed(config, built, federation, models, augment, own)
        task = mixed.groups[0].task
        found = [mixed.model(i) for i in range(len(federation.names))]
        config = config.model_copy(update={"models": spelled(models, federation.names, found)})
    peers = make_peers(config.topology, federation.names, config.seed)
    if peers is not None and not built.peer_to_peer:
        raise ConfigError([f"topology = {config.topology!r}: method {config.method} needs a server"])
    resolved: dict[str, Any] = own.recorded()
    resolved |= {"hyper": values_of(built), "optimizer": optimizer_of(built) or config.optimizer, "select": metric}
    staged = federation.to(torch.device(config.device))  # once, for all that follows
    made = Setup(config.model_copy(update=resolved), built, staged, task, metric, peers, held_out, mixed=mixed)
    return make_private(dataclasses.replace(made, callbacks=(called,) if isinstance(called, str) else tuple(called)))


def _mixed(
    config: Config, method: AnyMethod, federation: Federation, models: Models, augment: Augment | None, own: Objects
) -> tuple[Mixed, str]:
    """Build each client's model and group the clients by architecture; check that the run can have such clients."""
    problems = [] if config.topology == "server" else ["models: clients with different models need a server"]
    if config.privacy is not None:
        problems.append("models: privacy is not worked out for clients with different models")
    if config.holdout:
        problems.append("models: a newcomer's model is not known, so leave out holdout")
    if config.pretrained is not None:
        problems.append("models: one file of pretrained weights does not fit different models")
    if problems:
        raise ConfigError(problems)
    check_method(method)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)
        wanted = of_clients(models, federation.names)
    made: dict[Any, Task] = {}
    for model in wanted:
        key = model if isinstance(model, str) else id(model)
        if key not in made:
            made[key], metric = _task_and_metric(config, federation, model, augment, own)
    tasks = [made[model if isinstance(model, str) else id(model)] for model in wanted]
    return grouped(tasks, wanted, method), metric


class Objects(NamedTuple):
    """Hold what was given in Python, and not by name."""

    target: Target | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    metrics: tuple[str, ...]  # names, of those that were given by name, too

    def recorded(self) -> dict[str, Any]:
        """Return the settings that say in a run's folder what they were, so that it is resumed with the same."""
        found: dict[str, Any] = {} if self.loss is None else {"loss": path_of(self.loss) or OWN_LOSS}
        if self.target is not None:
            found |= {"task": self.target.kind}
            found |= {"horizons": list(self.target.times)} if isinstance(self.target, Survival) else {}
        return found


def path_of(thing: Any) -> str | None:
    """Return the import path of a function, or None if it has none: a script's own cannot be imported later."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    found = module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is thing
    return f"{module}:{name}" if found else None


def take_objects(settings: Mapping[str, Any]) -> tuple[Objects, dict[str, Any]]:
    """Divide settings into what is an object, and what can be written to a file."""
    rest = dict(settings)
    target, loss, metric = (rest.pop(key, None) for key in ("target", "loss", "metric"))
    named = [metric] if isinstance(metric, str | Metric) else list(metric or ())
    rest |= {"target": target} if isinstance(target, str) else {}
    rest |= {"loss": loss} if isinstance(loss, str) else {}
    rest["metric"] = [each if isinstance(each, str) else each.path for each in named] or None
    mine = None if isinstance(target, str) else target, None if isinstance(loss, str) else loss
    problems = [] if isinstance(mine[0], Target | None) else ["target: give a target of coterie.targets, or its column"]
    problems += (
        [] if mine[1] is None or callable(mine[1]) else ["loss: give a function of outputs and targets, or a name"]
    )
    if problems:
        raise ConfigError(problems)
    try:
        metrics = add(named)
    except ConfigError:
        if not all(isinstance(each, str) for each in named):
            raise
        metrics = ()  # `resolve` finds this again, and says it with all that is wrong
    return Objects(*mine, metrics), rest


def make_private(setup: Setup) -> Setup:
    """Return the setup with the privacy that its configuration asks for."""
    if setup.config.privacy is None:
        return setup
    rounds = rounds_of_each(setup.config, setup.federation)
    made = install(setup.config, setup.method, setup.task, setup.federation, rounds)
    # The noise that was found is written down, so that a run is resumed with the same.
    noise = setup.config.noise if made.budget is None else made.budget.noise
    config = setup.config.model_copy(update={"noise": noise})
    return dataclasses.replace(setup, config=config, method=made.method, shares=made.shares, budget=made.budget)


def _task_and_metric(
    config: Config, federation: Federation, model: Model, augment: Augment | None, given: Objects | None = None
) -> tuple[Task, str]:
    """Build the task and find the metric, and check at once all that can only be checked with the data at hand."""
    problems, participants = [], config.participants(len(federation.names))
    if participants > len(federation.names):
        problems.append(
            f"clients_per_round = {config.clients_per_round}, but there are {len(federation.names)} clients"
        )
    elif config.sampler is not None:
        try:
            Turnout(config.sampler, federation.names, federation.sizes, participants, config.seed).of(1)
        except ConfigError as error:
            problems += error.problems
    target, metrics = federation.target, given.metrics if given else add(config.metric or ())
    names = (*names_of(target), *metrics)
    metric = config.select or default_metric(target)
    if metric not in names:
        problems.append(f"select = '{metric}': {target.words} has {', '.join(names)}")
    problems += unsuited(config, target)
    task = None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.seed_of(config.seed, "model") % 2**63)
            module = completed(_module(model, federation), config.pretrained, config.adapter, config.head)
        own: dict[str, Any] = {"head": config.head, "decode": federation.decode, "bf16": config.bf16}
        own |= {"augment": augment, "loss": (given and given.loss) or named_loss(config, target), "metrics": metrics}
        task = make_task(module, federation.target, None, federation.x, **own)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(str(error))
    if task is None or problems:
        raise ConfigError(problems)
    return task, metric


def named_loss(config: Config, target: Target) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the loss that a configuration names, or None for the target's own."""
    return None if config.loss is None else find_loss(config.loss, target)


def unsuited(config: Config, target: Target) -> list[str]:
    """Return a sentence for each setting that this kind of target has no use for."""
    found = []
    if not isinstance(target, Classes) and target.kind != "regression":
        asked = {"threshold": config.threshold is not None, "calibrate": config.calibrate}
        found += [f"{key}: it is for a classification, and this is {target.words}" for key, on in asked.items() if on]
    if target.joint and config.take_home == "best":
        found.append(
            f"take_home = 'best' compares losses of single examples, and in {target.words} an example has none of its "
            "own: take_home = 'federated', or task = 'survival'"
        )
    return found


def sort_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Move hyper-parameters of the method and of the optimisers to their tables; keys of `Config` stay."""
    of_tables = flags(method, settings.get("optimizer"))
    tables = {flag[2:].replace("-", "_"): place for flag, place in of_tables.items()}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None:
            continue
        if key in TABLES and isinstance(value, Mapping):
            values[key] = {**values.get(key, {}), **value}
        elif key in tables:
            table, name = tables[key]
            values[table] = {**values.get(table, {}), name: value}
        else:
            values[key] = value
    return values


def make_federation(config: Config) -> Federation:
    """Load the federation that a configuration names."""
    return _federation(config, None, None)


def _federation(config: Config, data: Data | None, target: Target | None) -> Federation:
    federation = _without_weights(config, data, target)
    return balanced(federation) if config.class_weights else federation


def _without_weights(config: Config, data: Data | None, target: Target | None) -> Federation:
    if target is not None and (config.task or target.kind) != target.kind:
        raise ConfigError([f"task = '{config.task}', but the target is {target.words}"])
    horizons = config.horizons or ()
    if isinstance(data, Federation):
        return with_task(data if target is None else dataclasses.replace(data, declared=target), config.task, horizons)
    if config.silos:
        return load_silos(options(config), validation=config.validation, test=config.test, seed=config.data_seed)
    if isinstance(data, str | None):
        division: dict[str, Any] = {key: getattr(config, key) for key in ("data_dir", *PARTITION_SETTINGS)}
        found = load(config.data, config.data_seed, config.validation, config.test, task=config.task, **division)
        return with_task(
            found if target is None else dataclasses.replace(found, declared=target), config.task, horizons
        )
    return own_clients(config, data, target)


def own_clients(config: Config, data: Any, target: Target | None = None) -> Federation:
    """Make a federation of clients' own examples, as `from_clients` does, for the task that is asked for."""
    given = data if isinstance(data, Mapping) else {f"client-{i + 1}": each for i, each in enumerate(data)}
    pairs = {name: gather(name, each) if isinstance(each, Dataset) else each for name, each in given.items()}
    if target is None and config.task not in (None, "classification", "regression") and pairs:
        target = make_target(
            config.task, stacked([torch.as_tensor(y) for _, y in pairs.values()]), config.horizons or ()
        )
    regression = None if config.task is None else config.task == "regression"
    own: dict[str, Any] = {"validation": config.validation, "test": config.test, "seed": config.data_seed}
    return from_clients(pairs, name="own-data", regression=regression, target=target, **own)


def hold_out(federation: Federation, share: float, seed: int) -> tuple[Federation, Federation | None]:
    """Hold a random share of the clients out of a run.

    Who is held out depends on the clients' names and `seed`, not on their order.

    Returns:
        The clients that take part, and those that do not: at least one, or None if `share` is 0.

    Raises:
        ConfigError: nobody would be left to take part.
    """
    if not share:
        return federation, None
    number = max(1, round(share * len(federation.names)))
    if number >= len(federation.names):
        raise ConfigError([f"holdout = {share:g}: of {len(federation.names)} clients, nobody is left to take part"])
    drawn = sorted(federation.names, key=lambda name: rng.seed_of(seed, "holdout", name))[:number]
    parts = [{n: s for n, s in federation.clients.items() if (n in drawn) is out} for out in (False, True)]
    stay, out = (dataclasses.replace(federation, clients=part) for part in parts)
    return stay, out


def _module(model: Any, federation: Federation) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    shape = tuple(federation.x.shape[1:])
    factory = find_model(model) if isinstance(model, str) else model
    try:
        module = factory(shape, num_outputs(federation))
    except Exception as error:
        why = f"{error}{in_user_code(error)}"
        raise ConfigError([f"model '{model}' cannot be built for inputs of shape {shape}: {why}"]) from error
    if not isinstance(module, nn.Module):
        raise ConfigError([f"model '{model}' gave a {type(module).__name__}, not an nn.Module"])
    return module


def num_outputs(federation: Federation) -> int:
    """Return how many outputs a model needs: one per class or, in a regression, per target value."""
    return federation.target.num_outputs or 1


def input_dtype(federation: Federation, task: Task) -> str:
    """Return the type of numbers that a model which was taken home is given: "int64" for tokens, else "float32"."""
    whole = federation.x.dtype in (torch.int16, torch.int32, torch.int64) and task.decode is None
    return "int64" if whole else "float32"


def optimizer_of(method: AnyMethod) -> dict[str, Any]:
    """Return the name and settings of a method's optimiser, or {} if it has none."""
    optimizer = getattr(method, "optimizer", None)
    return optimizer_values(plain(optimizer)) if isinstance(optimizer, Optimizer) else {}
