"""Resolve, check and build everything that a run needs before anything trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from coterie.core import device, rng
from coterie.core.errors import ConfigError
from coterie.core.task import Augment, Task
from coterie.data import Federation
from coterie.data.augment import find_augmentation
from coterie.engine import Place, make_peers
from coterie.experiment import find_callbacks, training_settings
from coterie.experiment.building import Model, task_and_metric
from coterie.experiment.config import OWN_AUGMENT, TABLES, Config
from coterie.experiment.federations import Data, federation_of, hold_out
from coterie.experiment.given import Objects, sort_settings, take_objects
from coterie.experiment.mixed import OWN_MODELS, Mixed, Models, check_method, grouped, of_clients, spelled
from coterie.experiment.privacy.budget import Budget
from coterie.experiment.privacy.install import install, rounds_of_each
from coterie.experiment.privacy.site_level import Shares
from coterie.experiment.references import check as check_table
from coterie.experiment.resolve import resolve
from coterie.experiment.settings import named_by
from coterie.experiment.training_settings import clipping_of
from coterie.methods.fields import AnyMethod, name_of, values_of
from coterie.methods.named import optimizer_of
from coterie.profiling import timed


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
        task = task_and_metric(config, self.federation, model, self.task.augment, own)[0]
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
    federation, held_out = hold_out(federation_of(config, data, own.target), config.holdout, config.data_seed)
    if config.references:
        check_table(federation)
    if config.augment is not None and not callable(augment):
        augment = find_augmentation(config.augment)
    mixed, models = None, config.models if models is None or isinstance(models, Sequence) else models
    if models is None:
        task, metric = task_and_metric(config, federation, config.model if model is None else model, augment, own)
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
            made[key], metric = task_and_metric(config, federation, model, augment, own)
    tasks = [made[model if isinstance(model, str) else id(model)] for model in wanted]
    return grouped(tasks, wanted, method), metric


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
